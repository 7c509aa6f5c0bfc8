"""The interface of msign methods, and Newton-Schulz iterations with schedules of polynomials."""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from manifoldmuon._internal.arguments import check_dtype, check_fields
from manifoldmuon._internal.matrices import arrays
from manifoldmuon._internal.matrices.arrays import Matrices, Squares
from manifoldmuon._internal.values import Value
from manifoldmuon.linalg import _polynomials
from manifoldmuon.linalg._schedules import Coefficients, Schedule

# Maximum relative noise of a Gram matrix before it is recomputed.
_MARGIN = 1e-4


class MsignMethod(Value, abc.ABC):
    """A way to compute the orthogonal polar factor, as a frozen, hashable value.

    `msign` scales its argument, so a method gets matrices that are tall or square, not empty, in
    float32 or wider, and each matrix has a largest magnitude between eps and 1/eps (of its dtype),
    or is zero, or NaN throughout. A method must work under `jax.jit`, `jax.vmap` and
    `jax.lax.scan`; it need not be differentiable.

    Laws, for `x = U S V^T` and `q = msign(x, method)`:

    1. Shape and dtype are kept; arithmetic is done in float32 or wider.
    2. `q == U V^T`: `q^T x` is symmetric and positive semi-definite and, up to the condition number
       that the method resolves, q has orthonormal columns.
    3. Without full rank the same holds on the span of the singular vectors, rows and columns of
       zeros stay zero, and a converging method has no singular value above 1.
    4. `msign(c * x) == sign(c) * msign(x)`, also for c = 0. A NaN or an infinity makes its own
       matrix NaN, and matrices of a batch are independent.
    """

    @abc.abstractmethod
    def polar(self, x: Matrices) -> Matrices:
        """Return `U V^T` for each `x = U S V^T` with `m >= n >= 1`."""

    @classmethod
    def check(cls, name: str, method: object) -> None:
        """Raise `TypeError`, naming the argument, unless it is a `MsignMethod`."""
        if isinstance(method, Schedule):
            raise TypeError(f"{name} must be a MsignMethod: write NewtonSchulz({method!r})")
        if not isinstance(method, cls):
            raise TypeError(f"{name} must be a MsignMethod such as SVD(); got {method!r}")


@dataclasses.dataclass(frozen=True)
class _Products(MsignMethod):
    """A schedule, and the rounding of its products."""

    schedule: Schedule
    operands: Any = None
    precision: jax.lax.Precision = jax.lax.Precision.HIGHEST

    def __post_init__(self):
        Schedule.check(f"{type(self).__name__}.schedule", self.schedule)
        arrays.check_precision(f"{type(self).__name__}.precision", self.precision)
        check_fields(self)
        if self.operands is not None:
            check_dtype(f"{type(self).__name__}.operands", self.operands)

    @property
    def _multiply(self):
        return functools.partial(arrays.product, precision=self.precision, operands=self.operands)


@dataclasses.dataclass(frozen=True)
class NewtonSchulz(_Products):
    """Apply a schedule of odd polynomials, `X <- X p(X^T X)`, by matrix products alone.

    The matrix is divided by the Schatten norm `||X^T X X^T X||_F^(1/4)`, at most `n**(1/8)` times
    the spectral norm, which the first step computes anyway (for a first step of degree 3,
    `||X^T X||_F^(1/2)`, at most `n**(1/4)` times). Published iterations divide by the Frobenius
    norm, up to `n**(1/2)` times the spectral norm, which costs two more steps. For matrices with
    twice as many rows as columns `GramNewtonSchulz` takes less time.

    Attributes:
      schedule: the polynomials.
      operands: dtype to round the factors of every product to, `jnp.bfloat16` for speed on an
        accelerator; None: float32 or wider. Sums are always in float32 or wider.
      precision: precision of float32 products on accelerators. On a TPU `HIGHEST` takes six passes
        of bfloat16, `HIGH` three and `DEFAULT` a single pass.
      frobenius: divide by the Frobenius norm instead, to repeat published runs exactly.

    Examples:
      >>> msign(jnp.eye(3), NewtonSchulz(MUON)).shape
      (3, 3)
    """

    frobenius: bool = False

    def polar(self, x: Matrices) -> Matrices:
        first_step, *steps = self.schedule.coefficients
        multiply = self._multiply
        gram, _ = self._gram(x)
        size = arrays.trace(gram)[..., None, None]
        gram, square, inverse = normalised(gram, size, first_step, multiply, self.frobenius)

        def advance(x, step):
            gram, root = self._gram(x)
            square = multiply(root, root) if _polynomials.factor_products(len(step)) else None
            return multiply(x, _polynomials.odd_factor(gram, step, multiply, square))

        first = multiply(x, _polynomials.odd_factor(gram, first_step, multiply, square) * inverse)
        return _polynomials.scan_runs(advance, first, tuple(steps), x.dtype)

    def _gram(self, x: Matrices) -> tuple[Squares, Squares]:
        """Return `X^T X`, and the same matrix up to sign, for its square."""
        gram = self._multiply(x.mT, x)
        return gram, gram


