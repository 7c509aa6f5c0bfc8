"""Layers of the package: imports only go down, checked in the source."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "manifoldmuon"

# A module imports from its own part of the package, and public names from parts on lower floors.
# Parts on one floor do not import each other. The package's own `__init__` (the part "") is above
# everything that it exposes. The floors are the table in docs/design.md.
PAGE = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
FLOORS = {
    name.removeprefix(PACKAGE): int(floor)
    for floor, names in re.findall(r"^\| (\d+) \| (`[^|]*) \|", PAGE, re.MULTILINE)
    for name in re.findall(r"`([\w.]+)`", names)
}
# Certificates and attacks must not depend on the optimizers: weights may come from anywhere.
APART = {("robustness", "optim")}
# Optional packages that functions may import.
DELAYED = {"matplotlib", "safetensors"}
# Optional packages of parts that users import by name.
EXTRAS = {
    "checkpoints": {"orbax"},
    "frameworks": {"equinox", "flax"},  # each in its own module
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DECLARED = {entry.split(">=")[0] for entry in PROJECT["dependencies"]} | sys.stdlib_module_names
# In the same wheel, and below everything: it imports neither JAX nor the package.
DECLARED |= {"manifoldmuon_verify"}


def part(module: str) -> str:
    """Return the part of the package: `manifolds` for `manifoldmuon.manifolds._stiefel`."""
    name = module.removeprefix(PACKAGE).removeprefix(".")
    found = [key for key in FLOORS if name == key or name.startswith(f"{key}.")]
    return max(found, key=len, default=name.split(".")[0])


def imports(source: str, known: set[str] | None = None) -> Iterator[tuple[str, bool]]:
    """Yield each import and whether it is in a function: modules of `known`, or all names."""
    tree = ast.parse(source)
    functions = [x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef)]
    delayed = {node for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node in delayed) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                module = known is not None and inner not in known
                yield str(node.module) if module else inner, node in delayed


def violation(module: str, target: str, delayed: bool) -> str:
    """Name the rule that an import breaks; return an empty string if there is none."""
    own, other, top = part(module), part(target), target.split(".")[0]
    if delayed:
        return "" if top in DELAYED else "delayed"
    if top != PACKAGE:
        return "" if top in DECLARED | EXTRAS.get(own, set()) else "undeclared"
    if own == other:
        return ""
    if FLOORS[other] >= FLOORS[own] or (own, other) in APART:
        return "upward"
    return "private" if "._" in target and not other.startswith("_internal") else ""


def test_imports_follow_the_layers():
    sources = {}
    for path in (ROOT / PACKAGE).rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        sources[name] = path.read_text(encoding="utf-8")
    found = {name: list(imports(source, set(sources))) for name, source in sources.items()}
    assert {part(name) for name in sources} == set(FLOORS)
    broken = [(a, b, violation(a, b, late)) for a in found for b, late in found[a]]
    assert [each for each in broken if each[-1]] == []
    # Raises if modules import each other.
    TopologicalSorter({a: {b for b, _ in found[a]} for a in found}).prepare()


@pytest.mark.parametrize(
    ("module", "source", "rule"),
    [
        ("linalg._a", "import manifoldmuon.norms", "upward"),
        ("linalg._a", "from manifoldmuon import norms", "upward"),
        ("optim._a", "if True:\n    from manifoldmuon.modules import Linear", "upward"),
        ("robustness._a", "from manifoldmuon.optim import muon", "upward"),
        ("manifolds.solvers._a", "from manifoldmuon.manifolds import Stiefel", "upward"),
        ("manifolds._a", "from manifoldmuon.manifolds.solvers import SkewPolar", ""),
        ("norms._a", "from manifoldmuon.linalg import _b", "private"),
        ("norms._a", "from manifoldmuon._internal.matrices.arrays import product", ""),
        ("lab._a", "class A:\n    def f(self):\n        import jax.numpy", "delayed"),
        ("lab._a", "def f():\n    import matplotlib.pyplot", ""),
        ("optim._a", "import flax", "undeclared"),
    ],
)
def test_violations_are_named(module, source, rule):
    ((target, delayed),) = imports(source, {f"{PACKAGE}.norms", f"{PACKAGE}.linalg._b"})
    assert violation(f"{PACKAGE}.{module}", target, delayed) == rule
