"""Mean subtraction, division by the root mean square, and both."""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon.linalg import upcast
from manifoldmuon.modules._algebra import Bond, Module

Axis = int | tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class MeanSubtract(Bond):
    """The input, less its mean.

    Attributes:
      axis: over which axes; the default is the last.
    """

    axis: Axis = -1
    sensitivity: ClassVar[float] = 1.0
    gamma: ClassVar[float] = 0.0

    def forward(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return x - jnp.mean(x, axis=self.axis, keepdims=True)


@dataclasses.dataclass(frozen=True)
class RMSDivide(Bond):
    """The input, divided by its root mean square; zero stays zero.

    The sensitivity is `1 / ||x||_RMS`, so that the declared 1 holds for inputs of RMS norm at
    least 1; in the same way the sharpness is `2/sqrt(3) / ||x||_RMS**2`.

    Attributes:
      axis: over which axes; the default is the last.
    """

    axis: Axis = -1
    sensitivity: ClassVar[float] = 1.0
    gamma: ClassVar[float] = 2 / math.sqrt(3)

    def forward(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        wide = upcast(x)
        # By the largest magnitude first: no square over- or underflows. The quotient does not
        # depend on it, and neither does the derivative.
        top = jax.lax.stop_gradient(jnp.max(jnp.abs(wide), axis=self.axis, keepdims=True))
        scaled = wide / jnp.where(top == 0, 1, top)
        square = jnp.mean(scaled**2, axis=self.axis, keepdims=True)
        return (scaled / jnp.sqrt(jnp.where(square == 0, 1, square))).astype(x.dtype)


def LayerNorm(axis: Axis = -1) -> Module:
    """`RMSDivide(axis) @ MeanSubtract(axis)`: mean zero and RMS norm 1, without gain or bias.

    Args:
      axis: over which axes; the default is the last.
    """
    return RMSDivide(axis) @ MeanSubtract(axis)
