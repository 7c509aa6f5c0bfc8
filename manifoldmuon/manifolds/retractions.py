"""Retractions: how a step along a tangent vector ends on the set again.

Those of matrices with orthonormal columns (`Retraction`): `Polar`, `QR`, `Analytic`, `Cayley`,
`Exponential`. Those of bounded singular values (`SpectralRetraction`): `Clip`, `SoftCap`. Those of
spheres (`SphereRetraction`): `Normalize`, `Geodesic`. Those of non-negative matrices of fixed sums
(`StochasticRetraction`): `Nearest`, `Sinkhorn`.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon.linalg import (
    MsignMethod,
    check_method,
    frobenius_norm,
    identity_like,
    mT,
    nearest_with_sums,
    normalize,
    one_by_one,
    over,
    polar_derivative,
    positive_part,
    product,
    sinkhorn,
    skew,
    solve_lyapunov,
    spectral_bound,
    spectral_norm,
    sym,
)

__all__ = [
    "QR",
    "Analytic",
    "Cayley",
    "Clip",
    "Exponential",
    "Geodesic",
    "Nearest",
    "Normalize",
    "Polar",
    "Retraction",
    "Sinkhorn",
    "SoftCap",
    "SpectralRetraction",
    "SphereRetraction",
    "StochasticRetraction",
    "positive_qr",
]


class Retraction(abc.ABC):
    """Moves an orthonormal matrix along a tangent vector, and back onto the set.

    A frozen, hashable value without arrays. Points are tall or square with `W^T W = I` and
    vectors tangent, `sym(W^T V) = 0`; the manifolds transpose wide matrices, divide by their
    scale, and make the dtype float32 or wider. Leading axes are independent.

    Laws: `R(W, 0) = W`; `R(W, t V) = W + t V + O(t**2)`.

    Attributes:
      order: `R(W, t V)` differs by O(t**(order + 1)) from the geodesic of the embedded metric,
        the path that a point free of forces would take on the set.
    """

    order: ClassVar[float]

    @abc.abstractmethod
    def retract(
        self, point: Float[Array, "*batch m n"], vector: Float[Array, "*batch m n"]
    ) -> Float[Array, "*batch m n"]:
        """An orthonormal matrix near `point + vector`, for a tangent `vector`."""


@dataclasses.dataclass(frozen=True)
class Polar(Retraction):
    """`(W + V) ((W + V)^T (W + V))^{-1/2}`, the orthonormal matrix nearest to `W + V`.

    Second order (Absil, Mahony and Sepulchre 2008, section 4.1). For a tangent `V` the Gram
    matrix is `I + V^T V`, at least the identity and close to it for a small step, so that a few
    `n x n` products find its inverse root: no iteration for a learning rate of 0.05, at most one
    up to 0.3, two for 1, up to ten for 100. The Gram matrix is formed anew from `W + V`, so
    whatever distance from the set rounding has left in `W` is undone rather than handed on.

    The iteration stops by itself; the derivative, in either mode, is that of the exact factor.

    Attributes:
      max_iterations: where the iteration gives up, as it does at a rank-deficient `W + V`.
    """

    max_iterations: int = 20

    order: ClassVar[float] = 2

    def retract(
        self, point: Float[Array, "*batch m n"], vector: Float[Array, "*batch m n"]
    ) -> Float[Array, "*batch m n"]:
        return _polar_factor(point + vector, self.max_iterations)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _polar_factor(
    moved: Float[Array, "*batch m n"], max_iterations: int
) -> Float[Array, "*batch m n"]:
    gram = product(mT(moved), moved)
    # 1 <= eigenvalues <= largest row sum: the middle goes to 1, where the iteration
    # converges fastest; it converges from (0, 7/3), and this leaves nothing above 2.
    middle = (1 + _row_sum(gram)) / 2
    excess = gram / middle - identity_like(gram)
    root = _inverse_sqrt_minus_one(excess, max_iterations)
    return (moved + _in_three_passes(moved, root)) / jnp.sqrt(middle)


@_polar_factor.defjvp
def _polar_factor_jvp(max_iterations, primals, tangents):
    (moved,), (tangent,) = primals, tangents
    factor = _polar_factor(moved, max_iterations)
    return factor, polar_derivative(moved, factor, tangent)


# On accelerators the Gram matrix of `W + V` takes float32: what rounding does to it is a distance
# from the set. The rest multiplies what is small, so its errors are: three passes of bfloat16 for
# what grows with the step, one for what is below 0.025 always.
_in_three_passes = functools.partial(product, precision=jax.lax.Precision.HIGH)
_in_one_pass = functools.partial(product, precision=jax.lax.Precision.DEFAULT)


def _row_sum(x: Float[Array, "*batch n n"]) -> Float[Array, "*batch 1 1"]:
    """The largest absolute row sum: an upper bound on the spectral norm."""
    return jnp.max(jnp.sum(jnp.abs(x), axis=-1), axis=-1, initial=0)[..., None, None]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _inverse_sqrt_minus_one(
    excess: Float[Array, "*batch n n"], max_iterations: int
) -> Float[Array, "*batch n n"]:
    """`(I + E)^{-1/2} - I` for a symmetric `E`, with an error relative to its own size.

    The quintic Newton-Schulz step multiplies `S = I + E` on both sides by the Taylor polynomial
    `p = I - E/2 + 3/8 E^2` of its inverse root and collects the product of the `p`. Carrying
    `E`, `p - I` and `D = root - I` in place of `S`, `p` and the root keeps the identity out of
    the rounding errors: near it the result is three times as accurate.
    """
    # The series leave 5/16 E^3 and 63/256 E^5: 8e-9 and 3e-9, or 2e-17 in float64.
    near, close = (3e-3, 0.025) if excess.dtype == jnp.float32 else (4e-6, 6e-4)
    square = _in_one_pass(excess, excess)
    # A bound of the norm of E: tighter than the row sums of E itself by half or more.
    size = jnp.sqrt(_row_sum(square))

    def quadratic(excess, square):
        return 0.375 * square - 0.5 * excess

    def quartic(excess, square):
        rest = _in_one_pass(square, 35 / 128 * square - 5 / 16 * excess)
        return quadratic(excess, square) + rest

    def unfinished(carry):
        count, excess, _ = carry
        # A NaN compares false and ends the loop for its own matrix, not for the others.
        return (count < max_iterations) & jnp.any(_row_sum(excess) > close)

    def step(carry):
        count, excess, root = carry
        p = 0.375 * _in_three_passes(excess, excess) - 0.5 * excess
        root = root + p + _in_three_passes(root, p)
        square = 2 * p + _in_three_passes(p, p)
        excess = excess + square + _in_three_passes(excess, square)
        return count + 1, sym(excess), root

    def iterated(excess, _):
        start = (jnp.zeros((), jnp.int32), excess, jnp.zeros_like(excess))
        _, excess, root = jax.lax.while_loop(unfinished, step, start)
        last = quartic(excess, _in_one_pass(excess, excess))
        return root + last + _in_one_pass(root, last)

    # Steps of training end in the first two: one product or two.
    terms = (~jnp.all(size <= near)).astype(jnp.int32) + ~jnp.all(size <= close)
    return jax.lax.switch(terms, [quadratic, quartic, iterated], excess, square)


@_inverse_sqrt_minus_one.defjvp
def _inverse_sqrt_minus_one_jvp(max_iterations, primals, tangents):
    """`H R' + R' H = -R E' R` with `H = R^-1`: the derivative of `R S R = I`."""
    (excess,), (tangent,) = primals, tangents
    found = _inverse_sqrt_minus_one(excess, max_iterations)
    identity = identity_like(excess)
    inverse_root = identity + found
    root = sym(product(identity + excess, inverse_root))
    turned = product(inverse_root, product(sym(tangent), inverse_root))
    return found, solve_lyapunov(root, -turned)


@dataclasses.dataclass(frozen=True)
class QR(Retraction):
    """The orthonormal factor of `W + V = Q R`, with a positive diagonal in `R`.

    First order: unlike the polar factor it depends on the order of the columns, and it turns
    the first one least (Absil, Mahony and Sepulchre 2008, example 4.1.3). Undoes the distance
    that `W` has from the set.
    """

    order: ClassVar[float] = 1

    def retract(
        self, point: Float[Array, "*batch m n"], vector: Float[Array, "*batch m n"]
    ) -> Float[Array, "*batch m n"]:
        return positive_qr(point + vector)


def positive_qr(matrix: Float[Array, "*batch m n"]) -> Float[Array, "*batch m n"]:
    """The Q of the QR decomposition whose R has a positive diagonal: a unique, smooth choice."""
    q, r = one_by_one(jnp.linalg.qr, matrix)
    diagonal = jnp.diagonal(r, axis1=-2, axis2=-1)
    return q * jnp.where(diagonal < 0, -1, 1).astype(q.dtype)[..., None, :]


@dataclasses.dataclass(frozen=True)
class Analytic(Retraction):
    """`(W + V)(I - A^T A + A^T A / sqrt(1 + eta^2))` with `V = eta A` and `eta = ||V||_2`.

    Two products and the spectral norm of an `n x n` matrix (Modula documentation, orthogonal and
    Stiefel pages). It equals the polar retraction where `A` is a partial isometry, its singular
    values all 0 or 1, as a steepest direction on a square manifold is; otherwise the result misses
    the set by O(eta^4), and every distance that `W` already has is handed on. For long runs and
    for directions with other singular values use `Polar`.
    """

    order: ClassVar[float] = 2

    def retract(
        self, point: Float[Array, "*batch m n"], vector: Float[Array, "*batch m n"]
    ) -> Float[Array, "*batch m n"]:
        gram = product(mT(vector), vector)  # eta^2 A^T A
        root = over(jnp.sqrt(1 + spectral_norm(gram)), 2)
        moved = point + vector
        # (1 - 1/r) / eta^2 = 1 / (r (r + 1)) with r^2 = 1 + eta^2: finite at eta = 0.
        return moved - product(moved, gram) / (root * (root + 1))


@dataclasses.dataclass(frozen=True)
class Cayley(Retraction):
    """`(I - K/2)^{-1} (I + K/2) W` for the skew `K` with `K W = V`.

    `K = P V W^T - W V^T P` with `P = I - W W^T / 2` has rank at most 2n, so one linear system
    of size 2n suffices (Wen and Yin 2013). A rotation of the whole space: it keeps the distance
    that `W` has from the set. First order for the embedded metric on a non-square manifold,
    second order for the canonical one.
    """

    order: ClassVar[float] = 1

    def retract(
        self, point: Float[Array, "*batch m n"], vector: Float[Array, "*batch m n"]
    ) -> Float[Array, "*batch m n"]:
        inner = product(mT(point), vector)
        half = vector - product(point, inner) / 2  # P V
        left = jnp.concatenate([half, point], axis=-1)  # K = left right^T
        right = jnp.concatenate([point, -half], axis=-1)
        small = product(mT(right), left) / 2
        system = identity_like(small) - small
        return point + product(left, jnp.linalg.solve(system, product(mT(right), point)))


@dataclasses.dataclass(frozen=True)
class Exponential(Retraction):
    """The geodesic of the embedded (Euclidean) metric, followed for time 1.

    `[W V] exp([[K, -S], [I, K]]) [I; 0] exp(-K)` with `K = W^T V` and `S = V^T V`: one matrix
    exponential of size 2n and one of size n (Edelman, Arias and Smith 1998, section 2.2.2).
    Not the geodesic of the canonical metric, which differs from it unless `K = 0` or `W` is
    square. The dearest of the retractions, and the one to compare the others with; it keeps
    the distance that `W` has from the set.
    """

    order: ClassVar[float] = math.inf

    def retract(
        self, point: Float[Array, "*batch m n"], vector: Float[Array, "*batch m n"]
    ) -> Float[Array, "*batch m n"]:
        n = point.shape[-1]
        inner = product(mT(point), vector)
        inner = skew(inner)
        gram = product(mT(vector), vector)
        one = jnp.broadcast_to(identity_like(gram), gram.shape)
        block = jnp.block([[inner, -gram], [one, inner]])
        # Square W: W^T V is skew and S = -K^2; the formula stays valid, nothing is special.
        columns = jax.scipy.linalg.expm(block)[..., :, :n]
        basis = jnp.concatenate([point, vector], axis=-1)
        return product(product(basis, columns), jax.scipy.linalg.expm(-inner))


class SpectralRetraction(abc.ABC):
    """Moves a matrix, and brings its singular values between two edges.

    A frozen, hashable value. Matrices are tall, float32 or wider; leading axes are independent.

    Attributes:
      raises: whether singular values can be brought up to a lower edge as well.
    """

    raises: ClassVar[bool]

    @abc.abstractmethod
    def retract(
        self,
        point: Float[Array, "*batch m n"],
        vector: Float[Array, "*batch m n"],
        low: float,
        high: float,
    ) -> Float[Array, "*batch m n"]:
        """A matrix near `point + vector`, with singular values between `low` and `high`.

        Args:
          point: within the edges.
          vector: the step.
          low: 0 for no lower edge.
          high: positive.
        """


@dataclasses.dataclass(frozen=True)
class Clip(SpectralRetraction):
    """Brings the singular values of a matrix between two edges: the nearest such matrix.

    With `C = X^T X / high^2` it is `X (I + (C - I)_+)^(-1/2)` at the upper edge, and likewise at
    the lower one: a sign and a few more products of small matrices, two tall ones. A singular value
    that would have to grow more than a hundredfold stays short. Derivatives are those of the exact
    sign and root.

    Attributes:
      method: of the sign; None: `DEFAULT_MSIGN`. One that resolves eigenvalues down to a fraction f
        of the largest leaves points within about f / 4 of the set. Its error also moves what lies
        inside, the more the wider the band: `TRAINING_MSIGN` by a thousandth in a ball and by
        tenths between 1/3 and 3, where only one that converges will do.
      max_iterations: of the inverse root, as in `Polar`; each one doubles a small singular value.
    """

    raises: ClassVar[bool] = True

    method: MsignMethod | None = None
    max_iterations: int = 40

    def __post_init__(self):
        if self.method is not None:
            check_method("Clip.method", self.method)

    def retract(
        self,
        point: Float[Array, "*batch m n"],
        vector: Float[Array, "*batch m n"],
        low: float,
        high: float,
    ) -> Float[Array, "*batch m n"]:
        """The nearest matrix to `point + vector`."""
        return self.clip(point + vector, low, high)

    def clip(
        self, matrix: Float[Array, "*batch m n"], low: float, high: float
    ) -> Float[Array, "*batch m n"]:
        """Singular values below `low` become `low`, those above `high` become `high`.

        Args:
          matrix: tall, float32 or wider; leading axes are independent.
          low: 0 for no lower edge.
          high: positive.
        """
        matrix = self._shortened(matrix / high, 1.0) * high
        return matrix if low == 0 else self._shortened(matrix / low, -1.0) * low

    def _shortened(self, x: Float[Array, "*batch m n"], side: float) -> Float[Array, "*batch m n"]:
        gram = product(mT(x), x)
        identity = identity_like(gram)
        part = positive_part(side * (gram - identity), self.method)
        if side < 0:
            # Rounding may bring the part of a singular value near zero above 1, and an eigenvalue
            # below zero has no root. The fourth power spares those that have less far to go.
            square = product(part, part)
            room = 4 * jnp.finfo(gram.dtype).eps * (1 + _row_sum(gram))
            part = part - room * product(square, square)
        target = identity + side * part
        # See `_polar_factor`: the middle goes to 1, where the iteration converges fastest.
        middle = (1 + _row_sum(target)) / 2 if side > 0 else jnp.ones_like(gram[..., :1, :1])
        root = _inverse_sqrt_minus_one(target / middle - identity, self.max_iterations)
        return (x + product(x, root)) / jnp.sqrt(middle)


_LARGEST_CAPPED = 1.3


def _soft_cap(largest: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    """The a with `y + a y^3 = 1`, `y = x - a x^3`, for the largest singular value x up to 1.3.

    Falling and concave in a: from above the root Newton's method stays above it, where the result
    is below 1.
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
class SoftCap(SpectralRetraction):
    """Lowers the largest singular values by two cubics, so that a step cannot lift them too high.

    With the step's norm e relative to the edge, singular values x up to 1 + e become
    `y + a y^3`, `y = x - a x^3`, where a brings 1 + e to 1 (arXiv:2507.13338, there with e from the
    learning rate). No sign and no iteration: three small products and
    two tall ones, and some steps of Lanczos' method for e. Reverse-mode derivatives pass.

    What lies inside sinks as well, by about `e x^5` in each step: a weight decay that large
    singular values feel and small ones do not, so that weights stop short of the edge unless every
    gradient pushes outwards. `Clip` leaves them alone.
    """

    raises: ClassVar[bool] = False

    def retract(
        self,
        point: Float[Array, "*batch m n"],
        vector: Float[Array, "*batch m n"],
        low: float,
        high: float,
    ) -> Float[Array, "*batch m n"]:
        """A matrix near `point + vector` of singular values up to `high`.

        Raises:
          ValueError: `low` is not 0.
        """
        if low != 0:
            raise ValueError(f"SoftCap knows no lower edge; got low = {low}. Take Clip()")
        # A norm has no derivative at zero.
        still = jnp.all(vector == 0, axis=(-2, -1))
        size = spectral_bound(jnp.where(over(still, 2), 1, vector / high))
        excess = jnp.where(still, 0, jnp.maximum(size, jnp.finfo(vector.dtype).eps))
        # Beyond, the cubics are not monotone: so long steps are shortened by a factor first.
        largest = jnp.minimum(1 + excess, _LARGEST_CAPPED)
        moved = (point + vector) / over(high * (1 + excess) / largest, 2)
        cubic = over(_soft_cap(largest), 2)
        gram = product(mT(moved), moved)
        identity = identity_like(gram)
        once = identity - cubic * gram
        factor = once + cubic * product(gram, product(once, product(once, once)))
        return high * product(moved, factor)


