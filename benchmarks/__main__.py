"""Run benchmarks by name, or all of them: `python -m benchmarks [NAME [OPTIONS]]`."""

import ast
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

NAMES = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))


def summary(name: str) -> str:
    """Return the first line of a benchmark's docstring, and how long it takes."""
    text = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    first, _, rest = (ast.get_docstring(ast.parse(text)) or "").partition("\n")
    duration = rest.partition(f"python -m benchmarks {name}    # ")[2].partition(";")[0]
    return f"{first} ({duration})"


def main() -> int:
    """Run a benchmark, or all of them even if some fail; return the largest exit status."""
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
    """Run a benchmark in a process, as some set JAX's devices, and print how long it took; return
    its exit status."""
    start = time.monotonic()
    status = subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *options]).returncode
    print(f"{name}: {(time.monotonic() - start) / 60:.1f} minutes")
    return status


if __name__ == "__main__":
    sys.exit(main())
