"""Compilation cost of a step on CPUs, measured by the number of XLA kernels, not by time."""

from importlib.metadata import version

import jax
import jax.numpy as jnp
import optax
import pytest

from benchmarks.compiling import distinct_kernels
from manifoldmuon import optim
from manifoldmuon.manifolds import Euclidean, Stiefel
from manifoldmuon.manifolds.solvers import ClosedForm, ProjectedPolar
from manifoldmuon.norms import RMSToRMS

# Fusion changes with every XLA version.
pytestmark = pytest.mark.skipif(
    tuple(map(int, version("jaxlib").split(".")[:2])) != (0, 10), reason="counted with jaxlib 0.10"
)

FAST = optim.manifold_muon(0.02, Stiefel(solver=ProjectedPolar()))
ACCURATE = optim.manifold_muon(0.02, Stiefel(solver=ClosedForm()))


def count(tx: optax.GradientTransformation, shapes: dict[str, tuple[int, ...]]) -> int:
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(tx.init, params)
    return distinct_kernels(jax.jit(step).lower(params, state, params).compile().as_text() or "")


# On constrained leaves, up to four kernels shorten steps that are too long to retract.
@pytest.mark.slow_except("muon", "FAST")
@pytest.mark.parametrize(
    ("tx", "shape", "most"),
    [
        (optim.muon(0.02, Euclidean(RMSToRMS())), (64, 32), 18),
        (FAST, (64, 32), 75),
        (FAST, (12, 256, 64), 90),
        (ACCURATE, (64, 32), 62),
        (ACCURATE, (12, 256, 128), 147),
    ],
    ids=["muon", "FAST", "FAST stack", "ACCURATE", "Resolvents"],
)
def test_leaf_compiles_to_few_kernels(tx, shape, most):
    assert 0 < count(tx, {"w": shape}) <= most


@pytest.mark.slow
@pytest.mark.parametrize("tx", [FAST, ACCURATE], ids=["FAST", "ACCURATE"])
def test_extra_leaf_adds_at_most_one_kernel(tx):
    few, many = (count(tx, dict.fromkeys(names, (32, 16))) for names in ("abcd", "abcdefgh"))
    assert many <= few + 4
