"""Habits of the tests themselves: each draws random numbers of its own."""

import ast
from pathlib import Path

import pytest

TESTS = sorted(Path(__file__).parent.rglob("*.py"))


def generators(source: str) -> list[str]:
    """The names at module level that hold a generator of random numbers."""
    return [
        ast.unparse(statement)
        for statement in ast.parse(source).body
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        and isinstance(statement.value, ast.Call)
        and ast.unparse(statement.value.func).endswith(("default_rng", "RandomState", "Random"))
    ]


def test_no_tests_share_a_generator():
    # Else the numbers of a test depend on which tests ran before it; the fixture `rng` is fresh.
    shared = {path.name: generators(path.read_text(encoding="utf-8")) for path in TESTS}
    assert {name: found for name, found in shared.items() if found} == {}


@pytest.mark.parametrize(
    ("line", "found"), [("RNG = np.random.default_rng(0)", 1), ("X = default_rng(0).normal()", 0)]
)
def test_a_shared_generator_is_found(line, found):
    assert len(generators(line)) == found
