"""Each kind of layer: its map, its Lipschitz constant, and its rounding bounds."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manifoldmuon import contrib, modules
from manifoldmuon.robustness import describe
from manifoldmuon.robustness._export import Arrays
from manifoldmuon_verify import Refused
from manifoldmuon_verify._files import Stored
from manifoldmuon_verify._layers import normalisation
from manifoldmuon_verify._network import Builder, State, evaluate, lipschitz
from manifoldmuon_verify._rounding import up
from tests.compiled import ask
from tests.verify.independent import apply, exactly

# A module and the shape of its input.
CASES = {
    "linear": (modules.Linear(5, 7), (7,)),
    "linear on tokens": (modules.Linear(5, 7), (3, 7)),
    "locally_connected": (contrib.LocallyConnected((2, 3), 5, 4), (2, 3, 4)),
    "locally_connected rows": (contrib.LocallyConnected((3,), 5, 4), (2, 3, 4)),
    "bias": (modules.Bias(6), (2, 6)),
    "scale": (modules.Mul(-1.7), (6,)),
    "maxmin": (modules.GroupSort(), (6,)),
    "group_sort": (modules.GroupSort(3), (12,)),
    "abs": (modules.Abs(), (5,)),
    "relu": (modules.ReLU(), (5,)),
    "scaled relu": (math.sqrt(2) * modules.ReLU(), (5,)),
    "mean_subtract": (modules.MeanSubtract(), (5,)),
    "flatten": (modules.Flatten(2), (2, 3, 4)),
    "space_to_depth": (contrib.SpaceToDepth(2), (4, 6, 3)),
    "average_pool": (modules.AveragePool(2, 3), (4, 6, 2)),
    "shift": (contrib.Shift(1), (3, 4, 7)),
    "two_tap on tokens": (contrib.TwoTap(5, 2), (4, 5)),
    "two_tap on rows": (contrib.TwoTap(5, 2, -3, -1), (4, 3, 5)),
    "orthogonal convolution": (contrib.orthogonal_conv2d(4, 2), (3, 3, 4)),
    "residual": (modules.residual(modules.GroupSort() @ modules.Linear(6, 6), 3), (6,)),
    "difference": (modules.Linear(4, 6) - modules.Abs() @ modules.Linear(4, 6), (6,)),
}


def stored(array):
    array = np.asarray(array)
    return Stored("F32", array.shape, "", array)


def built(rng, name, factor=1.0):
    """Return a module, parameters off their manifolds, the verifier's network, and the shape."""
    module, shape = CASES[name]

    def moved(w):
        return jnp.asarray(factor * np.asarray(w) + 0.05 * rng.normal(size=w.shape), jnp.float32)

    params = jax.tree.map(moved, module.init(jax.random.key(0)))
    arrays = Arrays()
    entries = describe(module, params, arrays)
    builder = Builder({key: stored(array) for key, array in arrays.values.items()})
    return module, params, builder.sequence(entries, shape, "network"), shape


def start(values, reach=0.0, single=False):
    zero = np.zeros(len(values))
    return State(np.asarray(values, float), zero, zero + reach, zero if single else None)


@pytest.mark.parametrize("name", CASES)
def test_layer_matches_its_module(rng, name):
    module, params, nodes, shape = built(rng, name)
    x = rng.normal(size=(4, *shape))
    found = evaluate(nodes, start(x)).values
    wanted = ask(module.apply, params, np.float32(x))
    assert found.shape[1:] == (nodes[-1].shape if nodes else shape)
    np.testing.assert_allclose(found, wanted, atol=5e-6)


@pytest.mark.parametrize("name", CASES)
def test_no_slope_exceeds_lipschitz_constant(rng, name):
    module, _, _, shape = built(rng, name)
    points = jnp.asarray(rng.normal(size=(20, math.prod(shape))), jnp.float32)

    @jax.jit
    def slopes(params):
        flat = lambda x: module.apply(params, x.reshape(shape)).reshape(-1)  # noqa: E731
        return jax.vmap(jax.jacobian(flat))(points)

    for factor in (0.6, 1.0, 1.3):  # scales the weights, which are off their manifolds anyway
        _, params, nodes, _ = built(rng, name, factor)
        found, constant = np.max(np.linalg.norm(slopes(params), 2, (-2, -1))), lipschitz(nodes)
        assert found <= constant * (1 + 1e-5)
        # Attained, except where branches or factors peak in different directions.
        if name not in ("difference", "residual", "orthogonal convolution"):
            assert found >= 0.999 * constant


