"""What every manifold does with its arguments: shapes, dtypes, and steps of length zero."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon.manifolds._manifold import Manifold


def leading(point: Float[Array, "..."], ndim: int) -> tuple[int, ...]:
    """The shape of the leading axes: one number per point."""
    return point.shape[: point.ndim - ndim]


def require_axes(manifold: Manifold, shape: tuple[int, ...]) -> None:
    """Raises `ValueError` where `shape` has too few axes for one point of `manifold`."""
    if len(shape) < manifold.ndim:
        raise ValueError(
            f"{type(manifold).__name__} takes the trailing {manifold.ndim} axes of an array as one "
            f"point, but the shape {tuple(shape)} has {len(shape)}; use a manifold for fewer axes, "
            f"such as Euclidean(Frobenius(ndim={len(shape)}))"
        )


def stay_if_still(
    point: Float[Array, "..."],
    vector: Float[Array, "..."],
    moved: Float[Array, "..."],
    ndim: int,
) -> Float[Array, "..."]:
    """`moved`, except that a point whose step is zero is returned untouched.

    Rounding would move it by some 1e-8, and a point that cannot be normalised (all zeros) would
    become NaN: a zero update must leave both alone. A NaN in the step is no zero.
    """
    axes = tuple(range(-ndim, 0))
    still = jnp.all(vector == 0, axis=axes, keepdims=True)
    return jnp.where(still, point, moved.astype(point.dtype))
