"""`python -m manifoldmuon_verify CERTIFICATE [--weights FILE] [--images FILE]`."""

import argparse
import sys
from collections.abc import Sequence

from manifoldmuon_verify import Refused, verify


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 if everything that is claimed is proved, else 1 and one line."""
    parser = argparse.ArgumentParser(
        prog="python -m manifoldmuon_verify",
        description="Derive anew what a certificate of robustness claims, or refuse it.",
    )
    parser.add_argument("certificate", help="the JSON file, or the directory of all three files")
    parser.add_argument("--weights", help="the safetensors file of the weights")
    parser.add_argument("--images", help="the safetensors file of images and labels")
    options = parser.parse_args(arguments)
    try:
        print(verify(options.certificate, options.weights, options.images))
    except Refused as refusal:
        print(f"refused: {refusal}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
