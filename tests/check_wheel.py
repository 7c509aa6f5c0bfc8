"""Check the wheel and the sdist in an otherwise empty environment (`make wheel`).

    python tests/check_wheel.py dist

This script imports only the standard library, so it runs without JAX.
"""

import email
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("manifoldmuon", "manifoldmuon_verify")

# Run outside the source tree, with warnings as errors.
_STEP = """
import importlib.metadata, importlib.resources
from pathlib import Path
import jax, jax.numpy as jnp, optax
import manifoldmuon as mm
from manifoldmuon.manifolds import Euclidean, Stiefel

assert mm.__version__ == importlib.metadata.version("manifoldmuon") == {version!r}
for package in {packages}:
    module = importlib.import_module(package)
    assert importlib.resources.files(package).joinpath("py.typed").is_file()
    assert Path(module.__file__).is_relative_to({site!r}), module.__file__
parts = "linalg norms manifolds optim modules bounds robustness testing lab contrib".split()
for part in parts:
    importlib.import_module("manifoldmuon." + part)
geometry = {{"w": Stiefel(), "b": Euclidean()}}
params = {{"w": jnp.eye(8, 4), "b": jnp.zeros(8)}}
tx = mm.optim.manifold_muon(0.1, geometry)
loss = lambda p: jnp.sum((p["w"] @ jnp.arange(1.0, 5.0) + p["b"] - 1) ** 2)
updates, state = jax.jit(tx.update)(jax.grad(loss)(params), tx.init(params), params)
after = optax.apply_updates(params, updates)
assert loss(after) < loss(params)
assert max(mm.optim.monitor_distance(geometry, after).values()) < 1e-5
try:
    import manifoldmuon.checkpoints
except ImportError as error:
    assert "pip install '.[checkpoints]'" in str(error)
else:
    raise AssertionError("Orbax has come along")
print("a step on the Stiefel manifold:", float(loss(params)), "->", float(loss(after)))
"""


def problems(wheel: Path, sdist: Path) -> list[str]:
    """Return a line for each problem of the two files, without installing them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        told = email.message_from_bytes(archive.read(metadata))
    info = metadata.removesuffix("METADATA")
    source = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {name for name in names if not name.startswith(info)}
    found = [f"the wheel has no {name}" for name in sorted(source - packed)]
    found += [f"the wheel has {name}" for name in sorted(packed - source)]
    if f"{info}licenses/LICENSE" not in names:
        found.append("the wheel has no licence")
    fields = {"Name": "name", "Version": "version", "Requires-Python": "requires-python",
              "License-Expression": "license", "Summary": "description"}  # fmt: skip
    for field, key in fields.items():
        if told[field] != project[key]:
            found.append(f"the wheel says {field}: {told[field]}, not {project[key]}")
    extras = set(told.get_all("Provides-Extra", []))
    if extras != set(project["optional-dependencies"]):
        found.append(f"the wheel has the extras {sorted(extras)}")
    lines = [line for line in told.get_all("Requires-Dist", []) if "extra ==" not in line]
    needed, declared = (
        {re.split(r"[^\w.-]", line)[0] for line in lines}
        for lines in (lines, project["dependencies"])
    )
    if needed != declared:
        found.append(f"the wheel needs {sorted(needed)}")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("pyproject.toml", "README.md", "LICENSE", "tests/test_package.py", *source):
        if name not in inside:
            found.append(f"the sdist has no {name}")
    odd = [n for n in inside if "__pycache__" in n or n.startswith((".venv", "site/", "runs/"))]
    return found + [f"the sdist has {name}" for name in sorted(odd)]


def install_and_step(wheel: Path) -> None:
    """Install only the wheel, take a training step, and resolve all extras together."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        pip = [python, "-m", "pip", "--disable-pip-version-check"]
        _run([*pip, "install", "--quiet", wheel], folder)
        _run([*pip, "check"], folder)
        code = _STEP.format(site=folder, version=project["version"], packages=PACKAGES)
        _run([python, "-I", "-W", "error", "-c", code], folder)
        extras = ",".join(project["optional-dependencies"])
        _run([*pip, "install", "--quiet", "--dry-run", f"{wheel}[{extras}]"], folder)
        print("the extras resolve:", extras)


def _run(line: Sequence[str | Path], folder: str) -> None:
    subprocess.run([str(word) for word in line], cwd=folder, check=True)


def main(dist: Path) -> int:
    """Check the only wheel and sdist of a folder; return the exit status."""
    (wheel,), (sdist,) = dist.resolve().glob("*.whl"), dist.resolve().glob("*.tar.gz")
    if found := problems(wheel, sdist):
        print("\n".join(found), file=sys.stderr)
        return 1
    install_and_step(wheel)
    print("whole:", wheel.name, sdist.name)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
