"""Weights that a wrapper rescales in the forward pass: no manifold bounds what acts."""

from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from manifoldmuon import optim
from manifoldmuon.frameworks import equinox, linen
from manifoldmuon.frameworks import nnx as nnx_reader
from manifoldmuon.manifolds import Euclidean, Hypersphere, Stiefel
from manifoldmuon.norms import RMSToRMS

KEY, RNGS = jax.random.key(0), nnx.Rngs(0)


class Linen(nn.Module):
    kind: Any

    @nn.compact
    def __call__(self, x):
        options = {"update_stats": False} if self.kind is nn.SpectralNorm else {}
        return nn.Dense(2)(self.kind(nn.Dense(3, name="inside"))(x, **options))


class LinenSetup(nn.Module):
    def setup(self):
        self.wrapper = nn.WeightNorm(nn.Dense(3))

    def __call__(self, x):
        return self.wrapper(x)


def read_setup(kind, manifold, **options):
    return linen.geometry(LinenSetup(), (jnp.ones((1, 2)),), manifold, **options)


def read_linen(kind, manifold, **options):
    return linen.geometry(Linen(kind), (jnp.ones((1, 2)),), manifold, **options)


def read_nnx(kind, manifold, **options):
    return nnx_reader.geometry(kind(nnx.Linear(2, 3, rngs=RNGS), rngs=RNGS), manifold, **options)


def read_equinox(kind, manifold, overrides=None):
    spectral = kind is eqx.nn.SpectralNorm
    model = kind(eqx.nn.Linear(2, 3, key=KEY), "weight", **({"key": KEY} if spectral else {}))
    states = {eqx.nn.StateIndex: None} if spectral else {}
    return equinox.geometry(model, manifold, overrides=states | (overrides or {}))


CASES: list[Any] = [
    (read_linen, nn.WeightNorm, "inside/kernel"),
    (read_linen, nn.SpectralNorm, "inside/kernel"),
    (read_setup, nn.WeightNorm, "wrapper/layer_instance/kernel"),
    (read_nnx, nnx.WeightNorm, "layer_instance/kernel"),
    (read_nnx, nnx.SpectralNorm, "layer_instance/kernel"),
    (read_equinox, eqx.nn.WeightNorm, "layer/weight"),
    (read_equinox, eqx.nn.SpectralNorm, "layer/weight"),
]


@pytest.mark.parametrize("manifold", [Stiefel(), Hypersphere(ndim=2)])
@pytest.mark.parametrize(("read", "kind", "path"), CASES)
def test_constrained_weight_inside_a_rescaling_wrapper_raises(read, kind, path, manifold):
    with pytest.raises(ValueError, match=f"{kind.__name__} rescales '{path}' in the forward pass"):
        read(kind, manifold)


@pytest.mark.parametrize(("read", "kind", "path"), CASES)
def test_free_weight_inside_a_rescaling_wrapper_is_read(read, kind, path):
    assert read(kind, Euclidean(RMSToRMS()))[path].manifold == Euclidean(RMSToRMS())
    assert read(kind, Stiefel(), overrides={path: None})[path] is None


@pytest.mark.parametrize("kind", [nn.WeightNorm, nn.SpectralNorm])
def test_layer_beside_a_rescaling_wrapper_is_read(kind):
    found = read_linen(kind, Stiefel(), overrides={"inside/kernel": None})
    assert found["Dense_0/kernel"] == Stiefel().transposed()


def test_scale_of_a_wrapper_in_setup_has_its_own_entry():
    kernel = "wrapper/layer_instance/kernel"
    geometry = read_setup(nn.WeightNorm, Stiefel(), overrides={kernel: Stiefel()}, rest=Euclidean())
    assert geometry[f"{kernel}/scale"] == Euclidean()
    params = LinenSetup().init(KEY, jnp.ones((1, 2)))["params"]
    params = optim.project_tree(geometry, params)
    optimizer = optim.riemannian_adam(0.1, geometry)
    updates: Any = optimizer.update(params, optimizer.init(params), params)[0]
    layer, scale = updates["wrapper"].values()
    # Adam's first step is the sign of the gradient; a normal gradient of Stiefel gives none.
    assert jnp.allclose(scale, -0.1, atol=1e-6)
    assert jnp.allclose(layer["kernel"], 0, atol=1e-6)


def test_model_of_shapes_needs_where():
    model = eqx.filter_eval_shape(lambda key: eqx.nn.Linear(4, 4, key=key), KEY)
    with pytest.raises(ValueError, match="`where` keeps no leaf"):
        equinox.geometry(model, Stiefel())
