"""Calls in the prose of the pages: names exist, and arguments fit their signatures."""

import ast
import functools
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import equinox
import jax
import optax
import pytest
from flax import nnx

import manifoldmuon as mm

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])
BLOCK = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)  # other tests run them
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")

# Names of other libraries (on migration pages), and formulas.
FOREIGN = re.compile(
    r"GramEigh|InverseRoot|ManifoldParameter|QDWH|TrustRegions|budgets|dataclasses\.replace|flatten"
    r"|len|manifold\.(retr|retraction)|max|mlp\.(dualize|jit|project)|norm|optimizer\.step|print"
    r"|proj\w+|pymanopt\.Problem|sqrt|steepest|torch\.optim\.Muon|verify"
)


@functools.cache
def rooms() -> tuple[Any, ...]:
    """Return our public packages, and other packages that the pages call."""
    found = pkgutil.walk_packages(mm.__path__, "manifoldmuon.")
    own = [importlib.import_module(x.name) for x in found if "._" not in x.name]
    return mm, *own, optax, optax.contrib, jax, nnx, equinox


def calls(page: Path) -> Iterator[tuple[str, ast.Call]]:
    for span in SPAN.findall(BLOCK.sub("", page.read_text(encoding="utf-8"))):
        try:
            tree = ast.parse(span.strip(), mode="eval")
        except SyntaxError:  # a formula, a command, a part of a line
            continue
        yield from ((span, node) for node in ast.walk(tree) if isinstance(node, ast.Call))


def resolve(name: str) -> list[Any]:
    """Return candidates for a name: attributes of a package, or methods of public classes."""
    first, *rest = name.split(".")
    named = {"mm": [mm], "jnp": [jax.numpy]}
    starts = named.get(first, []) + [x for x in rooms() if x.__name__.split(".")[-1] == first]
    if not rest or not starts:
        starts = [vars(room).get(first) for room in rooms()]
    for attribute in rest:
        starts = [getattr(x, attribute, None) for x in starts]
    found = [x for x in starts if callable(x)]
    if not found and first not in ("mm", "optim", "contrib", "optax", "jax", "jnp"):
        classes = [x for room in rooms() for x in vars(room).values() if isinstance(x, type)]
        methods = [getattr(x, (rest or [first])[-1], None) for x in classes]
        found = [x for x in methods if callable(x)]  # `manifold.retract(...)`, `for_training()`
    return found


def fits(function: Any, call: ast.Call) -> bool:
    given = [x for x in call.args if not (isinstance(x, ast.Constant) and x.value is ...)]
    named = {keyword.arg: None for keyword in call.keywords if keyword.arg}
    for bound in ([], [None]):  # a method lacks its instance
        try:
            inspect.signature(function).bind_partial(*bound, *given, **named)
        except TypeError:
            continue
        except ValueError:  # no signature
            pass
        return True
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_calls_in_prose_exist_and_fit(page):
    wrong = []
    for span, call in calls(page):
        name = ast.unparse(call.func)
        if not re.fullmatch(r"[\w.]+", name) or FOREIGN.fullmatch(name):
            continue
        if not any(fits(function, call) for function in resolve(name)):
            wrong.append(f"{name} in `{span}`")
    assert not wrong


def test_wrong_calls_are_detected(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "`optim.muon(0.1, geometry, speed=2)`, `optim.moun(0.1)`, `Stiefel(2, wrong=1)`,\n"
        "`manifold.retrakt(point)`, `muon(0.1, geometry)`, `tx.init(params)`\n"
    )
    found = [not any(fits(f, c) for f in resolve(ast.unparse(c.func))) for _, c in calls(page)]
    assert found == [True] * 4 + [False] * 2
