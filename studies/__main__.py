"""The command line: list the studies, run a study, or check all records.

python -m studies
python -m studies NAME --help
python -m studies check
"""

import sys
from collections.abc import Sequence

from studies import STUDIES
from studies.command import command


def main(argv: Sequence[str]) -> int:
    """Run the named study with its options; without a name, list all studies."""
    if not argv or argv[0] in ("-h", "--help"):
        width = max(map(len, STUDIES))
        print("usage: python -m studies NAME [--help | OPTIONS], or check\n\nThe studies:")
        for name in STUDIES:
            print(f"  {name:{width}}  {STUDIES.question(name)}")
        return 0
    if argv[0] == "check":
        from studies import check  # imports every study

        return check.main()
    if argv[0] not in STUDIES:
        print(f"error: no study {argv[0]!r}; there are {', '.join(STUDIES)}", file=sys.stderr)
        return 2
    return command(STUDIES[argv[0]], argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
