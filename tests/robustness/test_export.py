"""Exported certificates: their contents, and their acceptance by the verifier."""

import dataclasses
import functools
import json
import math
import re
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import config

from manifoldmuon import modules
from manifoldmuon.manifolds import EmbeddingRows, Orthogonal, Stiefel
from manifoldmuon.modules import Bias, Linear
from manifoldmuon.robustness import certify, describe, export
from manifoldmuon.robustness._export import Arrays
from manifoldmuon_verify import Refused, verify
from tests.compiled import ask
from tests.verify import fuzz
from tests.verify.forge import FILES, Forgery, export_radii, put, refusal
from tests.verify.test_layers import CASES


def margins(net, params, x, constant):
    """Return radii from the two largest logits, for a last layer of orthonormal rows."""
    two = ask(lambda x: jax.lax.top_k(net.apply(params, x), 2)[0], np.float32(x))
    return np.asarray(two[:, 0] - two[:, 1], np.float64) / (math.sqrt(2) * constant)


@pytest.mark.slow
def test_attacks_within_radius_keep_labels(rng, tmp_path):
    """The attack acts on pixels, before shift and scale, like an external attacker."""
    net = modules.GroupSort() @ Bias(16) @ Linear(16, 16, Orthogonal()) @ modules.GroupSort()
    net = 2.0 * Linear(3, 16, EmbeddingRows(1.0)) @ net @ Linear(16, 12, Stiefel())
    params = jax.tree.map(lambda w: 1.05 * w + 0.01, net.init(jax.random.key(5)))
    images = rng.uniform(size=(100, 12)).astype(np.float32)
    given: Any = {"shift": 0.4, "scale": 0.3, "tolerance": np.inf}
    found = certify(net, params, images, np.arange(100) % 3, **given)
    proved = verify(export(tmp_path / "it", found)).radii
    radii = jnp.asarray(np.maximum(found.radii, proved), jnp.float32)[:, None]
    label = found.predicted[:, None]

    def margin(x):
        logits = net.apply(params, (x - 0.4) / 0.3)
        own = jnp.take_along_axis(logits, label, axis=-1)
        others = jnp.where(jnp.arange(3) == label, -jnp.inf, logits)
        return own[:, 0] - jnp.max(others, axis=-1)

    @functools.partial(jax.jit, static_argnums=0)
    def attacked(factor):
        def step(move, _):
            g = jax.grad(lambda d: jnp.sum(margin(images + d)))(move)
            move = move - 0.1 * radii * g / jnp.linalg.norm(g, axis=-1, keepdims=True)
            length = jnp.linalg.norm(move, axis=-1, keepdims=True)
            return move * jnp.minimum(1, factor * radii / jnp.maximum(length, 1e-9)), None

        move, _ = jax.lax.scan(step, jnp.zeros_like(images), length=100)
        return margin(images + move)

    assert jnp.min(attacked(0.999)) > 0
    assert jnp.min(attacked(1.2)) < 0  # the attack succeeds beyond the radius


def small(rng, width=6):
    net = Bias(3) @ Linear(3, width, Stiefel()) @ modules.GroupSort() @ Linear(width, 5, Stiefel())
    images = rng.normal(size=(8, 5)).astype(np.float32)
    return net, net.init(jax.random.key(1)), images, np.arange(8) % 3


@pytest.mark.parametrize(
    ("dtype", "name"), [("bfloat16", "BF16"), ("float16", "F16"), ("float32", "F32")]
)
def test_weights_are_exported_in_their_dtype(rng, tmp_path, dtype, name):
    net, params, images, labels = small(rng)
    params = jax.tree.map(lambda w: w.astype(dtype), params)
    path = export_radii(tmp_path / "it", net, params, images, labels, np.zeros(8))
    report = verify(path)
    assert report.matrices == 2
    size = jnp.finfo(dtype).eps
    assert 0.02 * size < report.most_singular - 1 < 4 * size
    arrays = json.loads(path.read_text())["weights"]["arrays"]
    assert {entry["dtype"] for entry in arrays.values()} == {name}


@pytest.mark.parametrize("dtype", ["int64", "uint16", ">f4", "bfloat16"])
def test_images_of_any_dtype_are_exported(rng, tmp_path, dtype):
    net, params, _, labels = small(rng)
    images = rng.integers(99, size=(8, 5)).astype(jnp.bfloat16 if dtype == "bfloat16" else dtype)
    found = certify(net, params, images, labels)
    report = verify(export(tmp_path / "it", found))
    np.testing.assert_allclose(report.radii, found.radii, rtol=1e-5)


def test_network_in_bfloat16_with_numpy_numbers_is_certified(rng, tmp_path, monkeypatch):
    """The nearest points in bfloat16 are on their manifolds; NumPy numbers are no JSON."""
    monkeypatch.setattr(config, "jaxtyping_disable", True)
    half, two = cast(float, np.float32(0.5)), cast(int, np.int64(2))
    net = modules.Mul(half) @ Linear(3, 12, Stiefel())
    net = net @ modules.GroupSort(two) @ Linear(12, 5, Stiefel())
    params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), net.init(jax.random.key(2)))
    found = certify(net, params, rng.normal(size=(8, 5)).astype(np.float32), np.arange(8) % 3)
    assert verify(export(tmp_path / "it", found)).matrices == 2