class SphereRetraction(abc.ABC):
    """Moves unit vectors along tangent vectors, on the sphere of radius 1.

    A frozen, hashable value. Vectors lie in the last axis; arithmetic is done in the dtype of
    the arguments, which the manifolds make float32 or wider.

    Attributes:
      order: `R(w, t v)` differs from the great circle by O(t**(order + 1)).
    """

    order: ClassVar[float]

    @abc.abstractmethod
    def retract(
        self, point: Float[Array, "*batch d"], vector: Float[Array, "*batch d"]
    ) -> Float[Array, "*batch d"]:
        """A unit vector near `point + vector`, for a tangent `vector`."""


@dataclasses.dataclass(frozen=True)
class Normalize(SphereRetraction):
    """`(w + v) / ||w + v||`: the nearest point of the sphere, second order.

    For a tangent step of length eta the divisor is `sqrt(1 + eta**2)`; computing the true
    length instead undoes whatever distance rounding has left in `w`.
    """

    order: ClassVar[float] = 2

    def retract(
        self, point: Float[Array, "*batch d"], vector: Float[Array, "*batch d"]
    ) -> Float[Array, "*batch d"]:
        return normalize(point + vector, 1)


@dataclasses.dataclass(frozen=True)
class Geodesic(SphereRetraction):
    """The great circle: `cos(eta) w + sin(eta) v / eta` with `eta = ||v||`.

    Exact, so a step of length pi arrives at the antipode. It keeps the distance that a point
    already has from the sphere; rounding accumulates over many steps.
    """

    order: ClassVar[float] = math.inf

    def retract(
        self, point: Float[Array, "*batch d"], vector: Float[Array, "*batch d"]
    ) -> Float[Array, "*batch d"]:
        angle = frobenius_norm(vector, 1)[..., None]
        # jnp.sinc is sin(pi x) / (pi x), finite at zero and with a derivative there.
        return jnp.cos(angle) * point + jnp.sinc(angle / jnp.pi) * vector


