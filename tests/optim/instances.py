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
from tests.optim.training import drawn


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
        rest = drawn(3, self.shapes)
        return jax.jit(lambda: optim.init_tree(self.geometry, jax.random.key(3), rest))()

    def grads(self, seed: int = 5) -> Any:
        return jax.tree.map(jnp.asarray, drawn(seed, self.shapes))

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
MATRIX = Euclidean(RMSToRMS())
FLAT_GEOMETRY = optim.by_path({"**/kernel": MATRIX, "*/bias": Euclidean()})
PAIR, PAIR_GEOMETRY = FLAT["first"], {"kernel": MATRIX, "bias": Euclidean()}
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
TWO = {"a": (6, 3), "b": (6, 3)}
SMALL = TWO | {"gain": (4,)}
RATE = {"learning_rate": 0.1}
DECAYING = optax.linear_schedule(0.1, 0.0, 10)
TRACE = optax.trace(0.9, accumulator_dtype=jnp.float32)
BALLS = {"w": SPHERE.transposed(), "stack": SPHERE.stacked(), "bias": Euclidean()}
BALL_SHAPES = {"w": (5, 4), "stack": (2, 3, 2), "bias": (4,)}
FUSED = Stiefel().with_axes(-2, -1, out_blocks=(4, 1, 2))


def small_geometry(path: Any, leaf: Any) -> Any:
    """Choose the manifold by path, as in user code."""
    return CURVED_GEOMETRY["gain" if path_string(path) == "gain" else "a"]


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
    return optim.hyperball(TRACE, learning_rate, geometry, radial=0.5, radius=2.0)


def with_clipped_heads(learning_rate: Any, geometry: Any) -> optax.GradientTransformationExtraArgs:
    """Clip three heads of a fused kernel and supply their logits; only the second is too large."""
    heads = optim.by_path({"q": Layout(out_blocks=3), "**": None})
    tx = contrib.with_qk_clip(optim.muon(learning_rate, geometry), geometry, heads)

    def update(updates, state, params=None, **extra_args):
        logits = {"q": jnp.array([50.0, 400.0, 100.0])} if updates else 0.0
        return tx.update(updates, state, params, max_logits=logits, **extra_args)

    return optax.GradientTransformationExtraArgs(tx.init, update)


# fmt: off
INSTANCES = {
    "steepest": Instance(optim.scale_by_steepest, CURVED_GEOMETRY, CURVED),
    "steepest-edges": Instance(optim.scale_by_steepest, STIEFEL, EDGES, wrappers=False),
    "steepest-others": Instance(optim.scale_by_steepest, OTHER_GEOMETRY, OTHERS, wrappers=False),
    "budget": Instance(
        optim.scale_by_budget, FLAT_GEOMETRY, FLAT,
        {"budgets": {"first": 0.5, "second": {"kernel": 0.25, "bias": 0}}},
        scale_free=False, needs_params=False),
    "retract": Instance(optim.retract, CURVED_GEOMETRY, CURVED, scale_free=False),
    "retract-edges": Instance(optim.retract, STIEFEL, EDGES, scale_free=False, wrappers=False),
    "tangent": Instance(optim.project_tangent, CURVED_GEOMETRY, CURVED, scale_free=False),
    "neurons": Instance(
        contrib.scale_by_neuron_rms, {"a": STIEFEL.transposed(), "b": MATRIX}, TWO,
        scale_free=False),
    "normalize": Instance(
        optim.normalize, CURVED_GEOMETRY, CURVED,
        {"base": TRACE, "budgets": {"a": 0.5, "b": 2.0, "vectors": 1.0, "gain": 0.0}}),
    "muon": Instance(
        optim.muon, FLAT_GEOMETRY, FLAT,
        RATE | {"weight_decay": 0.1, "budgets": optim.by_path({"**": 0.5})}, still=False),
    "normuon": Instance(
        contrib.normuon, PAIR_GEOMETRY, PAIR, RATE | {"budgets": 0.5}, wrappers=False),
    "riemannian_adam": Instance(
        optim.riemannian_adam, CURVED_GEOMETRY, CURVED, {"learning_rate": 0.01, "b1": 0.8},
        scale_free=False),
    "riemannian_sgd": Instance(
        optim.riemannian_sgd, OTHER_GEOMETRY, OTHERS,
        {"learning_rate": DECAYING, "momentum": 0.9, "nesterov": True},
        scale_free=False, wrappers=False),
    "manifold_muon": Instance(
        optim.manifold_muon, small_geometry, SMALL, {"learning_rate": DECAYING, "momentum": 0.9}),
    "manifold_muon-sets": Instance(optim.manifold_muon, SET_GEOMETRY, SETS, RATE, wrappers=False),
    "master copies": Instance(with_copies, EmbeddingRows(), {"a": (6, 3), "b": (5, 3)}, RATE),
    "start": Instance(from_anywhere, small_geometry, SMALL, RATE, still=False),
    "8 bits": Instance(with_bits(8), small_geometry, SMALL, RATE),
    "4 bits": Instance(with_bits(4), STIEFEL, TWO, RATE),
    "hybrid": Instance(
        with_adam, {"a": STIEFEL, "b": STIEFEL, "table": None, "gain": None},
        TWO | {"table": (5, 2), "gain": (4,)}, RATE | {"rest_rate": 0.01},
        scale_free=False, still=False),
    "hyperball": Instance(on_spheres, BALLS, BALL_SHAPES, RATE, scale_free=False),
    "muonh": Instance(optim.muonh, BALLS, BALL_SHAPES, RATE),
    "adamh": Instance(optim.adamh, BALLS, BALL_SHAPES, RATE, scale_free=False),
    "qk clip": Instance(
        with_clipped_heads, {"q": MATRIX, "o": MATRIX}, {"q": (6, 4), "o": (4, 6)}, RATE,
        still=False),
    "parts": Instance(
        optim.manifold_muon, {"qkv": FUSED, "o": MATRIX.transposed()},
        {"qkv": (4, 7), "o": (4, 4)}, RATE),
}
# Its updates have the dtypes of Optax's, not always those that `check_transformation` asks for.
WITH_OPTAX_MUON = INSTANCES | {
    "optax_muon": Instance(
        lambda learning_rate, geometry: optim.optax_muon(learning_rate), None,
        TWO | {"bias": (4,)}, RATE),
}
