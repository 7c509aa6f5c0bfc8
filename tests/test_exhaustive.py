"""What a run leaves out is what `tests/exhaustive.py` says, and all that it names is there."""

from types import SimpleNamespace
from typing import Any

from tests.exhaustive import STAY, UNKNOWN, split

TEST = "optim/test_combination.py::test_no_step_of_norm_one_does_better"


def test_what_it_names_is_there(pytestconfig):
    # Of the files that this run has collected.
    assert pytestconfig.stash.get(UNKNOWN, []) == []


def test_cases_are_told_apart():
    assert STAY[TEST] == ("Sum()",)
    names = [f"tests/{TEST}[{case}]" for case in ("Max()", "Sum()")]
    names += ["tests/optim/test_combination.py::test_another[Max()]", "tests/test_a.py::test"]
    items: Any = [SimpleNamespace(nodeid=name) for name in names]
    stay, left_out, unknown = split(items)
    assert [item.nodeid for item in stay] == names[1:]
    assert [item.nodeid for item in left_out] == names[:1]
    assert "optim/test_combination.py::test_on_a_mesh" in unknown
    assert not [name for name in unknown if not name.startswith("optim/test_combination.py")]
