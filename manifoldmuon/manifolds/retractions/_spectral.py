"""Retractions of matrices with bounded singular values."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from manifoldmuon._internal.matrices import arrays
from manifoldmuon._internal.matrices.polar import inverse_sqrt_minus_one, largest_row_sum
from manifoldmuon._internal.matrices.spectral import spectral_bound
from manifoldmuon.linalg import MsignMethod, positive_part
from manifoldmuon.manifolds.retractions._retraction import Retraction

# Each iteration nearly doubles a small singular value.
_ROOT_ITERATIONS = 40


@dataclasses.dataclass(frozen=True)
class Clip(Retraction):
    """The nearest matrix with singular values at most 1, or between two edges.

    With `C = X^T X / high^2` this is `X (I + (C - I)_+)^(-1/2)` at the upper edge, and analogous at
    the lower edge: a sign and a few more products of small matrices, and two tall products. A
    singular value that would have to grow more than a hundredfold falls short. Derivatives are of
    the exact sign and root.

    Attributes:
      method: the method of the sign; None: `DEFAULT_MSIGN`. A method that resolves eigenvalues down
        to a fraction f of the largest leaves points within about f / 4 of the set. Its error also
        moves interior points, more in a wider band: `TRAINING_MSIGN` by a thousandth in a ball and
        by tenths between 1/3 and 3, where only a converging method will do.
    """

    points: ClassVar[tuple[str, ...]] = ("matrices of norm at most 1",)

    method: MsignMethod | None = None

    def __post_init__(self):
        if self.method is not None:
            MsignMethod.check("Clip.method", self.method)

    def retract(self, point: arrays.Matrices, vector: arrays.Matrices) -> arrays.Matrices:
        return self.clip(point + vector)

    def clip(self, matrix: arrays.Matrices, low: float = 0.0, high: float = 1.0) -> arrays.Matrices:
        """Raise singular values below `low` to `low`, and lower those above `high` to `high`.

        Args:
          matrix: tall, float32 or wider; leading axes are independent.
          low: the lower edge; 0: none.
          high: the upper edge, positive.
        """
        matrix = self._shortened(matrix / high, 1.0) * high
        return matrix if low == 0 else self._shortened(matrix / low, -1.0) * low

    def _shortened(self, x: arrays.Matrices, side: float) -> arrays.Matrices:
        gram = arrays.product(x.mT, x)
        identity = arrays.identity_like(gram)
        excess = positive_part(side * (gram - identity), self.method)
        if side < 0:
            # For a singular value near zero rounding may lift the part above 1, and a negative
            # eigenvalue of `target` has no root. The fourth power changes smaller parts less.
            square = arrays.product(excess, excess)
            room = 4 * jnp.finfo(gram.dtype).eps * (1 + largest_row_sum(gram))
            excess = excess - room * arrays.product(square, square)
        target = identity + side * excess
        # As in `_polar_factor`: scale the middle to 1, where the iteration converges fastest.
        middle = (1 + largest_row_sum(target)) / 2 if side > 0 else jnp.ones_like(gram[..., :1, :1])
        root = inverse_sqrt_minus_one(target / middle - identity, _ROOT_ITERATIONS)
        return (x + arrays.product(x, root)) / jnp.sqrt(middle)


_LARGEST_CAPPED = 1.3


def _soft_cap(largest: arrays.Numbers) -> arrays.Numbers:
    """Return the a with `y + a y^3 = 1`, `y = x - a x^3`, for a largest singular value x up to 1.3.

    The left side is falling and concave in a: from above the root Newton's method stays above it,
    where the left side is below 1.
    """
    steepest = 1 / (3 * largest**2)  # monotone up to here
    least = jnp.finfo(largest.dtype).eps
    cubic = jnp.minimum(1.5 * jnp.sqrt(jnp.maximum(largest - 1, least) / 3), steepest)
    for _ in range(5):
        once = largest - cubic * largest**3
        value = once + cubic * once**3 - 1
        slope = once**3 - largest**3 * (1 + 3 * cubic * once**2)
        cubic = cubic - value / slope
    return cubic


@dataclasses.dataclass(frozen=True)
class SoftCap(Retraction):
    """Lower the largest singular values by two cubics, to at most 1 after a step.

    With the step's norm e relative to the edge, singular values x up to 1 + e become `y + a y^3`,
    `y = x - a x^3`, with the a that maps 1 + e to 1 (arXiv:2507.13338, with e from the learning
    rate). No sign and no iteration: three small and two tall products, and some steps of Lanczos'
    method for e. If e is above 0.3, the moved point is divided by `(1 + e) / 1.3` first, which
    lowers all of its singular values. Differentiable in either mode.

    Interior singular values sink as well, by about `e x^5` per step: a weight decay that is strong
    for large singular values and negligible for small. Weights therefore stop short of the edge,
    and of a minimum there, at any learning rate, except under spectral steps where every gradient
    pushes outwards. `Clip` does not move interior singular values.
    """

    points: ClassVar[tuple[str, ...]] = ("matrices of norm at most 1",)

    def retract(self, point: arrays.Matrices, vector: arrays.Matrices) -> arrays.Matrices:
        # A norm has no derivative at zero.
        still = jnp.all(vector == 0, axis=(-2, -1))
        size = spectral_bound(jnp.where(arrays.expand_trailing(still, 2), 1, vector))
        excess = jnp.where(still, 0, jnp.maximum(size, jnp.finfo(vector.dtype).eps))
        # Beyond this the cubics are not monotone: divide the moved point by a factor first.
        largest = jnp.minimum(1 + excess, _LARGEST_CAPPED)
        new_point = (point + vector) / arrays.expand_trailing((1 + excess) / largest, 2)
        cubic = arrays.expand_trailing(_soft_cap(largest), 2)
        gram = arrays.product(new_point.mT, new_point)
        identity = arrays.identity_like(gram)
        once = identity - cubic * gram
        cube = arrays.product(once, arrays.product(once, once))
        return arrays.product(new_point, once + cubic * arrays.product(gram, cube))
