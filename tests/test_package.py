"""The package as a whole: its version, its public names, and a cheap import."""

import importlib
import importlib.metadata
import os
import pkgutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

import manifoldmuon
from tests import check_wheel

ROOT = Path(__file__).parents[1]


def public_modules() -> list[str]:
    """The package and every module in it whose dotted name has no underscore."""
    found = pkgutil.walk_packages(manifoldmuon.__path__, "manifoldmuon.")
    names = [module.name for module in found if "._" not in module.name]
    return ["manifoldmuon", *names]


def run(code: str, **variables: str) -> str:
    """What `code` prints in a fresh interpreter, with warnings as errors."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_version_is_the_one_of_the_metadata():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert manifoldmuon.__version__ == project["version"]
    assert importlib.metadata.version("manifoldmuon") == project["version"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"## [{project['version']}]" in changelog
    assert f"version: {project['version']}\n" in citation


def test_the_package_is_typed():
    assert (Path(manifoldmuon.__file__).parent / "py.typed").is_file()


@pytest.mark.parametrize("name", public_modules())
def test_public_names_exist_once_and_are_explained(name):
    module = importlib.import_module(name)
    assert module.__doc__
    assert len(set(module.__all__)) == len(module.__all__)
    for public in module.__all__:
        value = getattr(module, public)
        assert isinstance(value, str | ModuleType) or value.__doc__, f"{name}.{public}"


def test_the_wheel_and_the_sdist_hold_what_they_should(tmp_path):
    pytest.importorskip("hatchling", reason="builds the wheel; in the extra `tests`")
    code = (
        "import os, sys; os.chdir(sys.argv[1]); from hatchling import build\n"
        "print(build.build_wheel(sys.argv[2]), build.build_sdist(sys.argv[2]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, ROOT, tmp_path], capture_output=True, text=True, check=True
    )
    wheel, sdist = (tmp_path / name for name in done.stdout.split())
    assert check_wheel.problems(wheel, sdist) == []
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(tmp_path / "part.whl", "w") as part:
        for name in whole.namelist():
            if not name.endswith(("py.typed", "LICENSE")):
                part.writestr(name, whole.read(name))
        part.writestr("tests/test_package.py", "")
    assert check_wheel.problems(tmp_path / "part.whl", sdist) == [
        "the wheel has no manifoldmuon/py.typed",
        "the wheel has no manifoldmuon_verify/py.typed",
        "the wheel has tests/test_package.py",
        "the wheel has no licence",
    ]


def test_importing_touches_no_device():
    # A platform that does not exist is an error as soon as anything is computed.
    code = "import manifoldmuon; print(manifoldmuon.__version__)"
    assert run(code, JAX_PLATFORMS="nowhere").strip() == manifoldmuon.__version__


def test_importing_leaves_the_laboratory_and_the_extras_alone():
    loaded = run("import manifoldmuon, sys; print(*sys.modules)").split()
    lazy = [
        *(f"manifoldmuon.{part}" for part in ("checkpoints", "contrib", "lab", "testing")),
        *("matplotlib", "orbax", "pooch", "sklearn", "tqdm"),
    ]
    assert "manifoldmuon" in loaded
    assert [name for name in lazy if name in loaded] == []
