"""`make train`: the study of the main job, as a program."""

import sys

from studies.command import command
from studies.digits.study import Digits

if __name__ == "__main__":
    sys.exit(command(Digits, sys.argv[1:]))
