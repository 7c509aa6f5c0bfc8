"""The norm of embedding tables: the largest RMS norm among the embedding vectors."""

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from manifoldmuon.linalg import prescale, times_power_of_two
from manifoldmuon.norms._axes import trailing
from manifoldmuon.norms._frobenius import exact_gap, normalize
from manifoldmuon.norms._norm import Norm


@dataclasses.dataclass(frozen=True)
class L1ToRMS(Norm):
    """The largest root-mean-square norm among the vectors of an embedding table.

    It is the operator norm from l1 (tokens as one-hot vectors) to RMS (modular duality,
    arXiv:2410.21265). The table is `(vocabulary, d)`: one vector per row. The dual norm is
    `sum_j sqrt(d) * ||g_j||_2` and the duality map divides every vector by its own RMS norm.

    Division by its own norm moves *every* vector a full step, so that a token not seen for
    hundreds of steps, whose momentum has decayed to 1e-30, would be dragged along its last
    gradient for ever. A vector shorter than `threshold` times the longest one of its table
    therefore gets zero.

    Attributes:
      threshold: the relative length below which a vector counts as stale. The default 1e-6 lets
        a token that occurs once in a batch move beside one that occurs a million times, and
        stops a token after 270 steps of momentum 0.95 (130 of 0.9). The law
        `<g, lmo(g)> == dual_norm(g)` holds to `vocabulary * threshold` at worst. 0 disables it.
    """

    threshold: float = 1e-6

    @property
    def ndim(self) -> int:
        return 2

    def norm(self, weight: Float[Array, "*batch v d"]) -> Float[Array, "*batch"]:
        lengths, exponent = _rms(weight)
        largest = jnp.max(lengths, axis=-1, initial=0)
        return times_power_of_two(largest, exponent).astype(weight.dtype)

    def dual_norm(self, grad: Float[Array, "*batch v d"]) -> Float[Array, "*batch"]:
        lengths, exponent = _rms(grad)
        total = grad.shape[-1] * jnp.sum(lengths, axis=-1)
        return times_power_of_two(total, exponent).astype(grad.dtype)

    def lmo(self, grad: Float[Array, "*batch v d"]) -> Float[Array, "*batch v d"]:
        lengths, _ = _rms(grad)
        unit = normalize(grad, 1) * math.sqrt(grad.shape[-1])
        keep = fresh(lengths, self.threshold)
        return jnp.where(keep[..., None], unit, 0).astype(grad.dtype)

    def gap(
        self, grad: Float[Array, "*batch v d"], direction: Float[Array, "*batch v d"]
    ) -> Float[Array, "*batch"]:
        return exact_gap(self, grad, direction)


def fresh(lengths: Float[Array, "*batch v"], threshold: float) -> Bool[Array, "*batch v"]:
    """Which vectors are at least `threshold` times as long as the longest of their table."""
    longest = jnp.max(lengths, axis=-1, keepdims=True, initial=0)
    # Not `>=`: a NaN must count as fresh, or it would vanish.
    return ~(lengths < threshold * longest)


def _rms(table: Float[Array, "*batch v d"]):
    """The RMS norm of each row of the prescaled table, with the table's exponent."""
    scaled, exponent = prescale(table, 2)
    trailing(table, 2)
    mean = jnp.sum(scaled**2, axis=-1) / max(table.shape[-1], 1)
    return jnp.sqrt(mean), exponent
