"""Runs benchmarks by name, or all of them: `python -m benchmarks [NAME [OPTIONS]]`."""

import runpy
import sys

NAMES = ("msign_accuracy", "solvers", "drift", "tuning")


def main() -> None:
    if len(sys.argv) > 1:
        name, options = sys.argv[1], sys.argv[2:]
        if name not in NAMES:
            sys.exit(f"python -m benchmarks: no benchmark {name!r}; there are {', '.join(NAMES)}")
        runs = [(name, options)]
    else:
        runs = [(name, ["--overwrite"]) for name in NAMES]
    for name, options in runs:
        sys.argv = [f"python -m benchmarks {name}", *options]
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")


if __name__ == "__main__":
    main()