NETWORKS = CASES | fuzz.networks()


@pytest.mark.slow_except("linear-real", "linear-float32", "perceptron-real", "perceptron-float32")
@pytest.mark.parametrize("arithmetic", ["real", "float32"])
@pytest.mark.parametrize("name", NETWORKS)
def test_exports_verify_at_defaults(rng, tmp_path, name, arithmetic):
    """All images, a black one included, keep all of their radius but for rounding."""
    net, shape = NETWORKS[name]
    found = jax.eval_shape(lambda x: net.apply(net.init(jax.random.key(0)), x), jnp.zeros(shape))
    net = modules.Flatten(found.ndim) @ net if found.ndim > 1 else net
    params = jax.tree.map(
        lambda w: w + jnp.asarray(0.05 * rng.normal(size=w.shape), jnp.float32),
        net.init(jax.random.key(0)),
    )
    images = rng.integers(256, size=(30, *shape)).astype(np.uint8)
    images[0] = 0
    given: Any = {"shift": np.linspace(99, 133, shape[-1]), "scale": 60.0, "tolerance": np.inf}
    found = certify(net, params, images, np.arange(30) % 2, **given)
    path = export(tmp_path / "it", found, arithmetic=arithmetic, at=[0.01])
    claimed = np.asarray(json.loads(path.read_text())["claims"]["radii"])
    assert np.all(claimed <= verify(path).radii)
    assert np.all(claimed <= found.radii)
    lost = 1e-5 * np.max(found.radii) if arithmetic == "real" else 0.1
    np.testing.assert_allclose(claimed, found.radii, atol=lost)


def test_wrong_prediction_is_exported_without_radius(rng, tmp_path):
    """Rounding to float32 may choose a class with a smaller logit."""
    found = certify(*small(rng))
    other = found.predicted.copy()
    other[5] = (other[5] + 1) % 3
    path = export(tmp_path / "it", dataclasses.replace(found, predicted=other))
    claimed = np.asarray(json.loads(path.read_text())["claims"]["radii"])
    assert verify(path).radii[5] == claimed[5] == 0
    assert np.all(np.delete(claimed, 5) > 0)


@pytest.mark.parametrize("arithmetic", ["real", "float32"])
def test_refusal_has_the_proved_radii(rng, tmp_path, arithmetic):
    export(tmp_path / "it", certify(*small(rng)), arithmetic=arithmetic)
    forged = Forgery(tmp_path / "it")
    claimed = list(forged.told["claims"]["radii"])
    forged.told["claims"]["radii"][2::4] = claimed[2] + 0.5, 9
    with pytest.raises(Refused) as caught:
        verify(forged.write(tmp_path / "more"))
    text = "image 2: the radius .* is not proved, .* .2 of 8 images fall short: 2 by 0.[45].*, 6 by"
    assert re.search(text, str(caught.value))
    assert caught.value.radii is not None
    np.testing.assert_allclose(caught.value.radii, claimed, rtol=1e-4)


def test_claimed_radii_are_below_given_radii(rng, tmp_path):
    net, params, images, labels = small(rng)
    radii = certify(net, params, images).radii * rng.uniform(0, 1, size=8)
    radii[:2] = 0, 5e-324
    path = export_radii(tmp_path / "it", net, params, images, labels, radii, at=[0.3])
    claims = json.loads(path.read_text())["claims"]
    claimed = np.asarray(claims["radii"])
    assert np.all((claimed <= radii) & (claimed >= (1 - 1e-5) * radii))
    assert claims["radii"] == [float(f"{radius:.6g}") for radius in claimed]
    right = np.asarray(claims["predictions"]) == labels
    assert claims["certified"] == [{"radius": 0.3, "images": int(np.sum(right & (claimed >= 0.3)))}]


def test_export_overwrites_nothing(rng, tmp_path, monkeypatch):
    net, params, images, labels = small(rng)
    given, folder = (net, params, images, labels, np.zeros(8)), tmp_path / "empty"
    folder.mkdir()
    export_radii(folder, *given)
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(whole) == set(FILES)
    (tmp_path / "file").write_text("mine")
    for place in ("empty", "file"):
        with pytest.raises(FileExistsError, match="name a new directory"):
            export_radii(tmp_path / place, *given)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole

    def full(*args):
        raise OSError("no space")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="no space"):
        export_radii(tmp_path / "new", *given)
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "file"}


