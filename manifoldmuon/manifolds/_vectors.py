"""The tangent space of a sphere of vectors, shared by `Hypersphere` and `EmbeddingRows`."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon.linalg import prescale
from manifoldmuon.norms._frobenius import normalize


def lengths_of(vectors: Float[Array, "*batch d"]) -> Float[Array, "*batch"]:
    """The Euclidean norm along the last axis, of vectors whose squares neither over- nor
    underflow."""
    return jnp.sqrt(jnp.sum(vectors**2, axis=-1))


def without_radial(
    unit: Float[Array, "*batch d"], vectors: Float[Array, "*batch d"]
) -> Float[Array, "*batch d"]:
    """`v - w <w, v>` for unit (or zero) `w`: the orthogonal projection onto the tangent space."""
    return vectors - unit * jnp.sum(unit * vectors, axis=-1, keepdims=True)


def unit_tangent(
    point: Float[Array, "*batch d"], grad: Float[Array, "*batch d"]
) -> tuple[Float[Array, "*batch d"], Float[Array, "*batch"]]:
    """The direction of the tangent part of each gradient, and how far from tangent it is.

    A gradient that points straight along its vector has a tangent part made of rounding errors
    alone; dividing it by its own length would turn noise into a full step. Below a few units of
    rounding, relative to the gradient, the direction is therefore zero.

    Args:
      point: vectors at any scale, float32 or wider.
      grad: gradients at any scale, float32 or wider.

    Returns:
      `(direction, residual)`: unit or zero vectors, and `|<w, direction>|`.
    """
    unit = normalize(point, 1)
    scaled, _ = prescale(grad, 1)
    tangent = without_radial(unit, scaled)
    noise = 8 * jnp.finfo(scaled.dtype).eps * lengths_of(scaled)
    heard = ~(lengths_of(tangent) <= noise)  # so that a NaN stays
    direction = normalize(tangent, 1)
    # Once more: where the tangent part is small, the first pass left relatively much behind.
    direction = normalize(without_radial(unit, direction), 1)
    direction = jnp.where(heard[..., None], direction, 0)
    return direction, jnp.abs(jnp.sum(unit * direction, axis=-1))
