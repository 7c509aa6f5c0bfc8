"""Conventions of the suite: the mark `slow_except`; tests draw their own random numbers."""

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.slow import mark_slow


def items_of(*cases: str, stay: tuple[str, ...]) -> tuple[Any, list[str]]:
    marked: list[str] = []
    marker = pytest.mark.slow_except(*stay).mark
    items = [
        SimpleNamespace(
            nodeid=f"tests/test_a.py::test[{case}]",
            get_closest_marker=lambda name: marker,
            add_marker=lambda name, case=case: marked.append(case),
        )
        for case in cases
    ]
    return items, marked


def test_unnamed_cases_are_slow():
    items, marked = items_of("Max()", "Sum()", "2-[3]", stay=("Sum()", "2-[3]"))
    mark_slow(items)
    assert marked == ["Max()"]


def test_name_without_case_raises():
    items, _ = items_of("Max()", stay=("Max()", "Sum()"))
    with pytest.raises(pytest.UsageError, match=r"test_a.py::test': {'Sum\(\)'}"):
        mark_slow(items)
    mark_slow(items, complete=False)


def generators(source: str) -> list[str]:
    """Return the module-level assignments of random generators."""
    return [
        ast.unparse(statement)
        for statement in ast.parse(source).body
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        and isinstance(statement.value, ast.Call)
        and ast.unparse(statement.value.func).endswith(("default_rng", "RandomState", "Random"))
    ]


def test_tests_share_no_random_generator():
    # A shared generator makes numbers depend on the tests that ran before; use the fixture `rng`.
    paths = sorted(Path(__file__).parent.rglob("*.py"))
    shared = {path.name: generators(path.read_text(encoding="utf-8")) for path in paths}
    assert {name: found for name, found in shared.items() if found} == {}


def test_shared_generator_is_detected():
    shared = "RNG = np.random.default_rng(0)"
    assert generators(f"{shared}\nX = default_rng(0).normal()") == [shared]
