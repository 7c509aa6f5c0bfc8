"""Two processes, joined over loopback, train like a single process."""

import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

JOINED = """
import json, os, sys
rank, count, port = (int(x) for x in sys.argv[1:4])
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={4 // count}"
import jax, jax.numpy as jnp, numpy as np, optax
if count > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", count, rank)
"""
CODE = (
    JOINED
    + """
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from manifoldmuon import optim
from manifoldmuon.manifolds import Stiefel
from manifoldmuon.manifolds.solvers import ProjectedPolar

mesh = jax.make_mesh((4,), ("x",), (AxisType.Auto,))
rng = np.random.default_rng(0)
start = {str(i): np.float32(np.linalg.qr(rng.standard_normal((16, 8)))[0]) for i in range(4)}
target = {k: np.float32(rng.standard_normal(w.shape)) for k, w in start.items()}
place = NamedSharding(mesh, PartitionSpec("x"))

def spread(tree):
    return {k: jax.make_array_from_callback(x.shape, place, lambda i, x=x: x[i])
            for k, x in tree.items()}

tx = optim.manifold_muon(0.1, Stiefel(solver=ProjectedPolar()))

@jax.jit
def train(params, target):
    def step(carry, _):
        params, state = carry
        updates, state = tx.update(target, state, params)
        return (optax.apply_updates(params, updates), state), None
    (params, state), _ = jax.lax.scan(step, (params, tx.init(params)), None, 5)
    return {k: jnp.sum(w * target[k]) for k, w in params.items()}

with jax.set_mesh(mesh):
    found = train(spread(start), spread(target))
json.dump({k: float(x.addressable_data(0)) for k, x in found.items()}, sys.stdout)
"""
)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def outputs(commands: Sequence[Sequence[str]], **options: Any) -> list[str]:
    """Run commands at the same time, with options of `subprocess`; return what each prints."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, **pipes, **options) for command in commands]
    printed = []
    try:
        for process in started:
            out, error = process.communicate(timeout=120)
            assert process.returncode == 0, error[-2000:]
            printed.append(out)
    finally:
        for process in started:
            process.kill()
    return printed


def run(count: int, code: str = CODE, *arguments: str) -> list[Any]:
    """Run `code` in `count` processes and return their outputs; `code` begins with `JOINED`."""
    port = str(free_port())
    python = [sys.executable, "-c", code]
    commands = [[*python, str(rank), str(count), port, *arguments] for rank in range(count)]
    return [json.loads(out.splitlines()[-1]) for out in outputs(commands)]  # Gloo prints before


@pytest.mark.slow
def test_two_processes_match_one():
    (alone,) = run(1)
    for found in run(2):
        assert found == pytest.approx(alone, rel=1e-5)