@pytest.mark.parametrize(
    ("module", "what"),
    [
        (modules.GELU(), "GELU.* cannot be exported"),
        (modules.Conv2D(3, 5), r"Conv2D\(3, 3, 3, 5\) on Euclidean cannot be exported"),
        (modules.RMSDivide(), "RMSDivide"),
        (modules.Mul(2.0) @ (modules.Abs(), modules.ReLU()), "if Add follows them"),
        (modules.Abs() @ modules.Add(), "only after parallel modules"),
    ],
)
def test_export_refuses_unknown_modules(module, what):
    params = jax.eval_shape(lambda: module.init(jax.random.key(0)))
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), params)
    with pytest.raises(TypeError, match=what):
        describe(module, params, Arrays())


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"labels": None}, "a certificate needs labels"),
        ({"radii": np.full(8, np.nan)}, "radii must be finite"),
        ({"radii": np.full(8, -1.0)}, "not negative"),
        ({"pixels": (0.0, 1.0)}, "pixels must include all images, which are in"),
        ({"pixels": (0.0, np.inf)}, "pixels must be two finite numbers"),
        ({"at": [np.nan]}, "export\\(at\\) must be a finite number"),
        ({"arithmetic": "bfloat16"}, "must be 'real' or 'float32'"),
    ],
)
def test_invalid_arguments_raise(rng, tmp_path, change, what):
    net, params, images, labels = small(rng)
    arguments = {"images": images, "labels": labels, "radii": np.zeros(8)} | change
    with pytest.raises(ValueError, match=what):
        export_radii(tmp_path / "it", net, params, **arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["shift", "scale"])
@pytest.mark.parametrize("shape", [(2, 1), (2, 5), (1, 5)])
def test_shift_or_scale_per_pixel_is_refused(rng, tmp_path, name, shape):
    net, images = Linear(3, 10, Stiefel()) @ modules.Flatten(2), rng.uniform(size=(4, 2, 5))
    params, given = net.init(jax.random.key(0)), dict[str, Any]({name: np.ones(shape)})
    found = certify(net, params, images, np.zeros(4, int), **given)
    with pytest.raises(ValueError, match=f"{name} must be a number, or a number per channel; got"):
        export(tmp_path / "it", found)


def test_custom_modules_can_be_described(rng, tmp_path):
    class Doubled(Linear):
        def apply(self, params, x):
            return 2 * super().apply(params, x)

    @describe.register
    def doubled(module: Doubled, params, arrays):
        weight = arrays.add("doubled", params)
        return [{"kind": "linear", "weight": weight}, {"kind": "scale", "factor": 2}]

    _, _, images, labels = small(rng)
    net = Linear(3, 6, Stiefel()) @ modules.GroupSort() @ Doubled(6, 5, Stiefel())
    params = net.init(jax.random.key(0))
    radii = margins(net, params, images, 2.0)
    report = verify(export_radii(tmp_path / "it", net, params, images, labels, radii))
    np.testing.assert_allclose(report.radii, radii, atol=1e-5)


def test_shared_weight_is_written_once_and_declared(rng, tmp_path):
    layer = Linear(6, 6, Orthogonal()) @ modules.GroupSort()
    net = modules.Tied(Linear(3, 6, Stiefel()) @ layer @ layer @ Linear(6, 5, Stiefel()), (2, 4))
    _, _, images, labels = small(rng)
    params = net.init(jax.random.key(0))
    radii = margins(net, params, images, 1.0)
    path = export_radii(tmp_path / "it", net, params, images, labels, radii)
    told = json.loads(path.read_text())["weights"]
    assert len(told["arrays"]) == 3
    assert told["shared"] == ["1.linear"]
    np.testing.assert_allclose(verify(path).radii, radii, atol=1e-5)
    forged = Forgery(path.parent, put("weights.shared", [])).write(tmp_path / "forged")
    text = "weights, '1.linear': used in ['network[2]', 'network[4]'] and not declared"
    assert text in refusal(forged)


@pytest.mark.parametrize(
    ("tail", "pairwise"),
    [
        (modules.Identity(), True),
        (modules.MeanSubtract() @ (3.0 * modules.Identity()), True),
        (-0.5 * Bias(3), True),
        (modules.ReLU(), False),
        (modules.GroupSort(3), False),
    ],
)
def test_pairwise_radii_need_difference_preserving_tail(rng, tmp_path, tail, pairwise):
    weight = np.diag([1.0, 2.0, 3.0])
    net = tail @ Linear(3, 3)
    values = {(3, 3): jnp.asarray(weight, jnp.float32), (3,): jnp.ones(3)}
    params = jax.tree.map(lambda w: values[w.shape], net.init(jax.random.key(0)))
    images = rng.uniform(0.1, 1, size=(20, 3)).astype(np.float32)
    logits = np.asarray(net.apply(params, jnp.asarray(images)), float)
    order = np.argsort(logits, axis=1)[:, ::-1]
    size = abs(net.sensitivity)
    wanted = []
    for z, (first, *rest) in zip(logits, order, strict=True):
        gains = {j: np.linalg.norm(weight[first] - weight[j]) for j in rest}
        wanted.append(min(
            (z[first] - z[j]) / (size * gains[j] if pairwise else 3 * np.sqrt(2)) for j in rest
        ))  # fmt: skip
    path = export_radii(tmp_path / "it", net, params, images, np.zeros(20, int), np.zeros(20))
    np.testing.assert_allclose(verify(path).radii, wanted, rtol=1e-5, atol=1e-6)