@dataclasses.dataclass(frozen=True)
class SkewNewtonSchulz(NewtonSchulz):
    """`NewtonSchulz` for skew-symmetric matrices: `X^T X = -X X` needs no transpose.

    This saves a third of the time of a product on a CPU. Skew symmetry is not checked. The fields
    are the same as for `NewtonSchulz`.
    """

    def _gram(self, x: Squares) -> tuple[Squares, Squares]:
        minus = self._multiply(x, x)
        return -minus, minus


def normalised(gram, size, step: Coefficients, multiply, frobenius: bool = False):
    """Return `X^T X / bound^2`, its square (None if the step needs none), and `1 / bound`.

    A zero matrix stays zero, with a finite `1 / bound`. `gram` is `X^T X`, `size` its trace with
    two trailing axes of length 1, `step` the first step. The bound is a Schatten norm, or the
    Frobenius norm.
    """
    eps = jnp.finfo(gram.dtype).eps
    scale = 1 / jnp.maximum(size, eps**2)
    square = multiply(gram, gram) if _polynomials.factor_products(len(step)) else None
    if not frobenius:  # scaled, since fourth powers could overflow
        power = gram * scale if square is None else square * scale**2
        bound = arrays.safe_sqrt(jnp.sum(power**2, axis=(-2, -1), keepdims=True))
        bound = bound if square is None else arrays.safe_sqrt(bound)
        scale = scale / jnp.maximum(bound, eps**0.5)
    square = None if square is None else square * scale**2
    return gram * scale, square, jnp.sqrt(scale)


@dataclasses.dataclass(frozen=True)
class GramNewtonSchulz(_Products):
    """`NewtonSchulz` in fewer operations for tall matrices: several steps on the Gram matrix.

    `S <- p(S) S p(S)`, `Q <- Q p(S)` from `S = X^T X`, then `X <- X Q`. S has the squared condition
    number: rounding turns its smallest eigenvalues into noise, which grows with the gain of the
    steps. S is therefore recomputed before the noise matters, about every two steps in float32 and
    after every step in bfloat16. Shapes that need no more operations with `NewtonSchulz` use it.

    Fields as in `NewtonSchulz`, without `frobenius`.
    """

    def polar(self, x: Matrices) -> Matrices:
        own = float(jnp.finfo(self.operands or x.dtype).eps)
        rounded = max(own, arrays.product_eps(self.precision, x.dtype))
        here, there = (self._fastest_blocks(x.shape, eps) for eps in (own, rounded))
        if here == there:
            return self._through(x, here)
        run = functools.partial
        return jax.lax.platform_dependent(
            x, cpu=run(self._through, blocks=here), default=run(self._through, blocks=there)
        )

    def _through(self, x, blocks):
        if max(map(len, blocks)) == 1:
            return NewtonSchulz(self.schedule, self.operands, self.precision).polar(x)
        multiply = self._multiply
        gram = multiply(x.mT, x)
        size = arrays.trace(gram)[..., None, None]
        gram, square, inverse = normalised(gram, size, blocks[0][0], multiply)
        first = _polynomials.coupled_factor(gram, blocks[0], multiply, square)

        def advance(x, block):
            return multiply(x, _polynomials.coupled_factor(multiply(x.mT, x), block, multiply))

        return _polynomials.scan_runs(advance, multiply(x, first * inverse), blocks[1:], x.dtype)

    def _fastest_blocks(self, shape: tuple[int, ...], eps: float):
        steps = self.schedule.coefficients
        direct, blocks = tuple((step,) for step in steps), gram_blocks(steps, eps)
        return min(direct, blocks, key=lambda candidate: block_flops(candidate, *shape[-2:]))


def gram_blocks(
    steps: tuple[Coefficients, ...], eps: float
) -> tuple[tuple[Coefficients, ...], ...]:
    """Cut a schedule into blocks; each block recomputes the Gram matrix.

    Within a block, rounding errors grow by the squared slope of every step, and S drifts by as much
    from the Gram matrix of `X Q`. A singular value at the upper end of a step's interval must not
    pass it, since the polynomials rise steeply there: a block ends while the drift is below the
    safety margin of `DEFAULT_MSIGN`. The last step always has a new Gram matrix, and so removes the
    rounding errors of earlier blocks.
    """
    blocks: list[tuple[Coefficients, ...]] = []
    gain = float("inf")
    for step in steps[:-1]:
        gain *= abs(step[0])
        if eps * gain**2 > _MARGIN:
            blocks.append(())
            gain = abs(step[0])
        blocks[-1] += (step,)
    return (*blocks, steps[-1:])


def block_flops(blocks: tuple[tuple[Coefficients, ...], ...], m: int, n: int) -> int:
    """Return the number of floating-point operations for an m x n matrix, in products only."""
    steps = sum(blocks, ())
    small = 3 * (len(steps) - len(blocks))
    small += sum(_polynomials.factor_products(len(step)) for step in steps)
    return 2 * n * n * (2 * len(blocks) * m + small * n)
