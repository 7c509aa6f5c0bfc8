"""The command line: a list of studies, one study, or a check of all records.

python -m studies
python -m studies NAME --help
python -m studies check
"""

import sys
from collections.abc import Sequence

from studies import STUDIES
from studies.check import problems
from studies.command import command


def main(argv: Sequence[str]) -> int:
    """Runs the study of that name with its options; without a name, lists them all."""
    if not argv or argv[0] in ("-h", "--help"):
        width = max(map(len, STUDIES))
        print("usage: python -m studies NAME [--help | OPTIONS], or check\n\nThe studies:")
        for name, study in STUDIES.items():
            print(f"  {name:{width}}  {(study.__doc__ or '').splitlines()[0]}")
        return 0
    if argv[0] == "check":
        found = list(problems(STUDIES))
        print(*found, f"{len(found)} problems", sep="\n")
        return 1 if found else 0
    if argv[0] not in STUDIES:
        print(f"error: no study {argv[0]!r}; there are {', '.join(STUDIES)}", file=sys.stderr)
        return 2
    return command(STUDIES[argv[0]], argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