class StochasticRetraction(abc.ABC):
    """Moves a non-negative matrix with rows of sum 1 and columns of sum m/n, and keeps these sums.

    A frozen, hashable value. Vectors have rows and columns of sum zero; the manifold divides by its
    scale, and makes the dtype float32 or wider. Leading axes are independent. Among matrices with
    positive entries the set is flat, and a geodesic is `X + t V`.

    Attributes:
      order: `R(X, t V)` differs by O(t**(order + 1)) from it, where all entries of X are positive.
    """

    order: ClassVar[float]

    @abc.abstractmethod
    def retract(
        self, point: Float[Array, "*batch m n"], vector: Float[Array, "*batch m n"]
    ) -> Float[Array, "*batch m n"]:
        """A matrix of the set near `point + vector`."""


@dataclasses.dataclass(frozen=True)
class Nearest(StochasticRetraction):
    """The point of the set nearest to `X + V` in the Frobenius norm: addition, where that stays.

    Entries that would be negative become zero, and may grow again in any later step. Undoes the
    distance that X has from the set; see `manifoldmuon.linalg.nearest_with_sums`.
    """

    order: ClassVar[float] = math.inf

    def retract(
        self, point: Float[Array, "*batch m n"], vector: Float[Array, "*batch m n"]
    ) -> Float[Array, "*batch m n"]:
        return nearest_with_sums(point + vector, 1.0)


