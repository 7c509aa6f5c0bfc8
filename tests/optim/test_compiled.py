"""Compile time of a step on CPUs, as the number of XLA's kernels, which does not depend on load."""

import re
from importlib.metadata import version

import jax
import jax.numpy as jnp
import optax
import pytest

from manifoldmuon import optim
from manifoldmuon.manifolds import Euclidean, Stiefel
from manifoldmuon.norms import RMSToRMS
from tests.oracles.kernels import distinct_kernels

# Fusion changes with every XLA version.
pytestmark = pytest.mark.skipif(
    tuple(map(int, version("jaxlib").split(".")[:2])) != (0, 10), reason="counted with jaxlib 0.10"
)

DEFAULT = optim.manifold_muon(0.02, Stiefel())
TRAINING = optim.manifold_muon(0.02, Stiefel().for_training())
STACKED = [optim.manifold_muon(0.02, x.stacked()) for x in (Stiefel(), Stiefel().for_training())]


def count(tx: optax.GradientTransformation, shapes: dict[str, tuple[int, ...]]) -> int:
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(tx.init, params)
    return distinct_kernels(jax.jit(step).lower(params, state, params).compile().as_text() or "")


FEW = {
    "muon": (optim.muon(0.02, Euclidean(RMSToRMS())), (64, 32), 15),
    "for training": (TRAINING, (64, 32), 55),
    "default": (DEFAULT, (64, 32), 43),
    "for training, square": (TRAINING, (48, 48), 41),
    "for training, stack": (STACKED[1], (12, 256, 64), 65),
    "default, square": (DEFAULT, (48, 48), 38),
    "resolvents": (STACKED[0], (12, 256, 128), 133),
}


@pytest.mark.slow_except("for training", "default")
@pytest.mark.parametrize("name", FEW)
def test_leaf_compiles_to_few_kernels(name):
    tx, shape, most = FEW[name]
    assert 0 < count(tx, {"w": shape}) <= most


@pytest.mark.slow_except("default")
@pytest.mark.parametrize("tx", [TRAINING, DEFAULT], ids=["for training", "default"])
def test_extra_leaf_adds_at_most_one_kernel(tx):
    few, many = (count(tx, dict.fromkeys(names, (32, 16))) for names in ("abcd", "abcdefgh"))
    assert many <= few + 4


def strides(text: str) -> list[str]:
    """Return the slices of a lowered program that leave out entries."""
    slices = re.findall(r"stablehlo\.slice .*\[(.*?)\]", text)
    return [one for one in slices if re.search(r"\d+:\d+:\d+", one)]


@pytest.mark.parametrize("name", ["muon", "for training"])
@pytest.mark.parametrize("shape", [(64, 32), (48, 48)])
def test_step_slices_no_diagonals(name, shape):
    # Compilers for TPUs refuse diagonals as slices of flat matrices, from 4096 x 4096 on.
    flat = jax.jit(lambda x: x.reshape(-1)[::6]).lower(jnp.ones((5, 5))).as_text()
    assert strides(flat) == ["0:25:6"]
    tx, params = FEW[name][0], {"w": jnp.ones(shape)}
    text = jax.jit(tx.update).lower(params, jax.eval_shape(tx.init, params), params).as_text()
    assert strides(text) == []
