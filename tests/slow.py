"""The mark `slow_except(*ids)`: all other cases of the test are slow."""

import pytest


def mark_slow(items: list[pytest.Item], complete: bool = True) -> None:
    """Mark the cases that `slow_except` does not name; raise if it names a missing case."""
    seen: dict[str, set[str]] = {}
    kept: dict[str, set[str]] = {}
    for item in items:
        if marker := item.get_closest_marker("slow_except"):
            test, _, case = item.nodeid.partition("[")
            seen.setdefault(test, set()).add(case := case.removesuffix("]"))
            kept[test] = set(marker.args)
            if case not in marker.args:
                item.add_marker("slow")
    missing = {test: names for test in kept if (names := kept[test] - seen[test])}
    if missing and complete:
        raise pytest.UsageError(f"slow_except names cases that do not exist: {missing}")
