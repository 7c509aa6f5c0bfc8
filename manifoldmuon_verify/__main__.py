"""`python -m manifoldmuon_verify CERTIFICATE [--weights FILE] [--images FILE]`."""

import argparse
import sys
from collections.abc import Sequence

from manifoldmuon_verify import Refused, verify


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 if all claims are proved, else 1, with a one-line reason."""
    parser = argparse.ArgumentParser(
        prog="python -m manifoldmuon_verify",
        description="Derive anew what a certificate of robustness claims, or refuse it.",
    )
    parser.add_argument("certificate", help="the JSON file, or the directory of all three files")
    parser.add_argument("--weights", help="the safetensors file of the weights")
    parser.add_argument("--images", help="the safetensors file of images and labels")
    options = parser.parse_args(arguments)
    try:
        print(verify(**vars(options)))
    except Refused as refusal:
        print(f"refused: {refusal}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
