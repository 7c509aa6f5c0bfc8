"""What the manifolds of matrices share: the tall view, the tangent space, the distance."""

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from manifoldmuon.linalg import product, spectral_norm, upcast
from manifoldmuon.manifolds._manifold import Steepest
from manifoldmuon.manifolds.retractions import Retraction
from manifoldmuon.manifolds.retractions._qr import positive_qr
from manifoldmuon.manifolds.solvers import StiefelSolver
from manifoldmuon.norms import Effort, Spectral
from manifoldmuon.norms._matrix import polar_factor, tall_view


def unit_tall(point: Float[Array, "*batch m n"], scale: float) -> Float[Array, "*batch p q"]:
    """The point or its transpose, tall, divided by the scale, in float32 or wider."""
    return tall_view(upcast(point) / scale)


def like(
    result: Float[Array, "*batch p q"], example: Float[Array, "*batch m n"], scale: float
) -> Float[Array, "*batch m n"]:
    """Undoes `unit_tall`: scale, orientation and dtype of `example`."""
    wide = example.shape[-2] < example.shape[-1]
    return (scale * (result.mT if wide else result)).astype(example.dtype)


def tangent_part(
    point: Float[Array, "*batch m n"], vector: Float[Array, "*batch m n"]
) -> Float[Array, "*batch m n"]:
    """`V - W sym(W^T V)`: the orthogonal projection onto the tangent space at `W^T W = I`."""
    inner = product(point.mT, vector)
    return vector - product(point, (inner + inner.mT) / 2)


def project(point: Float[Array, "*batch m n"], scale: float) -> Float[Array, "*batch m n"]:
    """The nearest matrix whose singular values all equal `scale`."""
    return (scale * polar_factor(point, None)).astype(point.dtype)


def retract(
    retraction: Retraction,
    point: Float[Array, "*batch m n"],
    vector: Float[Array, "*batch m n"],
    scale: float,
) -> Float[Array, "*batch m n"]:
    """The retraction of any matrix manifold, at any scale and orientation."""
    moved = retraction.retract(unit_tall(point, scale), unit_tall(vector, scale))
    return like(moved, point, scale)


def steepest(
    solver: StiefelSolver,
    point: Float[Array, "*batch m n"],
    grad: Float[Array, "*batch m n"],
    dual: chex.ArrayTree,
    scale: float,
) -> Steepest:
    """The solver's answer, at any scale and orientation."""
    # Accelerators round float32 factors to fewer bits unless told otherwise.
    with jax.default_matmul_precision("highest"):
        answer = solver.solve(unit_tall(point, scale), tall_view(upcast(grad)), dual)
    return answer._replace(direction=like(answer.direction, grad, scale))


def random_matrix(
    key: PRNGKeyArray, shape: tuple[int, ...], dtype, scale: float
) -> Float[Array, "..."]:
    """Uniformly distributed (Haar) over the matrices whose singular values equal `scale`."""
    *batch, m, n = shape
    wide = jnp.promote_types(dtype, jnp.float32)
    gaussian = jax.random.normal(key, (*batch, max(m, n), min(m, n)), wide)
    return like(positive_qr(gaussian), jnp.zeros(shape, dtype), scale)


def distance(point: Float[Array, "*batch m n"], scale: float) -> Float[Array, "*batch"]:
    """The largest `|sigma_i / scale - 1|`, accurate to a few units of rounding.

    From the eigenvalues `l` of the small matrix `W^T W / s^2 - I`, since `l = sigma^2 - 1` means
    `sigma - 1 = l / (1 + sqrt(1 + l))`. An eigenvalue routine is at home here: this is a
    monitor, no part of a training step.
    """
    unit = unit_tall(point, scale)
    if 0 in unit.shape:
        return jnp.zeros(unit.shape[:-2], unit.dtype)
    excess = product(unit.mT, unit) - jnp.eye(unit.shape[-1], dtype=unit.dtype)
    values = jnp.linalg.eigvalsh(excess, symmetrize_input=False)
    return jnp.max(jnp.abs(values / (1 + jnp.sqrt(jnp.maximum(1 + values, 0)))), axis=-1)


def spectral_size(vector: Float[Array, "*batch m n"], scale: float) -> Float[Array, "*batch"]:
    """`||V||_2 / scale`, in the dtype of `V`."""
    return (spectral_norm(vector) / scale).astype(vector.dtype)


def carried_size(
    vector: Float[Array, "*batch m n"], scale: float, carried: chex.ArrayTree, effort: Effort
) -> tuple[Float[Array, "*batch"], chex.ArrayTree]:
    """`spectral_size` by power iteration from a carried vector."""
    size, carried = Spectral().carried_norm(vector, carried, effort)
    return (size / scale).astype(vector.dtype), carried
