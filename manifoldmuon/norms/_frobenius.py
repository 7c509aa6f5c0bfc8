"""The Euclidean norm, which is its own dual."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon.linalg import prescale, times_power_of_two
from manifoldmuon.norms._axes import trailing
from manifoldmuon.norms._norm import Norm


@dataclasses.dataclass(frozen=True)
class Frobenius(Norm):
    """The Euclidean norm of all the entries of one weight: `sqrt(sum w_i**2)`.

    Its own dual; the duality map is `g / ||g||`. Steepest descent under it is normalised
    gradient descent.

    Attributes:
      ndim: how many trailing axes make one weight: 2 for matrices (the default), 1 for biases
        and gains, 0 for scalars.
    """

    ndim: int = 2

    def norm(self, weight: Float[Array, "..."]) -> Float[Array, "..."]:
        scaled, exponent = prescale(weight, self.ndim)
        length = jnp.sqrt(jnp.sum(scaled**2, axis=trailing(scaled, self.ndim)))
        return times_power_of_two(length, exponent).astype(weight.dtype)

    def dual_norm(self, grad: Float[Array, "..."]) -> Float[Array, "..."]:
        return self.norm(grad)

    def lmo(self, grad: Float[Array, "..."]) -> Float[Array, "..."]:
        return normalize(grad, self.ndim).astype(grad.dtype)

    def gap(self, grad: Float[Array, "..."], direction: Float[Array, "..."]) -> Float[Array, "..."]:
        return exact_gap(self, grad, direction)


def normalize(x: Float[Array, "..."], ndim: int) -> Float[Array, "..."]:
    """`x / ||x||` over the trailing `ndim` axes, in float32 or wider; zero stays zero."""
    scaled, _ = prescale(x, ndim)
    axes = trailing(x, ndim)
    length = jnp.sqrt(jnp.sum(scaled**2, axis=axes, keepdims=True))
    # A prescaled weight has length 0 or at least 1. Not `> 0`: that would hide a NaN.
    return scaled / jnp.where(length == 0, 1.0, length)


def exact_gap(
    norm: Norm, grad: Float[Array, "..."], direction: Float[Array, "..."]
) -> Float[Array, "..."]:
    """`1 - <grad, direction> / dual_norm(grad)`, for norms whose dual norm is cheap."""
    scaled, _ = prescale(grad, norm.ndim)
    inner = jnp.sum(scaled * direction, axis=trailing(grad, norm.ndim))
    optimum = norm.dual_norm(scaled)
    return jnp.where(optimum == 0, 0.0, jnp.maximum(1 - inner / optimum, 0))
