"""Certified radii: exact for linear classifiers, sound under attack, refused if unfounded."""

import dataclasses
import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manifoldmuon import modules
from manifoldmuon.bounds import bound
from manifoldmuon.contrib import SpaceToDepth, orthogonal_conv2d
from manifoldmuon.manifolds import Euclidean, Stiefel
from manifoldmuon.modules import Bias, ExternalModule, GroupSort, Identity, Linear, Module, Param
from manifoldmuon.norms import ConvRMSToRMS, RMSToRMS
from manifoldmuon.robustness import certify

FULL: Module = Linear(4, 12, Stiefel()) @ GroupSort(2) @ Bias(12) @ Linear(12, 6, Stiefel())


def weights_of(net: Module, seed: int = 0):
    """Return weights on the manifolds, with nonzero biases."""
    params = net.init(jax.random.key(seed))
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda w: jnp.asarray(rng.standard_normal(w.shape) / 4, w.dtype) if w.ndim == 1 else w,
        params,
    )


def images(rng: np.random.Generator, n: int, *shape: int) -> np.ndarray:
    return rng.standard_normal((n, *shape)).astype(np.float32)


def test_linear_classifier_radii_are_boundary_distances(rng):
    """For arbitrary rows, the boundary between two classes is a plane."""
    w, b, x = rng.standard_normal((3, 6)), rng.standard_normal(3), images(rng, 50, 6)
    found = certify(Bias(3) @ Linear(3, 6), (np.float32(w), np.float32(b)), x)
    logits = x @ w.T + b
    np.testing.assert_array_equal(found.predicted, logits.argmax(-1))
    for row, c, radius in zip(logits, found.predicted, found.radii, strict=True):
        planes = [(row[c] - row[j]) / np.linalg.norm(w[c] - w[j]) for j in range(3) if j != c]
        assert radius == pytest.approx(min(planes), rel=1e-4, abs=1e-5)


def test_accuracies_and_curve_match_counts(rng):
    params, x = weights_of(FULL), images(rng, 300, 6)
    found = certify(FULL, params, x)
    y = np.where(np.arange(300) % 3 == 0, (found.predicted + 1) % 4, found.predicted)
    found = certify(FULL, params, x, y, batch=70)
    right = np.arange(300) % 3 != 0
    assert str(found).startswith("300 images, 66.7% right: half of the radii are at least ")
    assert found.accuracy() == pytest.approx(2 / 3)
    at = float(np.median(found.radii))
    assert found.accuracy(at) == np.mean(right & (found.radii >= at))
    assert found.first(90).accuracy(at) == np.mean((right & (found.radii >= at))[:90])
    np.testing.assert_array_equal(
        found.curve(np.array([0, at, 100.0])), [found.accuracy(), found.accuracy(at), 0.0]
    )
    logits, own = np.asarray(FULL.apply(params, jnp.asarray(x))), np.eye(4, dtype=bool)[y]
    margins = logits[own] - np.max(np.where(own, -np.inf, logits), axis=1)
    # With orthonormal rows all pair distances are sqrt(2).
    assert found.accuracy(at) == pytest.approx(np.mean(margins > 2**0.5 * at), abs=0.01)


def test_radii_are_in_image_units(rng):
    params, pixels = weights_of(FULL), images(rng, 50, 6)
    plain = certify(FULL, params, np.float32((pixels - np.float32(0.3)) / np.float32(0.25)))
    scaled = certify(FULL, params, pixels, shift=0.3, scale=0.25)
    np.testing.assert_allclose(scaled.radii, 0.25 * plain.radii, rtol=1e-12)
    scale = np.array([0.5, 0.25, 2.0, 1.0, 1.0, 1.0], np.float32)
    by_channel = certify(FULL, params, pixels, scale=scale)
    np.testing.assert_allclose(
        by_channel.radii, 0.25 * certify(FULL, params, pixels / scale).radii, rtol=1e-12
    )


