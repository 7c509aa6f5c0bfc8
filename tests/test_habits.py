"""Habits of the project: tests draw their own random numbers, check-lists name files that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = sorted((ROOT / "tests").rglob("*.py"))


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


def test_check_lists_name_files_that_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w.-]+/[\w./-]+\.py)`", text))
    assert len(named) > 10
    assert [path for path in named if "name.py" not in path and not (ROOT / path).is_file()] == []


def test_errors_name_pages_that_exist():
    titles = re.findall(r"- ([^:\n]+): \S+\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    named = set()
    for path in (ROOT / "manifoldmuon").rglob("*.py"):
        joined = re.sub(r'"\n\s+f?"', "", path.read_text(encoding="utf-8"))
        named |= set(re.findall(r"\bpage '([^']+)'", joined))
    assert len(named) > 5
    assert named - set(titles) == set()
