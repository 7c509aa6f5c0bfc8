"""The verifier is independent: it loads neither JAX nor the package."""

import ast
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


def test_limited_process_loads_no_jax():
    code = "import sys, tests.verify.limited; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"jax", "manifoldmuon"} & set(done.stdout.split())