def test_radii_without_linear_head(rng):
    net = modules.Flatten(3) @ GroupSort(2) @ orthogonal_conv2d(4, 2) @ Bias(4)
    net = net @ Linear(4, 12, Stiefel()) @ SpaceToDepth(2)
    x = images(rng, 20, 4, 4, 3)
    params = weights_of(net)
    found = certify(net, params, x)
    logits = np.sort(np.asarray(net.apply(params, jnp.asarray(x))), axis=-1)
    np.testing.assert_allclose(
        found.radii, (logits[:, -1] - logits[:, -2]) / np.sqrt(2), rtol=1e-4, atol=1e-6
    )


def test_weights_off_manifolds_are_refused(rng):
    """Scaled or NaN weights are likely a mistake."""
    params, x = weights_of(FULL), images(rng, 5, 6)
    far = jax.tree.map(lambda w: 1.5 * w, params)
    with pytest.raises(ValueError, match=r"0.5 from its manifold, Stiefel"):
        certify(FULL, far, x)
    # With a tolerance, the bounds use each layer's actual norm.
    plain, scaled = (certify(FULL, w, x, tolerance=1.0) for w in (params, far))
    assert scaled.bounds.lipschitz_inputs == pytest.approx(1.5, rel=1e-5)
    assert plain.bounds.lipschitz_inputs == pytest.approx(1.0, rel=1e-5)
    with pytest.raises(ValueError, match="real and finite|from its manifold"):
        certify(FULL, jax.tree.map(lambda w: w * jnp.nan, params), x)


class Equinox(eqx.Module):
    layers: list

    def __init__(self, key):
        self.layers = [eqx.nn.Linear(6, 12, key=key), eqx.nn.Linear(12, 4, False, key=key)]

    def __call__(self, x):
        x = self.layers[0](x)
        first, second = jnp.split(x, 2)
        pairs = [jnp.maximum(first, second), jnp.minimum(first, second)]
        return self.layers[1](jnp.concatenate(pairs))


def slots(paths):
    one, bias, two = paths
    return ExternalModule(
        Param(two, Stiefel(), atom=Linear(4, 12))
        @ GroupSort(2)
        @ Param(bias, Bias(12).manifold, atom=Bias(12))
        @ Param(one, Stiefel(), atom=Linear(12, 6))
    )


def test_external_network_gets_the_same_certificate(rng):
    """The same weights in Equinox's layout, declared by an `ExternalModule`."""
    params, x = weights_of(FULL), images(rng, 30, 6)
    model = eqx.tree_at(
        lambda m: (m.layers[0].weight, m.layers[0].bias, m.layers[1].weight),
        Equinox(jax.random.key(0)),
        (params[0], params[1], params[3]),
    )
    net = slots(("layers/0/weight", "layers/0/bias", "layers/1/weight"))
    module, weights = net.network(model)
    np.testing.assert_allclose(module.apply(weights, jnp.asarray(x)), jax.vmap(model)(x), atol=1e-5)
    options = {"shift": 0.1, "scale": 0.5, "batch": 20}
    found = certify(net, model, x, model=jax.vmap(model), **options)
    np.testing.assert_allclose(found.radii, certify(FULL, params, x, **options).radii, rtol=1e-5)
    assert str(bound(net, model)) == str(bound(module, weights))


class Convolutional(nn.Module):
    """A convolution, MaxMin, a pool with a factor, and three dense layers."""

    @nn.compact
    def __call__(self, x):
        x = GroupSort(2).apply((), nn.Conv(6, (3, 3))(x))
        x = 2 * nn.avg_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Dense(8)(x.reshape(len(x), -1)))
        x = nn.relu(nn.Dense(8)(x))
        return nn.Dense(4)(x)


def kernel(number: int, *sizes: int) -> Param:
    flat = Euclidean(RMSToRMS()).transposed()
    return Param(f"params/Dense_{number}/kernel", flat, atom=Linear(sizes[0], sizes[1]))


def bias(layer: str, size: int) -> Param:
    return Param(f"params/{layer}/bias", Bias(size).manifold, atom=Bias(size))


def conv(*taps: int) -> Param:
    space = Euclidean(ConvRMSToRMS()).with_axes(in_axes=-2, out_axes=-1, taps=taps)
    return Param("params/Conv_0/kernel", space, atom=modules.Conv2D(6, 3))


