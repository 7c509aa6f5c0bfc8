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


def run(code: str, warnings: str = "error", **variables: str) -> str:
    """Run `code` in a fresh interpreter; return the output."""
    done = subprocess.run(
        [sys.executable, "-W", warnings, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_version_matches_metadata():
    names = ("pyproject.toml", "CHANGELOG.md", "CITATION.cff", "README.md")
    project, changelog, citation, readme = (
        (ROOT / name).read_text(encoding="utf-8") for name in names
    )
    version = tomllib.loads(project)["project"]["version"]
    assert manifoldmuon.__version__ == importlib.metadata.version("manifoldmuon") == version
    assert f"## [{version}]" in changelog
    assert f"version: {version}\n" in citation
    entry = readme.split("```bibtex")[1]
    assert f"version = {{{version}}}" in entry
    assert re.search('^title: "(.*)"', citation, re.MULTILINE)[1] in entry  # type: ignore


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
    code = "from hatchling import build; import sys\n"
    code += "print(*(make(sys.argv[1]) for make in (build.build_wheel, build.build_sdist)))"
    command = [sys.executable, "-c", code, tmp_path]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    wheel, sdist = (tmp_path / name for name in out.split())
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
