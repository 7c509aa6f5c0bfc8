"""The mark `slow_except`."""

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
