"""A training that is killed while it writes a checkpoint resumes bit for bit."""

import json
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from manifoldmuon.checkpoints import Checkpoints
from manifoldmuon.manifolds import Stiefel
from manifoldmuon.optim import init_tree, manifold_muon, tabulate

STEPS, CHUNKS = 15, 12


def job(folder: str) -> None:
    """Train, from the newest checkpoint in the folder if there is one."""
    geometry, shapes = {"w": Stiefel()}, {"w": jax.ShapeDtypeStruct((64, 32), jnp.float32)}
    tx = manifold_muon(0.03, geometry)
    params = init_tree(geometry, jax.random.key(0), shapes)
    target = jax.random.normal(jax.random.key(1), (64, 32))
    table = tabulate(geometry, params)

    def loss(params):
        return jnp.sum((params["w"] - target) ** 2)

    @jax.jit
    def chunk(carry):
        def step(carry, _):
            params, state = carry
            value, grads = jax.value_and_grad(loss)(params)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), value

        return jax.lax.scan(step, carry, length=STEPS)

    tree, losses = {"params": params, "state": tx.init(params)}, []
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2, cleanup_tmp_directories=True, enable_async_checkpointing=False
    )
    with Checkpoints(Path(folder), options) as checkpoints:
        if (found := checkpoints.restore(tree, table)) is not None:
            tree, losses = found.tree, found.extra
        for number in range(len(losses) // STEPS, CHUNKS):
            (params, state), values = chunk((tree["params"], tree["state"]))
            tree, losses = {"params": params, "state": state}, [*losses, *values.tolist()]
            checkpoints.save((number + 1) * STEPS, tree, table, losses)


def start(folder: Path) -> subprocess.Popen:
    code = f"from tests.programs.test_kills import job; job({str(folder)!r})"
    return subprocess.Popen([sys.executable, "-c", code])


def steps(folder: Path, temporary: bool = False) -> list[int]:
    """Return the steps with complete checkpoints, or with checkpoints being written."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    parts = [name.partition(".orbax-checkpoint-tmp") for name in names]
    return [int(n) for n, mark, _ in parts if bool(mark) == temporary and n.isdecimal()]


def ending(folder: Path) -> tuple[int, dict, list]:
    """Return the newest step, its array digests, and all losses."""
    newest = max(steps(folder))
    record = json.loads((folder / f"{newest}" / "record" / "metadata").read_text())
    return newest, record["digests"], record["extra"]


@pytest.mark.slow
def test_killed_job_resumes_bit_for_bit(tmp_path):
    whole, other = tmp_path / "whole", tmp_path / "killed"
    with start(other) as trained:
        while not steps(other) or not steps(other, temporary=True):
            assert trained.poll() is None
            time.sleep(0.001)
        trained.kill()
    saved = max(steps(other))
    assert saved < STEPS * CHUNKS
    assert sum(np.asarray(steps(other, temporary=True)) > saved) <= 1
    for folder in (whole, other):
        assert start(folder).wait() == 0
    assert ending(other) == ending(whole)
