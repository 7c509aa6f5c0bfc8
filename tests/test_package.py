"""The package as a whole: version, public names, wheel and cheap import."""

import importlib
import importlib.metadata
import os
import pkgutil
import re
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
    """Return the package and all its modules without a leading underscore in their dotted names."""
    found = pkgutil.walk_packages(manifoldmuon.__path__, "manifoldmuon.")
    names = [module.name for module in found if "._" not in module.name]
    return ["manifoldmuon", *names]


def run(code: str, **variables: str) -> str:
    """Run `code` in a fresh interpreter, with warnings as errors; return the output."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_version_matches_metadata():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert manifoldmuon.__version__ == project["version"]
    assert importlib.metadata.version("manifoldmuon") == project["version"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"## [{project['version']}]" in changelog
    assert f"version: {project['version']}\n" in citation
    entry = (ROOT / "README.md").read_text(encoding="utf-8").split("```bibtex")[1]
    assert f"version = {{{project['version']}}}" in entry
    assert re.search('^title: "(.*)"', citation, re.MULTILINE)[1] in entry  # type: ignore


def test_package_is_typed():
    assert (Path(manifoldmuon.__file__).parent / "py.typed").is_file()


@pytest.mark.parametrize("name", public_modules())
def test_public_names_are_unique_and_documented(name):
    module = importlib.import_module(name)
    assert module.__doc__
    assert len(set(module.__all__)) == len(module.__all__)
    for public in module.__all__:
        value = getattr(module, public)
        assert isinstance(value, str | ModuleType) or value.__doc__, f"{name}.{public}"


@pytest.mark.slow
def test_wheel_and_sdist_are_complete(tmp_path):
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


def test_import_initialises_no_device():
    # With a nonexistent platform, JAX raises at the first computation.
    code = "import manifoldmuon; print(manifoldmuon.__version__)"
    assert run(code, JAX_PLATFORMS="nowhere").strip() == manifoldmuon.__version__


def test_import_loads_no_lab_or_extras():
    loaded = run("import manifoldmuon, sys; print(*sys.modules)").split()
    lazy = [
        *(f"manifoldmuon.{part}" for part in ("checkpoints", "contrib", "lab", "testing")),
        *("matplotlib", "orbax", "pooch", "sklearn", "tqdm"),
    ]
    assert "manifoldmuon" in loaded
    assert [name for name in lazy if name in loaded] == []
