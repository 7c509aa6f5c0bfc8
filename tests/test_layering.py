"""Layers of the package: imports only go down, checked in the source."""

import ast
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "manifoldmuon"

# A module imports from its own part of the package, and public names from parts on lower floors.
# `optim` and `modules` share a floor: neither imports the other. The package's own `__init__` is
# above everything that it exposes. docs/design.md has the same table.
FLOORS = {
    "_internal": 0,
    "linalg": 1,
    "norms": 2,
    "_internal.directions": 3,
    "manifolds.retractions": 3,
    "manifolds.solvers": 3,
    "manifolds": 4,
    "optim": 5,
    "modules": 5,
    "bounds": 6,
    "minimize": 6,
    "frameworks": 6,
    "robustness": 7,
    "": 8,
    "testing": 9,
    "checkpoints": 9,
    "lab": 10,
    "contrib": 11,
}

# Certificates and attacks must not depend on the optimizers: weights may come from anywhere.
APART = {("robustness", "optim")}

# Optional packages that functions may import.
DELAYED = {"matplotlib", "safetensors"}

# Optional packages of parts that users import by name.
EXTRAS = {
    "checkpoints": {"orbax"},
    "frameworks": {"equinox", "flax", "haiku"},  # each in its own module
}


class Import(NamedTuple):
    """An import of `target` by `module` in `line`; `delayed` if inside a function."""

    module: str
    target: str
    line: int
    delayed: bool

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


def modules(root: Path) -> dict[str, Path]:
    """Return the path of every module of the package by dotted name."""
    found = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(root: Path) -> list[Import]:
    """Return all imports of all modules, including imports inside functions."""
    known = modules(root)
    return [
        Import(name, target, node.lineno, delayed)
        for name, path in known.items()
        for node, delayed in walk(ast.parse(path.read_text(encoding="utf-8")), False)
        for target in targets(node, name, path, known)
    ]


def walk(node: ast.AST, delayed: bool) -> Iterator[tuple[ast.stmt, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, delayed
        function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from walk(child, delayed or function)


def targets(node: ast.stmt, name: str, path: Path, known: dict[str, Path]) -> list[str]:
    """Return the names that a statement imports, resolved to modules if possible."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert isinstance(node, ast.ImportFrom)
    base = node.module or ""
    if node.level:
        package = name.split(".") if path.stem == "__init__" else name.split(".")[:-1]
        above = package[: len(package) - node.level + 1]
        base = ".".join([*above, base] if base else above)
    inner = [f"{base}.{alias.name}" for alias in node.names]
    return [target if target in known else base for target in inner]


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def part(module: str) -> str:
    """Return the part of the package: `manifolds` for `manifoldmuon.manifolds._stiefel`."""
    name = module.removeprefix(PACKAGE).removeprefix(".")
    found = [key for key in FLOORS if key and inside(name, key)]
    return max(found, key=len) if found else ".".join(name.split(".")[:1])


def is_allowed(module: str, target: str) -> bool:
    own, other = part(module), part(target)
    return own == other or (FLOORS[other] < FLOORS[own] and (own, other) not in APART)


def upward(root: Path) -> list[str]:
    return [
        str(found)
        for found in imports(root)
        if inside(found.target, PACKAGE) and not is_allowed(found.module, found.target)
    ]


def private(root: Path) -> list[str]:
    """Return imports of private names from another part of the package."""
    return [
        str(found)
        for found in imports(root)
        if inside(found.target, PACKAGE)
        and part(found.module) != part(found.target)
        and not inside(part(found.target), "_internal")
        and any(name.startswith("_") for name in found.target.split("."))
    ]


def delayed(root: Path) -> list[str]:
    return [
        str(found)
        for found in imports(root)
        if found.delayed and found.target.split(".")[0] not in DELAYED
    ]


def cycle(root: Path) -> list[str]:
    """Return the modules of an import cycle, or an empty list."""
    graph: dict[str, set[str]] = {name: set() for name in modules(root)}
    for found in imports(root):
        if inside(found.target, PACKAGE):
            graph[found.module].add(found.target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_every_part_has_a_floor():
    assert {part(name) for name in modules(ROOT)} == set(FLOORS)


def test_docs_list_the_same_floors():
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (`[^|]*) \|", text, re.MULTILINE)
    told = {name: int(floor) for floor, names in rows for name in re.findall(r"`([\w.]+)`", names)}
    assert told == {name or PACKAGE: floor for name, floor in FLOORS.items()}


def test_no_private_imports():
    assert private(ROOT) == []


def test_imports_go_down():
    assert upward(ROOT) == []


def test_no_cycles():
    assert cycle(ROOT) == []


def test_no_delayed_imports():
    assert delayed(ROOT) == []


def test_only_declared_packages_are_imported():
    """Module-level imports use only the core dependencies, so the extras stay optional."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {entry.split(">=")[0] for entry in project["dependencies"]}
    standard = {*sys.stdlib_module_names, PACKAGE}
    undeclared = {
        str(found)
        for found in imports(ROOT)
        if not found.delayed
        and found.target.split(".")[0]
        not in declared | standard | EXTRAS.get(part(found.module), set())
    }
    assert undeclared == set()


def write(root: Path, files: dict[str, str]) -> Path:
    for name, source in ({"__init__.py": ""} | files).items():
        path = root / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source), encoding="utf-8")
    return root