LAYERS: dict[str, Module] = {
    "conv": conv(-4, -3),
    "conv bias": bias("Conv_0", 6),
    "sort": GroupSort(2),
    "pool": modules.AveragePool(2, 2),
    "factor": modules.Mul(2.0),
    "flatten": modules.Flatten(3),
    "dense": kernel(0, 8, 24),
    "bias": bias("Dense_0", 8),
    "relu": modules.ReLU(),
    "second": kernel(1, 8, 8),
    "second bias": bias("Dense_1", 8),
    "second relu": modules.ReLU(),
    "head": kernel(2, 4, 8),
    "head bias": bias("Dense_2", 4),
}
OTHERS = {
    "a bias left out": {"bias": Identity()},
    "the bias of a convolution left out": {"conv bias": Identity()},
    "the last bias left out": {"head bias": Identity()},
    "a layer left out": {"second": Identity(), "second bias": Identity()},
    "an activation left out": {"relu": Identity()},
    "the last activation left out": {"second relu": Identity()},
    "MaxMin left out": {"sort": Identity()},
    "another activation": {"relu": modules.Abs()},
    "groups of three": {"sort": GroupSort(3)},
    "a factor left out": {"factor": Identity()},
    "another factor": {"factor": modules.Mul(1.99)},
    "biases swapped": {"bias": LAYERS["second bias"], "second bias": LAYERS["bias"]},
    "the bias after its activation": {"bias": LAYERS["relu"], "relu": LAYERS["bias"]},
    "MaxMin after the pool": {"sort": LAYERS["pool"], "pool": LAYERS["sort"]},
    "a square kernel not transposed": {
        "second": Param("params/Dense_1/kernel", Euclidean(RMSToRMS()), atom=Linear(8, 8))
    },
    "taps swapped": {"conv": conv(-3, -4)},
}


def declare(changes: dict[str, Module]) -> modules.Compose:
    return modules.Compose(tuple((LAYERS | changes).values()))


@pytest.fixture(scope="module")
def convolutional():
    """Return parameters with nonzero biases, and the forward function."""
    rng = np.random.default_rng(3)
    params = Convolutional().init(jax.random.key(0), jnp.zeros((1, 4, 4, 3)))
    params = jax.tree.map(
        lambda w: jnp.asarray(rng.normal(size=w.shape), w.dtype) if w.ndim == 1 else w, params
    )
    return params, jax.jit(functools.partial(Convolutional().apply, params))


def test_declared_convolutional_network_is_certified(rng, convolutional):
    params, forward = convolutional
    found = certify(ExternalModule(declare({})), params, images(rng, 20, 4, 4, 3), model=forward)
    assert np.all(found.radii > 0)


@pytest.mark.parametrize("name", OTHERS)
def test_declaration_of_another_network_is_refused(rng, convolutional, name):
    (params, forward), layers = convolutional, declare(OTHERS[name])
    x = images(rng, 20, 4, 4, 3)
    left_out = [LAYERS[k] for k, layer in OTHERS[name].items() if layer == Identity()]
    unused = tuple(layer.path for layer in left_out if isinstance(layer, Param))
    if unused:
        with pytest.raises(ValueError, match=r"no Param names the parameters at .*unused="):
            certify(ExternalModule(layers), params, x, model=forward)
    with pytest.raises(ValueError, match=r"is not the model: logit \d of image \d+ differs by"):
        certify(ExternalModule(layers, unused), params, x, model=forward)


def test_other_weights_than_the_models_are_refused(rng, convolutional):
    params, forward = convolutional
    older = jax.tree.map(lambda w: 1.001 * w, params)
    with pytest.raises(ValueError, match="is not the model.*the model's weights must be params"):
        certify(ExternalModule(declare({})), older, images(rng, 20, 4, 4, 3), model=forward)


