"""Project conventions: tests draw their own random numbers; check-lists name existing files."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = sorted((ROOT / "tests").rglob("*.py"))


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
    shared = {path.name: generators(path.read_text(encoding="utf-8")) for path in TESTS}
    assert {name: found for name, found in shared.items() if found} == {}


@pytest.mark.parametrize(
    ("line", "found"), [("RNG = np.random.default_rng(0)", 1), ("X = default_rng(0).normal()", 0)]
)
def test_shared_generator_is_detected(line, found):
    assert len(generators(line)) == found


def test_check_lists_name_existing_files():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w.-]+/[\w./-]+\.py)`", text))
    assert len(named) > 10
    assert [path for path in named if "name.py" not in path and not (ROOT / path).is_file()] == []


def test_errors_name_existing_pages():
    titles = re.findall(r"- ([^:\n]+): \S+\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    named = set()
    for path in (ROOT / "manifoldmuon").rglob("*.py"):
        joined = re.sub(r'"\n\s+f?"', "", path.read_text(encoding="utf-8"))
        named |= set(re.findall(r"\bpage '([^']+)'", joined))
    assert len(named) > 5
    assert named - set(titles) == set()
