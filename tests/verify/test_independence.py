"""The verifier is independent: it loads neither JAX nor the package."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import manifoldmuon_verify

PACKAGE = Path(manifoldmuon_verify.__file__).parent


def test_only_numpy_and_the_standard_library_are_imported():
    allowed = {*sys.stdlib_module_names, "numpy", "manifoldmuon_verify"}
    found = set()
    for path in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert not node.level
                assert node.module
                found.add(node.module.split(".")[0])
    assert "numpy" in found
    assert found <= allowed


def test_verifying_loads_no_jax(tight):
    code = (
        "import sys; from manifoldmuon_verify.__main__ import main\n"
        "assert main([sys.argv[1]]) == 0; print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(tight)],
        env=os.environ | {"PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    loaded = {name.split(".")[0] for name in done.stdout.splitlines()[-1].split()}
    assert {"manifoldmuon_verify", "numpy"} <= loaded
    assert not loaded & {"jax", "jaxlib", "manifoldmuon", "optax", "safetensors", "jaxtyping"}