@dataclasses.dataclass(frozen=True)
class Sinkhorn(StochasticRetraction):
    """`X exp(V / X)`, entry by entry, balanced by Sinkhorn's iteration: entries stay positive.

    First order (Douik and Hassibi, arXiv:1802.02628, section III-C). A step no longer than the
    smallest entries would make others of them huge or zero, so no entry changes by a larger factor
    than `exp(limit)` before the balance, and none falls below 1e-30. An entry of zero stays zero.

    Attributes:
      limit: of the exponent `V / X`.
      max_iterations: where the balancing gives up; see `manifoldmuon.linalg.sinkhorn`.

    Raises:
      ValueError: a field is not positive.
    """

    limit: float = 1.0
    max_iterations: int = 200

    order: ClassVar[float] = 1

    def __post_init__(self):
        if not (self.limit > 0 and self.max_iterations > 0):
            raise ValueError(f"the fields of Sinkhorn must be positive; got {self!r}")

    def retract(
        self, point: Float[Array, "*batch m n"], vector: Float[Array, "*batch m n"]
    ) -> Float[Array, "*batch m n"]:
        gone = point <= 0
        exponent = jnp.clip(vector / jnp.where(gone, 1, point), -self.limit, self.limit)
        moved = jnp.maximum(jnp.log(jnp.where(gone, 1, point)) + exponent, math.log(1e-30))
        return sinkhorn(jnp.where(gone, -jnp.inf, moved), 1.0, self.max_iterations)