@pytest.mark.parametrize("size", [1.0, 1e-160, 1e30])
@pytest.mark.parametrize("name", CASES)
def test_float64_rounding_within_bound(rng, name, size):
    module, params, nodes, shape = built(rng, name)
    arrays = Arrays()
    entries = describe(module, params, arrays)
    weights = {key: exactly(w) for key, w in arrays.values.items()}
    x = size * rng.normal(size=(5, *shape)) * 10.0 ** rng.integers(-8, 1, size=(5, *shape))
    state, wanted = evaluate(nodes, start(x)), apply(entries, exactly(x), weights)
    for gap, error in zip(exactly(state.values) - wanted, state.error, strict=True):
        assert sum(entry**2 for entry in gap.flat) <= Fraction(float(error)) ** 2
    assert np.all(state.error <= 1e-13 * np.linalg.norm(x.reshape(5, -1), axis=1) + 1e-12)


@pytest.mark.parametrize("name", CASES)
def test_float32_rounding_within_bound_in_ball(rng, name):
    module, params, nodes, shape = built(rng, name)
    x = (10 * rng.normal(size=(1, *shape))).astype(np.float32)
    reach = 0.5
    state = evaluate(nodes, start(x, up(reach), single=True))
    moves = rng.normal(size=(200, *shape))
    moves *= reach / np.linalg.norm(moves.reshape(200, -1), axis=1).reshape(-1, *[1] * len(shape))
    moved = (x + 0.999 * moves).astype(np.float32)
    exact = evaluate(nodes, start(moved)).values.reshape(200, -1)
    deployed = np.asarray(module.apply(params, jnp.asarray(moved)), float).reshape(200, -1)
    assert state.deployed is not None
    assert np.all(np.linalg.norm(deployed - exact, axis=1) <= state.deployed[0] + 1e-12)
    here = evaluate(nodes, start(x)).values.reshape(1, -1)
    assert np.all(np.linalg.norm(exact - here, axis=1) <= state.reach[0])
    assert state.deployed[0] <= 1e-4 * np.linalg.norm(x)


@pytest.mark.parametrize(("shift", "scale"), [(33.3, 0.3), ([1.0, 2.0, 3.0], [0.5, 0.3, 0.7])])
def test_pixels_normalised_as_declared(rng, shift, scale):
    layer = normalisation((2, 3), np.asarray(shift), np.asarray(scale))
    x = rng.integers(0, 256, size=(4, 2, 3)).astype(float)
    state = evaluate((layer,), start(x, up(1.0), single=True))
    assert state.deployed is not None
    for i, found in enumerate(state.values):
        wanted = (exactly(x[i]) - exactly(shift)) / exactly(scale)
        gap = exactly(found) - wanted
        assert sum(e**2 for e in gap.flat) <= Fraction(float(state.error[i])) ** 2
        single = (x[i].astype(np.float32) - np.float32(shift)) / np.float32(scale)
        gap = exactly(single) - wanted
        assert sum(e**2 for e in gap.flat) <= Fraction(float(state.deployed[i])) ** 2
    assert Fraction(float(state.reach[0])) >= 1 / Fraction(0.3)


@pytest.mark.parametrize(
    ("axes", "shape", "message"),
    [
        (0, (2, 3, 4), "must be at least 1"),
        (1, (2, 3, 4), "expected 3 axes"),
        (2, (3, 4), "axes=2 must be below"),
        (2, (3, 2, 4), "does not fit the input"),
        (2, (2, 3, 5), "does not fit the input"),
    ],
)
def test_mismatched_positions_are_refused(rng, axes, shape, message):
    builder = Builder({"w": stored(rng.normal(size=(2, 3, 5, 4)))})
    entry = {"kind": "locally_connected", "weight": "w", "axes": axes}
    with pytest.raises(Refused, match=message):
        builder.sequence([entry], shape, "network")


def test_overflow_is_refused(rng):
    _, _, nodes, shape = built(rng, "linear")
    huge = np.full((1, *shape), 1e308)
    with np.errstate(all="ignore"), pytest.raises(Refused, match="overflow"):
        evaluate(nodes, start(10 * huge))
    with pytest.raises(Refused, match="float32"):
        evaluate(nodes, start(huge / 1e288, single=True))
