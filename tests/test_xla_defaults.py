"""Check a sample of the laws with XLA's defaults; the suite compiles without optimisation.

`make laws` runs all laws this way.
"""

import os
import subprocess
import sys


def test_laws_hold_with_xla_defaults(pytestconfig):
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0"]
    test = "tests/manifolds/test_laws.py::test_manifold_laws[stiefel wide, scaled]"
    environment = {k: v for k, v in os.environ.items() if "XDIST" not in k and k != "XLA_FLAGS"}
    run = subprocess.run(
        [*command, test],
        cwd=pytestconfig.rootpath,
        env=environment | {"XLA_DEFAULTS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout
    assert "1 passed" in run.stdout
