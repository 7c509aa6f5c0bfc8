"""Run benchmarks by name, or all of them: `python -m benchmarks [NAME [OPTIONS]]`."""

import ast
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

NAMES = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))


def summary(name: str) -> str:
    """Return the first line of a benchmark's docstring."""
    text = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]


def main() -> int:
    """Run a benchmark, or all of them even if some fail; return 1 if any failed."""
    if len(sys.argv) > 1:
        name, options = sys.argv[1], sys.argv[2:]
        if name in ("-h", "--help"):
            lines = [f"{name:{max(map(len, NAMES))}}  {summary(name)}" for name in NAMES]
            print(__doc__, *lines, "", "NAME --help lists its options.", sep="\n  ")
            return 0
        if name not in NAMES:
            sys.exit(f"python -m benchmarks: no benchmark {name!r}; there are {', '.join(NAMES)}")
        return run(name, options)
    return max([run(name, ["--overwrite"]) for name in NAMES])


def run(name: str, options: Sequence[str]) -> int:
    """Run a benchmark and return its exit status, including one set by `sys.exit`."""
    sys.argv = [f"python -m benchmarks {name}", *options]
    try:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
