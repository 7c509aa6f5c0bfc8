"""Run README's first command and every `pip install` line of the pages as a stranger would.

    python tests/check_installs.py                # all
    python tests/check_installs.py train flax     # README's command, and the line '.[flax]'

In a copy of the source, `make train` makes its own environment first. Then each line gets an
environment of its own, with just what it installs, for the programs of the pages that show it and
for COMMANDS; a page that shows no line promises `pip install .`. The suite runs where everything
is installed and cannot see a missing import. This script imports only the standard library.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
_LINE = re.compile(r"pip install (?:-e )?'?\.(?:\[([\w,]+)\])?'?(?=[\s`]|$)", re.MULTILINE)
_PROGRAM = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_TRAIN = ["make", "train", "ARGS=--steps 20 --seeds 0 1"]
# `make train` asks the index; the other lines take wheels that are fetched once.
_FETCH = ["-m", "pip", "wheel", "--quiet", "--wheel-dir", "../wheels", "hatchling"]
_INSTALL = ["-m", "pip", "install", "--quiet", "--no-index", "--find-links", "../wheels"]
_SKIPPED = {"tpu"}  # the compiler for TPUs is larger than everything else together

_IMPORT_ALL = """
import importlib, pkgutil, manifoldmuon as mm
for module in pkgutil.iter_modules(mm.__path__, "manifoldmuon."):
    if not module.name.endswith("checkpoints"):
        importlib.import_module(module.name)
"""
_PROOF = """
import jax.numpy as jnp, manifoldmuon as mm, manifoldmuon_verify
from manifoldmuon.modules import Linear
proof = mm.robustness.certify(Linear(2, 4), jnp.eye(4, 2).T, jnp.eye(4), jnp.arange(4) % 2)
print(manifoldmuon_verify.verify(mm.robustness.export("proof", proof)))
"""

COMMANDS: dict[str, list[list[str]]] = {
    "": [["-c", _IMPORT_ALL]],
    "flax": [["-c", f"from manifoldmuon.frameworks import {name}"] for name in ("nnx", "linen")],
    "equinox": [["-c", "from manifoldmuon.frameworks import equinox"]],
    "certificates": [["-c", _PROOF], ["-m", "manifoldmuon_verify", "--help"]],
    "studies": [["-m", "studies"], ["-m", "studies", "newton-schulz", "--seeds", "0"]],
    "examples": [
        ["-m", "studies"],
        ["-m", "studies.reproduction", "--table"],
        ["-m", "benchmarks", "--help"],
        *[["-c", f"from examples import {call}"] for call in (
            "hello_world; hello_world.main(steps=5)", "gpt; gpt.main(steps=2, width=16)",
            "digits; digits.main(5)", "certified; certified.main(steps=5, width=16)",
            "weight_erasure; weight_erasure.main(5, 16)", "retractions; retractions.main(5)",
            "learning_rate_transfer as f; f.main(widths=(16,), steps=5)",
        )],
        ["-c", "from examples.frameworks import plain; plain.train(3)"],
    ],
    "examples,flax": [
        ["-c", "from examples import lora; lora.main()"],
        ["-c", "from examples import rotate_and_quantize as f; f.main(60, 5)"],
        ["-c", "from examples.frameworks import nnx; nnx.train(3)"],
        ["-c", "from examples.frameworks import linen; linen.train(3)"],
    ],
    "equinox,examples": [["-c", "from examples.frameworks import equinox; equinox.train(3)"]],
}  # fmt: skip
"""Arguments of Python for each line, by its extras in alphabetical order."""


def promises() -> dict[str, list[Path]]:
    """Return the pages with a program for each install line, by its extras."""
    found: dict[str, list[Path]] = {extras: [] for extras in COMMANDS}
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.*"))]:
        tutorial = page.parent.name == "tutorials"  # its .md is built
        if page.suffix != (".py" if tutorial else ".md") or page.name == "changelog.md":
            continue
        text = page.read_text(encoding="utf-8")
        lines = {",".join(sorted((line or "").split(","))) for line in _LINE.findall(text)}
        program = tutorial or bool(_PROGRAM.search(text))
        for extras in lines - _SKIPPED or ({""} if program else ()):
            found.setdefault(extras, []).extend([page] * program)
    return found


def run_page(page: Path) -> None:
    """Run the programs of a page with an install line; take only the imports of other programs.

    The suite runs the others whole, and the build of the documentation the tutorials.
    """
    text = page.read_text(encoding="utf-8")
    programs = [text] if page.suffix == ".py" else _PROGRAM.findall(text)
    names = {"__name__": "__main__"}
    for program in programs:
        tree = ast.parse(program)
        if page.suffix == ".py" or not _LINE.search(text):
            imports = [x for x in ast.walk(tree) if isinstance(x, ast.Import | ast.ImportFrom)]
            tree = ast.Module([*imports], [])
        exec(compile(tree, str(page), "exec"), names)


def copy_source(folder: Path) -> Path:
    """Copy what git has or would add, as a clone has it."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def failures(extras: str, pages: Sequence[Path], source: Path) -> Iterator[str]:
    """Install one line in an environment of its own, run its programs, and yield what fails."""
    folder = source.parent / f"env-{extras or 'alone'}"
    line = f".[{extras}]" if extras else "."
    if extras == "examples":  # the environment that `make train` makes
        python = source / ".venv" / "bin" / "python"
    else:
        venv.create(folder, with_pip=True)
        python = folder / "bin" / "python"
        yield from _run([python, *_INSTALL, line], source, line)
    work = folder / "work"  # where programs write
    work.mkdir(parents=True, exist_ok=True)
    # Compile fast, not well. Who installs an extra works from the root of the source.
    variables = {"XLA_FLAGS": "--xla_backend_optimization_level=0", "MPLBACKEND": "agg"}
    variables |= {"PYTHONPATH": str(source)} if extras else {}
    for arguments in COMMANDS.get(extras, []):
        yield from _run([python, *arguments], work, f"{line}: {' '.join(arguments)}", variables)
    for page in pages:
        command = [python, source / "tests" / Path(__file__).name, "--run", page.relative_to(ROOT)]
        yield from _run(command, work, f"{line}: {page.relative_to(ROOT)}", variables)


