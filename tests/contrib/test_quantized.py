"""Momentum in 8 and 4 bits, against quantization levels in NumPy's float64."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from manifoldmuon import optim
from manifoldmuon.contrib import quantized
from manifoldmuon.manifolds import Euclidean, Stiefel
from manifoldmuon.manifolds.solvers import DualAscent
from manifoldmuon.norms import RMSToRMS
from manifoldmuon.testing import check_sharding
from tests.optim.test_sharding import MESHES

LARGEST = {8: 127, 4: 7}
MU = 5.0


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    """Draw entries of very different sizes, including zeros."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 10.0 ** rng.uniform(-3, 3, shape)
    return np.where(rng.random(shape) < 0.1, 0, x).astype(np.float32)


def held(x: np.ndarray, bits: int, block: int = 128) -> np.ndarray:
    """Return the quantized array: twice the momentum after the gradient and a zero gradient."""
    tx = quantized(optax.trace(0.5), bits, block, min_size=0)

    @jax.jit
    def steps(x):
        _, state = tx.update(x, tx.init(x))
        return tx.update(jnp.zeros_like(x), state)[0]

    return 2 * np.asarray(steps(x), np.float64)


def nearest(x: np.ndarray, bits: int) -> np.ndarray:
    """Round blocks `(..., n)` to levels that are evenly spaced in `log(1 + MU x)`."""
    count = LARGEST[bits]
    levels = (np.power(1 + MU, np.arange(count + 1) / count) - 1) / MU
    limits = (np.power(1 + MU, (np.arange(count) + 0.5) / count) - 1) / MU
    largest = np.abs(x).max(axis=-1, keepdims=True)
    parts = np.abs(x) / np.where(largest == 0, 1, largest)
    return np.sign(x) * levels[np.searchsorted(limits, parts)] * largest


@pytest.mark.parametrize("bits", [8, 4])
def test_entries_round_to_levels_of_their_block(bits):
    x = drawn(3, 4, 22)
    found = held(x, bits, block=8)
    # 22 entries in blocks of at most 8: three blocks, the last padded.
    blocks = np.pad(x.astype(np.float64), [(0, 0), (0, 0), (0, 2)]).reshape(3, 4, 3, 8)
    wanted = nearest(blocks, bits).reshape(3, 4, 24)[..., :22]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    np.testing.assert_array_equal(found[x == 0], 0)
    largest = np.repeat(np.abs(blocks).max(axis=-1), 8, axis=-1)[..., :22]
    # Half a level of the logarithm, converted to an entry.
    allowed = (np.abs(x) + largest / MU) * (math.pow(1 + MU, 0.5 / LARGEST[bits]) - 1)
    assert np.all(np.abs(found - x) <= 1.00001 * allowed)


@pytest.mark.parametrize("bits", [8, 4])
def test_zero_nan_and_tiny_entries_are_kept(bits):
    x = np.ones((4, 8), np.float32)
    x[0], x[1, 5], x[2] = 0, np.nan, 2.0**-120
    found = held(x, bits, block=4)
    np.testing.assert_array_equal(np.isnan(found[1]), [False] * 4 + [True] * 4)
    np.testing.assert_array_equal(found[[0, 2, 3]], x[[0, 2, 3]])


@pytest.mark.parametrize("bits", LARGEST)
def test_momentum_near_the_largest_number_is_kept(bits):
    """Compiled division by 3e38 becomes multiplication by a denormal number."""
    found = held(np.array([3e38, -3e38, 0.0, 1e38], np.float32), bits, block=4)
    np.testing.assert_allclose(found[:2], [3e38, -3e38], rtol=1e-6)
    assert found[3] > 0.5e38


def test_only_large_parameter_shaped_arrays_are_quantised():
    """Warm starts, small matrices and vectors stay in float32."""
    geometry: Any = {"w": Stiefel(solver=DualAscent(steps=2)), "small": Euclidean(RMSToRMS())}
    geometry |= {"bias": Euclidean()}
    params = {"w": jnp.eye(64, 32), "small": jnp.ones((8, 8)), "bias": jnp.ones(9999)}
    state: Any = quantized(optim.manifold_muon(0.1, geometry), min_size=2048).init(params)
    kinds = jax.tree.map(lambda x: str(x.dtype), optax.tree.get(state, "trace"))
    assert kinds == {"w": "int8", "small": "float32", "bias": "float32"}
    assert optax.tree.get(state, "dual")["w"].dtype == jnp.float32
    assert {path: x.shape for path, x in state.scales.items()} == {"0|trace|w": (64, 1)}


@pytest.mark.parametrize(("bits", "size"), [(8, 64 * 300 + 64 * 3 * 4), (4, 64 * 150 + 64 * 3 * 4)])
def test_state_size_in_bytes(bits, size):
    """Measured by the compiler, because JAX counts a byte for a 4-bit entry."""
    grads = {"w": jax.ShapeDtypeStruct((64, 300), jnp.float32)}
    tx = quantized(optax.trace(0.9), bits)
    state = jax.eval_shape(tx.init, grads)
    memory: Any = jax.jit(tx.update).lower(grads, state).compile().memory_analysis()
    assert memory.argument_size_in_bytes == size + 64 * 300 * 4


def test_wrapped_retraction_must_be_last():
    tx = quantized(optim.manifold_muon(0.1, Stiefel()))
    with pytest.raises(ValueError, match="it must be last"):
        optim.chain(tx, optax.scale(0.5))
    optim.chain(quantized(optax.trace(0.9)), optax.scale(0.5))


SHARDED = {
    "rows": ((16, 12), ("x", None)),
    "columns": ((4, 80), (None, "x")),
    "unequal blocks": ((4, 32), (None, "x")),
    "stack": ((8, 4, 6), ("x", None, None)),
    "replicated": ((3, 5), ()),
}


def placed(mesh: Any) -> dict[str, NamedSharding]:
    return {name: NamedSharding(mesh, PartitionSpec(*spec)) for name, (_, spec) in SHARDED.items()}


def sharded_arrays(seed: int) -> dict[str, Any]:
    return {name: jnp.asarray(drawn(*shape, seed=seed)) for name, (shape, _) in SHARDED.items()}


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("mesh", MESHES)
def test_sharded_arrays_match_single_device(mesh, bits):
    """Blocks of five entries: 80 columns have 16 blocks, two per device; 32 columns have seven."""
    tx = quantized(optax.trace(0.9, nesterov=True), bits, block=5, min_size=0)
    mesh = jax.make_mesh(*MESHES[mesh])
    check_sharding(tx, sharded_arrays(0), sharded_arrays(1), placed(mesh))


@pytest.mark.slow
def test_codes_keep_parameter_sharding():
    """Without collectives or user annotations."""
    mesh = jax.make_mesh(*MESHES["automatic"])
    names = ("rows", "columns", "stack")
    grads = {name: jax.device_put(sharded_arrays(0)[name], placed(mesh)[name]) for name in names}
    tx = quantized(optax.trace(0.9), block=5, min_size=0)
    state = tx.init(grads)
    with jax.set_mesh(mesh):
        step = jax.jit(tx.update).lower(grads, state).compile()
        _, after = step(grads, state)
    for name in names:
        codes, scales = after.inner.trace[name], after.scales[f"trace|{name}"]
        assert codes.sharding.is_equivalent_to(grads[name].sharding, codes.ndim)
        assert scales.sharding.is_equivalent_to(grads[name].sharding, codes.ndim)
    text = step.as_text() or ""
    assert not any(word in text for word in ("all-gather", "all-to-all", "permute", "all-reduce"))
