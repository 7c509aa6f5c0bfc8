"""Table of transformations under test; add a row for each new transformation."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from manifoldmuon import contrib, optim
from manifoldmuon._internal.trees.paths import path_string
from manifoldmuon.manifolds import (
    EmbeddingRows,
    Euclidean,
    Grassmann,
    Hypersphere,
    Layout,
    Orthogonal,
    Stiefel,
)
from manifoldmuon.manifolds.solvers import ProjectedPolar
from manifoldmuon.norms import Frobenius, L1ToRMS, MaxAbs, RMSToRMS


@dataclasses.dataclass(frozen=True)
class Instance:
    """Row of the table: constructor, geometry, and the properties that hold."""

    make_tx: Callable[..., optax.GradientTransformation]
    geometry: Any
    shapes: dict[str, Any]
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    scale_free: bool = True
    still: bool = True
    needs_params: bool = True
    wrappers: bool = True

    def hyperparams(self) -> dict[str, Any]:
        takes_geometry = self.make_tx is not optim.scale_by_budget
        return self.arguments | ({"geometry": self.geometry} if takes_geometry else {})

    @property
    def descends(self) -> bool:
        """Return whether updates descend: only with a learning rate."""
        return "learning_rate" in self.arguments

    def params(self) -> Any:
        """Draw a random point."""
        shapes = abstract(self.shapes)

        @jax.jit
        def draw():
            ones = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), shapes)
            return optim.init_tree(self.geometry, jax.random.key(3), ones)

        return draw()

    def grads(self, seed: int = 5) -> Any:
        leaves, treedef = jax.tree.flatten(abstract(self.shapes))
        keys = jax.random.split(jax.random.key(seed), len(leaves))
        drawn = [jax.random.normal(key, x.shape) for key, x in zip(keys, leaves, strict=True)]
        return jax.tree.unflatten(treedef, drawn)

    def tx(self) -> optax.GradientTransformationExtraArgs:
        return optax.with_extra_args_support(self.make_tx(**self.hyperparams()))


def abstract(shapes: Any) -> Any:
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


# Two leaves of the same kind (solved together) among leaves of other kinds.
FLAT = {"first": {"kernel": (8, 3), "bias": (8,)}, "second": {"kernel": (8, 3), "bias": (8,)}}
FLAT_GEOMETRY = optim.by_path({"**/kernel": Euclidean(RMSToRMS()), "*/bias": Euclidean()})
PAIR = FLAT["first"]
PAIR_GEOMETRY = {"kernel": Euclidean(RMSToRMS()), "bias": Euclidean()}
CURVED = {"a": (6, 3), "b": (6, 3), "vectors": (2, 5), "gain": (4,)}
# The same solver on every platform: a preset is traced once per platform.
STIEFEL = Stiefel(solver=ProjectedPolar())
CURVED_GEOMETRY = {
    "a": STIEFEL.transposed(),
    "b": STIEFEL.transposed(),
    "vectors": Hypersphere(scale=2.0),
    "gain": Euclidean(MaxAbs(ndim=1)),
}
SPHERE = Hypersphere(ndim=2)
EDGES = {"empty": (0, 4), "none": (4, 0), "row": (1, 4), "column": (4, 1), "one": (1, 1)}
OTHERS = {"table": (6, 4), "square": (4, 4), "code": (5, 4), "scalar": ()}
OTHER_GEOMETRY = {
    "table": EmbeddingRows(),
    "square": Orthogonal(),
    "code": Euclidean(L1ToRMS()),
    "scalar": Euclidean(Frobenius(ndim=0)),
}
SETS = {"space": (6, 2), "fixed": (2, 4, 2)}
SET_GEOMETRY = {
    "space": Grassmann(),
    "fixed": Hypersphere(3.0, ndim=2, step_norm=MaxAbs()).stacked(),  # multipliers are carried
}


SMALL = {"a": (6, 3), "b": (6, 3), "gain": (4,)}


def small_geometry(path: Any, leaf: Any) -> Any:
    """Choose the manifold by path, as in user code."""
    del leaf
    fast = Stiefel(solver=ProjectedPolar()).transposed()
    return CURVED_GEOMETRY["gain"] if path_string(path) == "gain" else fast


def with_copies(learning_rate: Any, geometry: Any) -> optax.GradientTransformationExtraArgs:
    return optim.with_master_copies(optim.manifold_muon(learning_rate, geometry))


def from_anywhere(learning_rate: Any, geometry: Any) -> optax.GradientTransformationExtraArgs:
    return optim.start_on(optim.manifold_muon(learning_rate, geometry), geometry)


def with_bits(bits: int) -> Callable[..., optax.GradientTransformation]:
    def make(learning_rate: Any, geometry: Any) -> optax.GradientTransformation:
        tx = optim.manifold_muon(learning_rate, geometry, momentum=0.9)
        return contrib.quantized(tx, bits, block=2, min_size=0)

    return make


def with_adam(
    learning_rate: Any, rest_rate: Any, geometry: Any
) -> optax.GradientTransformationExtraArgs:
    tx = optim.manifold_muon(learning_rate, geometry)
    # Not Optax's Adam: its updates have the gradients' dtype.
    return optim.hybrid(tx, geometry, optim.riemannian_adam(rest_rate, Euclidean(Frobenius(0))))


def on_spheres(learning_rate: Any, geometry: Any) -> optax.GradientTransformationExtraArgs:
    base = optax.trace(0.9, accumulator_dtype=jnp.float32)
    return optim.hyperball(base, learning_rate, geometry, radial=0.5, radius=2.0)


def with_clipped_heads(learning_rate: Any, geometry: Any) -> optax.GradientTransformationExtraArgs:
    """Clip three heads of a fused kernel and supply their logits; only the second is too large."""
    heads = optim.by_path({"q": Layout(out_blocks=3), "**": None})
    tx = contrib.with_qk_clip(optim.muon(learning_rate, geometry), geometry, heads)

    def update(updates, state, params=None, **extra_args):
        logits = {"q": jnp.array([50.0, 400.0, 100.0])} if updates else 0.0
        return tx.update(updates, state, params, max_logits=logits, **extra_args)

    return optax.GradientTransformationExtraArgs(tx.init, update)


INSTANCES = {
    "steepest": Instance(optim.scale_by_steepest, CURVED_GEOMETRY, CURVED),
    "steepest-edges": Instance(optim.scale_by_steepest, STIEFEL, EDGES, wrappers=False),
    "steepest-others": Instance(optim.scale_by_steepest, OTHER_GEOMETRY, OTHERS, wrappers=False),
    "budget": Instance(
        optim.scale_by_budget,
        FLAT_GEOMETRY,
        FLAT,
        {"budgets": {"first": 0.5, "second": {"kernel": 0.25, "bias": 0}}},
        scale_free=False,
        needs_params=False,
    ),
    "retract": Instance(optim.retract, CURVED_GEOMETRY, CURVED, scale_free=False),
    "retract-edges": Instance(optim.retract, STIEFEL, EDGES, scale_free=False, wrappers=False),
    "tangent": Instance(optim.project_tangent, CURVED_GEOMETRY, CURVED, scale_free=False),
    "neurons": Instance(
        contrib.scale_by_neuron_rms,
        {"a": STIEFEL.transposed(), "b": Euclidean(RMSToRMS())},
        {"a": (6, 3), "b": (6, 3)},
        scale_free=False,
    ),
    "normalize": Instance(
        optim.normalize,
        CURVED_GEOMETRY,
        CURVED,
        {
            "base": optax.trace(0.9, accumulator_dtype=jnp.float32),
            "budgets": {"a": 0.5, "b": 2.0, "vectors": 1.0, "gain": 0.0},
        },
    ),
    "muon": Instance(
        optim.muon,
        FLAT_GEOMETRY,
        FLAT,
        {"learning_rate": 0.1, "weight_decay": 0.1, "budgets": optim.by_path({"**": 0.5})},
        still=False,
    ),
    "normuon": Instance(
        contrib.normuon,
        PAIR_GEOMETRY,
        PAIR,
        {"learning_rate": 0.1, "budgets": 0.5},
        wrappers=False,
    ),
    "riemannian_adam": Instance(
        optim.riemannian_adam,
        CURVED_GEOMETRY,
        CURVED,
        {"learning_rate": 0.01, "b1": 0.8},
        scale_free=False,
    ),
    "riemannian_sgd": Instance(
        optim.riemannian_sgd,
        OTHER_GEOMETRY,
        OTHERS,
        {
            "learning_rate": optax.linear_schedule(0.1, 0.0, 10),
            "momentum": 0.9,
            "nesterov": True,
        },
        scale_free=False,
        wrappers=False,
    ),
    "manifold_muon": Instance(
        optim.manifold_muon,
        small_geometry,
        SMALL,
        {"learning_rate": optax.linear_schedule(0.1, 0.0, 10), "momentum": 0.9},
    ),
    "manifold_muon-sets": Instance(
        optim.manifold_muon, SET_GEOMETRY, SETS, {"learning_rate": 0.1}, wrappers=False
    ),
    "master copies": Instance(
        with_copies, EmbeddingRows(), {"a": (6, 3), "b": (5, 3)}, {"learning_rate": 0.1}
    ),
    "start": Instance(from_anywhere, small_geometry, SMALL, {"learning_rate": 0.1}, still=False),
    "8 bits": Instance(with_bits(8), small_geometry, SMALL, {"learning_rate": 0.1}),
    "4 bits": Instance(
        with_bits(4),
        STIEFEL,
        {"a": (6, 3), "b": (6, 3)},
        {"learning_rate": 0.1},
    ),
    "hybrid": Instance(
        with_adam,
        {"a": STIEFEL, "b": STIEFEL, "table": None, "gain": None},
        {"a": (6, 3), "b": (6, 3), "table": (5, 2), "gain": (4,)},
        {"learning_rate": 0.1, "rest_rate": 0.01},
        scale_free=False,
        still=False,
    ),
    "hyperball": Instance(
        on_spheres,
        {"w": SPHERE.transposed(), "stack": SPHERE.stacked(), "bias": Euclidean()},
        {"w": (5, 4), "stack": (2, 3, 2), "bias": (4,)},
        {"learning_rate": 0.1},
        scale_free=False,
    ),
    "muonh": Instance(
        optim.muonh,
        {"w": SPHERE.transposed(), "stack": SPHERE.stacked(), "bias": Euclidean()},
        {"w": (5, 4), "stack": (2, 3, 2), "bias": (4,)},
        {"learning_rate": 0.1},
    ),
    "adamh": Instance(
        optim.adamh,
        {"w": SPHERE.transposed(), "stack": SPHERE.stacked(), "bias": Euclidean()},
        {"w": (5, 4), "stack": (2, 3, 2), "bias": (4,)},
        {"learning_rate": 0.1},
        scale_free=False,
    ),
    "qk clip": Instance(
        with_clipped_heads,
        {"q": Euclidean(RMSToRMS()), "o": Euclidean(RMSToRMS())},
        {"q": (6, 4), "o": (4, 6)},
        {"learning_rate": 0.1},
        still=False,
    ),
    "parts": Instance(
        optim.manifold_muon,
        {
            "qkv": Stiefel().with_axes(-2, -1, out_blocks=(4, 1, 2)),
            "o": Euclidean(RMSToRMS()).transposed(),
        },
        {"qkv": (4, 7), "o": (4, 4)},
        {"learning_rate": 0.1},
    ),
}