def _run(
    command: Sequence[str | Path], folder: Path, name: str, variables: Mapping[str, str] = {}
) -> Iterator[str]:
    """Run a command; print its time, and yield its name and output if it fails."""
    clock = time.monotonic()
    done = subprocess.run(
        [str(word) for word in command], cwd=folder, text=True, check=False,
        env=os.environ | {"PIP_NO_COMPILE": "1"} | dict(variables),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    result, words = "failed" if done.returncode else "passed", " ".join(name.split())
    print(f"{time.monotonic() - clock:6.1f} s  {result}  {words[:110]}", flush=True)
    if done.returncode:
        yield f"{name}\n{done.stdout[-3000:]}"


def main(argv: Sequence[str]) -> int:
    """Check the named lines, or all; return the exit status."""
    if argv[:1] == ["--run"]:
        run_page(ROOT / argv[1])
        return 0
    found = promises()
    lines = [",".join(sorted(name.split(","))) for name in argv] or ["train", *found]
    if unknown := [name for name in lines if name not in ("train", ".", *found)]:
        print(f"no page shows {unknown}; there are train and {[*found]}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        source = copy_source(Path(folder) / "source")
        wrong = []
        if {"train", "examples"} & {*lines}:
            wrong += _run(_TRAIN, source, " ".join(_TRAIN))
        rest = [name.removeprefix(".") for name in lines if name != "train"]
        extras = sorted({extra for name in rest for extra in name.split(",") if extra})
        if needed := [name for name in rest if name != "examples"]:
            venv.create(Path(folder) / "fetch", with_pip=True)
            python = Path(folder) / "fetch" / "bin" / "python"
            everything = f".[{','.join(extras)}]" if extras else "."
            wrong += _run([python, *_FETCH, everything], source, f"wheels for {needed}")
        with ThreadPoolExecutor(2) as pool:
            for failed in pool.map(lambda name: [*failures(name, found[name], source)], rest):
                wrong += failed
    print(*wrong, f"{len(wrong)} failed", sep="\n\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