PACKAGES = {f"{name.replace('.', '/')}/__init__.py": "" for name in FLOORS if name}


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("linalg/_a.py", "import manifoldmuon.norms"),
        ("linalg/_a.py", "from manifoldmuon import norms"),
        ("linalg/_a.py", "from ..norms import _norm"),
        ("linalg/__init__.py", "from ..norms import _norm"),
        ("linalg/_a.py", "from manifoldmuon import __version__"),
        ("norms/_a.py", "if True:\n    from manifoldmuon.manifolds import Stiefel"),
        ("optim/_a.py", "from manifoldmuon.modules import Linear"),
        ("modules/_a.py", "def f():\n    from manifoldmuon.optim import muon"),
        ("modules/_a.py", "from manifoldmuon.bounds import bound"),
        ("bounds/_a.py", "from manifoldmuon.robustness import pgd"),
        ("robustness/_a.py", "from manifoldmuon.optim import muon"),
        ("optim/_a.py", "from manifoldmuon.lab import stable_rank"),
        ("testing/_a.py", "import manifoldmuon.lab as lab"),
        ("optim/_a.py", "from manifoldmuon.contrib import Isospectral"),
        ("manifolds/solvers/_a.py", "from manifoldmuon.manifolds import Stiefel"),
        ("manifolds/solvers/_a.py", "from manifoldmuon.manifolds._stiefel import Stiefel"),
        ("manifolds/solvers/_a.py", "from manifoldmuon.manifolds.retractions import Polar"),
        ("manifolds/solvers/_a.py", "from manifoldmuon.optim import muon"),
        ("manifolds/retractions/_a.py", "from manifoldmuon.manifolds._stiefel import Stiefel"),
    ],
)
def test_upward_or_sideways_import_is_detected(tmp_path, name, source):
    extra = {"manifolds/_stiefel.py": "", "norms/_norm.py": "", name: source}
    assert len(upward(write(tmp_path, PACKAGES | extra))) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("norms/_a.py", "from manifoldmuon.linalg import msign"),
        ("manifolds/_a.py", "from .solvers import ADMM\nfrom ._manifold import Manifold"),
        ("manifolds/solvers/_a.py", "from manifoldmuon.manifolds.solvers._b import B"),
        ("lab/_a.py", "import jax\nfrom manifoldmuon import optim, testing, __version__"),
    ],
)
def test_downward_import_is_allowed(tmp_path, name, source):
    extra = {"manifolds/_manifold.py": "", "manifolds/solvers/_b.py": "", name: source}
    root = write(tmp_path, PACKAGES | extra)
    assert upward(root) == []
    assert private(root) == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("norms/_a.py", "from manifoldmuon.linalg._b import b"),
        ("norms/_a.py", "from manifoldmuon.linalg import _b"),
        ("norms/_a.py", "import manifoldmuon.linalg._b"),
        ("manifolds/_a.py", "from .solvers._b import B"),
        ("lab/_a.py", "from ..linalg import _b"),
    ],
)
def test_private_import_is_detected(tmp_path, name, source):
    extra = {"linalg/_b.py": "", "manifolds/solvers/_b.py": "", name: source}
    assert len(private(write(tmp_path, PACKAGES | extra))) == 1


def test_import_cycle_is_detected(tmp_path):
    files = {
        "linalg/__init__.py": "from ._a import a",
        "linalg/_a.py": "from ._b import b",
        "linalg/_b.py": "from manifoldmuon.linalg import a",
    }
    names = {f"{PACKAGE}.linalg", f"{PACKAGE}.linalg._a", f"{PACKAGE}.linalg._b"}
    assert set(cycle(write(tmp_path, files))) == names


def test_delayed_import_is_detected(tmp_path):
    source = """
        import jax

        class A:
            def f(self):
                import matplotlib.pyplot
                from manifoldmuon.linalg import msign
                import jax.numpy
        """
    found = delayed(write(tmp_path, {"linalg/__init__.py": "", "lab/_a.py": source}))
    assert found == [
        "manifoldmuon.lab._a:7 imports manifoldmuon.linalg",
        "manifoldmuon.lab._a:8 imports jax.numpy",
    ]
