"""Norms of vectors and of tables of vectors: Euclidean length, largest entry, longest row."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from manifoldmuon._internal.arguments import check_fields
from manifoldmuon._internal.matrices import arrays, powers_of_two
from manifoldmuon._internal.matrices.arrays import Floats, Matrices, Numbers
from manifoldmuon._internal.scales import ScaleRule, check_scale, scale_of
from manifoldmuon.norms._norm import Norm
from manifoldmuon.norms._scales import RootDim


@dataclasses.dataclass(frozen=True)
class Frobenius(Norm):
    """The Euclidean norm of all entries of a weight: `sqrt(sum w_i**2) / scale`.

    It is its own dual norm, up to scale; the duality map is `scale * g / ||g||`. Steepest descent
    under it is normalised gradient descent.

    Attributes:
      ndim: number of trailing axes of a weight: 2 for matrices (the default), 1 for biases and
        gains, 0 for scalars.
      scale: the length of a weight of norm 1, a positive number or a rule such as `RootDim()`.
    """

    ndim: int = 2
    scale: float | ScaleRule = 1.0
    is_euclidean: ClassVar[bool] = True
    has_products: ClassVar[bool] = False

    def __post_init__(self):
        check_fields(self, ndim="[0, inf)")
        check_scale("Frobenius.scale", self.scale)

    def norm(self, weight: Floats) -> Floats:
        return self._length(weight, 1 / self._scale(weight))

    def dual_norm(self, grad: Floats) -> Floats:
        return self._length(grad, self._scale(grad))

    def dualize(self, grad: Floats) -> Floats:
        return (self._scale(grad) * powers_of_two.to_unit_norm(grad, self.ndim)).astype(grad.dtype)

    def project(self, weight: Floats) -> Floats:
        # XLA multiplies by the inverse of a divisor, which is denormal, and flushed, above 8.5e37.
        scaled, exponent = powers_of_two.scale_to_unit_exponent(weight, self.ndim)
        size = arrays.upcast(self.norm(scaled))
        length = powers_of_two.times_power_of_two(size, exponent)
        unit = scaled / arrays.expand_trailing(arrays.nonzero_or_one(size), self.ndim)
        inside = arrays.expand_trailing(length <= 1, self.ndim)
        return jnp.where(inside, weight, unit.astype(weight.dtype))

    def _length(self, x: Floats, factor: float) -> Floats:
        scaled, exponent = powers_of_two.scale_to_unit_exponent(x, self.ndim)
        length = factor * arrays.frobenius_norm(scaled, self.ndim)
        return powers_of_two.times_power_of_two(length, exponent).astype(x.dtype)

    def _scale(self, x: Floats) -> float:
        arrays.trailing(x, self.ndim)
        return scale_of(self.scale, x.shape[x.ndim - self.ndim :])


@dataclasses.dataclass(frozen=True)
class MaxAbs(Norm):
    """The largest magnitude among the entries of a weight: `max |w_i|`.

    The dual norm is `sum |g_i|` and the duality map is the entrywise sign, with `sign(0) = 0`.
    Steepest descent under it is sign descent (Lion and Adam without accumulation).

    Attributes:
      ndim: number of trailing axes of a weight, as in `Frobenius`.
    """

    ndim: int = 2
    has_products: ClassVar[bool] = False

    def __post_init__(self):
        check_fields(self, ndim="[0, inf)")

    def norm(self, weight: Floats) -> Floats:
        return arrays.largest(jnp.abs(weight), arrays.trailing(weight, self.ndim))

    def dual_norm(self, grad: Floats) -> Floats:
        scaled, exponent = powers_of_two.scale_to_unit_exponent(grad, self.ndim)
        total = jnp.sum(jnp.abs(scaled), axis=arrays.trailing(grad, self.ndim))
        return powers_of_two.times_power_of_two(total, exponent).astype(grad.dtype)

    def dualize(self, grad: Floats) -> Floats:
        arrays.trailing(grad, self.ndim)
        # Scale each entry (ndim=0), so that 1e-30 keeps its sign next to 1e30.
        scaled, _ = powers_of_two.scale_to_unit_exponent(grad, 0)
        return jnp.sign(scaled).astype(grad.dtype)

    def project(self, weight: Floats) -> Floats:
        return jnp.clip(weight, -1, 1)


@dataclasses.dataclass(frozen=True)
class MaxRowNorm(Norm):
    """The largest Euclidean norm among the rows of a matrix: `max_i ||w_i|| / scale`.

    The operator norm from l1 to l2 of the transpose, for embedding tables `(vocabulary, d)` with a
    vector per row; see `L1ToRMS`. The dual norm is `scale * sum_i ||g_i||` and the duality map
    normalises every row.

    Normalising would move *every* row a full step: a token not seen for hundreds of steps, with a
    momentum decayed to 1e-30, would follow its last gradient for ever. A row shorter than
    `threshold` times the longest row of its table therefore gets zero.

    A token that is seen once continues to move for about `log(1 / threshold) / log(1 / momentum)`
    full steps: 270 at momentum 0.95 with the default, 90 with 1e-2. A larger threshold also stops
    rows with a gradient in this batch that is smaller than the largest by this factor.

    Attributes:
      scale: the length of the longest row of a weight of norm 1, a number or a rule for the shape
        of a row.
      threshold: the relative length below which a row counts as stale; 0 disables it. With the
        default a token that occurs once in a batch still moves if another occurs a million times.
        The law `<g, dualize(g)> == dual_norm(g)` holds to `rows * threshold` at worst.
    """

    scale: float | ScaleRule = 1.0
    threshold: float = 1e-6
    ndim: ClassVar[int] = 2
    has_products: ClassVar[bool] = False

    def __post_init__(self):
        check_scale("MaxRowNorm.scale", self.scale)
        check_fields(self, threshold="[0, 1)")

    def norm(self, weight: Matrices) -> Numbers:
        lengths, exponent = _row_lengths(weight)
        longest = arrays.largest(lengths, -1) / self._scale(weight)
        return powers_of_two.times_power_of_two(longest, exponent).astype(weight.dtype)

    def dual_norm(self, grad: Matrices) -> Numbers:
        lengths, exponent = _row_lengths(grad)
        total = self._scale(grad) * jnp.sum(lengths, axis=-1)
        return powers_of_two.times_power_of_two(total, exponent).astype(grad.dtype)

    def dualize(self, grad: Matrices) -> Matrices:
        lengths, _ = _row_lengths(grad)
        unit = self._scale(grad) * powers_of_two.to_unit_norm(grad, 1)
        return jnp.where(self.stale(lengths)[..., None], 0, unit).astype(grad.dtype)

    def project(self, weight: Matrices) -> Matrices:
        return Frobenius(1, self.scale).project(weight)

    def stale(self, lengths: Float[Array, "*batch v"]) -> Bool[Array, "*batch v"]:
        """Return which rows are shorter than `threshold` times the longest row of their table."""
        # NaN rows must not count as stale, or the NaN would be dropped.
        return lengths < self.threshold * jnp.max(lengths, axis=-1, keepdims=True, initial=0)

    def _scale(self, x: Matrices) -> float:
        arrays.trailing(x, 2)
        return scale_of(self.scale, x.shape[-1:])


@dataclasses.dataclass(frozen=True)
class L1ToRMS(MaxRowNorm):
    """The largest root-mean-square norm among the vectors of an embedding table.

    The operator norm from l1 (tokens as one-hot vectors) to RMS (modular duality,
    arXiv:2410.21265). It is `MaxRowNorm` with the scale `RootDim()`.

    Attributes:
      threshold: the relative length below which a row counts as stale, as in `MaxRowNorm`.
    """

    scale: float | ScaleRule = dataclasses.field(default=RootDim(), init=False)


def _row_lengths(table: Matrices):
    """Return the length of each row of the scaled table, and the table's exponent."""
    scaled, exponent = powers_of_two.scale_to_unit_exponent(table, 2)
    return arrays.frobenius_norm(scaled, 1), exponent
