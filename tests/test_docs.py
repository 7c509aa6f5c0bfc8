"""The documentation: every public name is on a page, and the code that it shows runs."""

import importlib.util
import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

_spec = importlib.util.spec_from_file_location("coverage_hook", ROOT / "docs" / "coverage.py")
assert _spec is not None
assert _spec.loader is not None
coverage = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(coverage)


def test_every_public_name_is_documented():
    assert coverage.problems() == []


def test_gaps_are_found(tmp_path):
    files = {
        "manifoldmuon/__init__.py": '"""Doc."""\nfrom . import linalg\n__all__ = ["linalg"]',
        "manifoldmuon/linalg/__init__.py": """
            '''Doc.'''
            from ._a import explained, silent, unlisted, CONSTANT
            __all__ = ["explained", "silent", "unlisted", "CONSTANT"]
            """,
        "manifoldmuon/linalg/_a.py": """
            def explained(): '''Doc.'''
            def unlisted(): '''Doc.'''
            def silent(): pass
            CONSTANT = 1
            '''Doc.'''
            """,
        "manifoldmuon/testing.py": "",
        "docs/api/linalg.md": """
            ::: manifoldmuon.linalg.explained
            ::: manifoldmuon.linalg.silent
            ::: manifoldmuon.linalg.CONSTANT
            ::: manifoldmuon.linalg._a.gone
            """,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text), encoding="utf-8")
    assert sorted(coverage.problems(tmp_path)) == [
        "linalg.md lists manifoldmuon.linalg._a.gone, not a public name",
        "manifoldmuon.linalg.silent has no docstring",
        "manifoldmuon.linalg.unlisted is on no page of docs/api",
        "manifoldmuon.testing has no __all__",
        "manifoldmuon.testing has no docstring",
    ]


@pytest.mark.parametrize(
    "page",
    ["README.md", "docs/checkpoints.md", "docs/getting-started.md", "docs/migration.md"],
)
def test_the_code_on_a_page_runs(page):
    blocks = _PYTHON.findall((ROOT / page).read_text(encoding="utf-8"))
    assert blocks
    exec(compile("\n".join(blocks), page, "exec"), {"__name__": "__main__"})