def test_model_of_external_module_must_fit(rng, convolutional):
    (params, forward), net = convolutional, ExternalModule(declare({}))
    x = images(rng, 20, 4, 4, 3)
    with pytest.raises(ValueError, match=r"certify\(model\) is missing: an ExternalModule needs"):
        certify(net, params, x)
    with pytest.raises(ValueError, match=r"to logits \(20, 4\); got \(20, 3\)"):
        certify(net, params, x, model=lambda x: forward(x)[:, :3])
    with pytest.raises(TypeError, match="dot_general") as caught:
        certify(net, params, x, model=lambda x: jnp.ones((5, 5)) @ x)
    assert "jax.vmap" in caught.value.__notes__[-1]


def test_parameters_left_over_are_named():
    """Floating-point arrays alone are parameters: not keys, counts or functions."""
    w1, b, _, w2 = weights_of(FULL)
    used = {"a": w1, "b": b, "c": w2}
    more = used | {
        "norm": {"scale": jnp.ones(3), "mean": jnp.ones(3)},
        "bn": jnp.ones(2, "bfloat16"),
    }
    net = slots("abc")
    for function in (net.network, functools.partial(bound, net)):
        with pytest.raises(ValueError, match=r"at \['bn', 'norm/mean', 'norm/scale'\]: declare"):
            function(more)
    for unused in (("norm", "bn"), ("bn", "norm/scale", "norm/mean")):
        dataclasses.replace(net, unused=unused).network(more)
    with pytest.raises(ValueError, match=r"at \['norm/mean'\]"):
        dataclasses.replace(net, unused=("bn", "norm/scale", "nor")).network(more)
    net.network(used | {"key": jax.random.key(0), "count": jnp.int32(3), "act": jax.nn.relu})


def test_external_network_errors_name_missing_weights():
    net = slots("abc")
    w1, b, _, w2 = weights_of(FULL)
    with pytest.raises(ValueError, match="no weight at 'c'; there are \\['a', 'b'\\]"):
        net.network({"a": w1, "b": b})
    with pytest.raises(ValueError, match="'a' has the shape \\(6, 12\\).*takes \\(12, 6\\)"):
        net.network({"a": w1.T, "b": b, "c": w2})
    with pytest.raises(ValueError, match="has no atom, so its effect"):
        ExternalModule(Param("a", Stiefel())).network({"a": w1})


ONE = np.ones((1, 6))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": np.ones(6, np.float32)}, "certify\\(images\\)"),
        ({"images": np.ones((2, 6), complex)}, "must be numbers"),
        ({"images": np.ones((0, 6), np.float32)}, "one image or more; got float32"),
        ({"tolerance": np.nan}, "certify\\(tolerance\\) must be a number >= 0; got nan"),
        ({"labels": np.zeros(3, int)}, "must be 2 whole numbers"),
        ({"labels": np.zeros(2)}, "whole numbers"),
        ({"scale": 0.0}, "scale"),
        ({"scale": np.array([1.0, 1, 1, 1, 1, np.inf])}, "certify\\(scale\\) must be real and fin"),
        ({"shift": np.nan}, "certify\\(shift\\) must be real and finite"),
        ({"images": np.inf * ONE}, "logits must be real and finite"),
        ({"images": ONE, "shift": np.zeros((6, 6))}, "shift\\) must broadcast to an image"),
        ({"images": ONE, "scale": np.ones((3, 1))}, "must broadcast to an image \\(6,\\); got"),
        ({"scale": np.ones(5)}, "certify\\(scale\\) must broadcast to an image"),
        ({"batch": 0}, "certify\\(batch\\) must be a whole number in \\[1, inf\\); got 0"),
    ],
)
def test_error_messages(change, message):
    given = {"images": np.ones((2, 6), np.float32)} | change
    with pytest.raises(ValueError, match=message):
        certify(FULL, weights_of(FULL), **given)


def test_unbounded_networks_are_refused(rng):
    divided = Linear(4, 6, Stiefel()) @ modules.RMSDivide()
    with pytest.raises(ValueError, match="no Lipschitz constant: RMSDivide"):
        certify(divided, weights_of(divided), images(rng, 3, 6))
    with pytest.raises(ValueError, match="an accuracy needs labels"):
        certify(FULL, weights_of(FULL), images(rng, 3, 6)).accuracy()
