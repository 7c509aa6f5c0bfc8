"""`python -m manifoldmuon_verify CERTIFICATE [--weights FILE] [--images FILE]`."""

import argparse
import math
import sys
from collections.abc import Sequence

from manifoldmuon_verify import Refused, verify
from manifoldmuon_verify._limits import GIBIBYTES, SECONDS


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 if all claims are proved, else 1, with a one-line reason."""
    parser = argparse.ArgumentParser(
        prog="python -m manifoldmuon_verify",
        description="Derive anew what a certificate of robustness claims, or refuse it.",
    )
    parser.add_argument("certificate", help="the JSON file, or the directory of all three files")
    parser.add_argument("--weights", help="the safetensors file of the weights")
    parser.add_argument("--images", help="the safetensors file of images and labels")
    parser.add_argument("--seconds", type=_positive, default=SECONDS, metavar="S",
                        help="estimated time that may be spent (default: %(default)g)")  # fmt: skip
    parser.add_argument("--gibibytes", type=_positive, default=GIBIBYTES, metavar="G",
                        help="memory that may be used, and with it the size of files "
                             "(default: %(default)g)")  # fmt: skip
    options = parser.parse_args(arguments)
    try:
        print(verify(**vars(options)))
    except Refused as refusal:
        print(f"refused: {refusal}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
