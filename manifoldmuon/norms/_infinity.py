"""The largest entry, whose duality map is the sign."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon.linalg import prescale, times_power_of_two, upcast
from manifoldmuon.norms._axes import trailing
from manifoldmuon.norms._frobenius import exact_gap
from manifoldmuon.norms._norm import Norm


@dataclasses.dataclass(frozen=True)
class Infinity(Norm):
    """The largest magnitude among the entries of one weight: `max |w_i|`.

    The dual norm is `sum |g_i|` and the duality map is the entrywise sign, with `sign(0) = 0`.
    Steepest descent under it is sign descent (Lion and Adam without accumulation).

    Attributes:
      ndim: how many trailing axes make one weight: 2 for matrices (the default), 1 for biases
        and gains, 0 for scalars.
    """

    ndim: int = 2

    def norm(self, weight: Float[Array, "..."]) -> Float[Array, "..."]:
        return jnp.max(jnp.abs(weight), axis=trailing(weight, self.ndim), initial=0)

    def dual_norm(self, grad: Float[Array, "..."]) -> Float[Array, "..."]:
        scaled, exponent = prescale(grad, self.ndim)
        total = jnp.sum(jnp.abs(scaled), axis=trailing(grad, self.ndim))
        return times_power_of_two(total, exponent).astype(grad.dtype)

    def lmo(self, grad: Float[Array, "..."]) -> Float[Array, "..."]:
        trailing(grad, self.ndim)
        # Entry by entry (ndim=0): beside an entry of 1e30, one of 1e-30 keeps its sign.
        scaled, _ = prescale(grad, 0)
        return jnp.sign(scaled).astype(grad.dtype)

    def gap(self, grad: Float[Array, "..."], direction: Float[Array, "..."]) -> Float[Array, "..."]:
        return exact_gap(self, upcast(grad), direction)
