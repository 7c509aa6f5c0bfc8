"""What is not installed: nothing imports it too early, and errors name the extra that has it."""

import pytest

from studies import STUDIES
from tests import test_package

# Imports of these fail, as where only `pip install .` has run.
_HIDE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {hidden!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""
_FRAMEWORKS = ["flax", "equinox", "torch"]
_STUDIES = ["matplotlib", "sklearn", "pooch", "joblib", "tqdm"]
_OTHERS = ["orbax", "safetensors"]


def run(code: str, hidden: list[str]) -> str:
    """Run code in a fresh interpreter that lacks some packages; return its output."""
    return test_package.run(_HIDE.format(hidden=hidden) + code, "default")


def test_studies_are_listed_without_import_of_any():
    code = "import studies.__main__ as m; assert m.main([]) == 0\n"
    code += "print(*[name for name in sys.modules if name.startswith('studies.')])"
    *listed, modules = run(code, _FRAMEWORKS + _STUDIES + _OTHERS).splitlines()
    assert [line.split()[0] for line in listed[3:]] == list(STUDIES)
    for name, line in zip(STUDIES, listed[3:], strict=True):
        assert line.endswith((STUDIES[name].__doc__ or "").splitlines()[0])
    assert not {study.__module__ for study in STUDIES.values()} & set(modules.split())


@pytest.mark.slow
def test_studies_explain_themselves_without_frameworks():
    code = f"""
import contextlib, studies.__main__ as m
for name in {list(STUDIES)}:
    with contextlib.suppress(SystemExit): m.main([name, '--help'])
"""
    shown = run(code, _FRAMEWORKS + _OTHERS)
    assert all(f"python -m studies {name}" in shown for name in STUDIES)


@pytest.mark.slow
def test_study_without_its_framework_names_the_extra(tmp_path):
    code = f"""
import studies.__main__ as m; sys.stderr = sys.stdout
try: m.main(['critics', '--out', {str(tmp_path / "critics.json")!r}])
except SystemExit as error: print(error.code)
"""
    error, status = run(code, _FRAMEWORKS).splitlines()[-2:]
    assert "error: critics needs flax: pip install -e '.[flax,studies]' from the root" in error
    assert status == "2"


@pytest.mark.slow_except("manifoldmuon.frameworks.nnx-Flax-flax")
@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [
        ("manifoldmuon.frameworks.nnx", "Flax", "flax"),
        ("manifoldmuon.frameworks.linen", "Flax", "flax"),
        ("manifoldmuon.frameworks.equinox", "Equinox", "equinox"),
        ("manifoldmuon.checkpoints", "Orbax", "checkpoints"),
    ],
)
def test_module_without_its_extra_names_it(module, package, extra):
    code = f"try: import {module}\nexcept ImportError as error: print(error)"
    message = f"{module} needs {package}: pip install '.[{extra}]' from the root of the source"
    assert run(code, _FRAMEWORKS + _OTHERS).strip() == message
