"""Programs outside the package: allowed imports, and only public names of the package."""

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import test_layering

ROOT = Path(__file__).parents[2]

# Each program may import from the programs before it. The oracles serve tests and benchmarks.
PROGRAMS = ("studies", "examples", "tests.oracles", "benchmarks")


def imports(root: Path, program: str) -> Iterator[tuple[str, str]]:
    """Yield the files of a program with the names that they import."""
    for path in sorted((root / program.replace(".", "/")).rglob("*.py")):
        for name, _ in test_layering.imports(path.read_text(encoding="utf-8")):
            yield path.relative_to(root).as_posix(), name


def private(root: Path, program: str) -> set[str]:
    """Return imports of private modules of the package or the studies."""
    found = set()
    for file, name in imports(root, program):
        top, *inner = name.split(".")
        hidden = [k for k, part in enumerate(inner) if part[0] == "_" and part[:2] != "__"]
        if top in {"manifoldmuon", "manifoldmuon_verify", "studies"} - {program} and hidden:
            found.add(f"{file} imports {'.'.join([top, *inner[: hidden[0] + 1]])}")
    return found


@pytest.mark.parametrize("program", PROGRAMS)
def test_imports_are_public_and_of_earlier_programs(program):
    assert private(ROOT, program) == set()
    allowed = PROGRAMS[: PROGRAMS.index(program) + 1]
    found = [name for _, name in imports(ROOT, program)]
    assert len(found) > 10  # the search works
    later = [name for name in found if not name.startswith(tuple(f"{x}." for x in allowed))]
    assert {name.split(".")[0] for name in later} & {*PROGRAMS, "tests", "docs"} == set()


def test_wheel_has_no_programs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    targets = project["tool"]["hatch"]["build"]["targets"]
    assert targets["wheel"]["packages"] == ["manifoldmuon", "manifoldmuon_verify"]
    assert {x.split(".")[0] for x in PROGRAMS} <= set(targets["sdist"]["include"])


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("from manifoldmuon.linalg._svd import SVD", "manifoldmuon.linalg._svd"),
        ("from manifoldmuon.linalg import _svd", "manifoldmuon.linalg._svd"),
        ("import manifoldmuon.linalg._svd", "manifoldmuon.linalg._svd"),
        ("def f():\n    from studies import _private", "studies._private"),
    ],
)
def test_private_import_is_detected(tmp_path, line, name):
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "a.py").write_text(line, encoding="utf-8")
    assert private(tmp_path, "examples") == {f"examples/a.py imports {name}"}
