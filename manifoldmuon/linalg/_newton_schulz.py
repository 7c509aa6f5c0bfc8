"""The interface of a method for msign, and the one by matrix products alone.

`NewtonSchulz` applies odd polynomials, in the direct or in the Gram form.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon._internal.arguments import check_dtype, check_fields
from manifoldmuon._internal.arrays import check_precision, mT, nonzero_or_one, product, rounding
from manifoldmuon._internal.values import Value
from manifoldmuon.linalg._polynomials import (
    coupled_factor,
    factor_products,
    scan_runs,
    schatten_bound,
)
from manifoldmuon.linalg._schedules import Coefficients, Schedule, check_schedule

# Steps that are taken on a fresh Gram matrix at the end of a schedule: they remove what rounding
# has left in the blocks before, which grows with the size and the length of a block.
_LAST_BLOCK = 1
_MARGIN = 1e-4


class MsignMethod(Value, abc.ABC):
    """A way to compute the orthogonal polar factor, as a frozen, hashable value.

    The matrices that a method is given are tall or square, not empty, in float32 or wider, and
    each has its largest magnitude between eps and 1/eps (of its dtype), or is zero, or is NaN
    throughout: `msign` scales what it is given. A method answers with matrices of the same shape
    and dtype; a zero matrix gives zero, a NaN matrix NaN, and matrices in a batch do not touch
    each other. It must work under `jax.jit`, `jax.vmap` and `jax.lax.scan`; it need not be
    differentiable.
    """

    @abc.abstractmethod
    def polar(self, x: Float[Array, "*batch m n"]) -> Float[Array, "*batch m n"]:
        """`U V^T` for each `x = U S V^T` with `m >= n >= 1`."""


def check_method(name: str, method: object) -> None:
    """Raises `TypeError`, naming the argument, for what is not a `MsignMethod`."""
    if isinstance(method, Schedule):
        raise TypeError(f"{name} must be a MsignMethod: write NewtonSchulz({method!r})")
    if not isinstance(method, MsignMethod):
        raise TypeError(f"{name} must be a MsignMethod such as SVD(); got {method!r}")


@dataclasses.dataclass(frozen=True)
class NewtonSchulz(MsignMethod):
    """Applies a schedule of odd polynomials: a few large products, nothing else.

    *Direct form*: `X <- X p(X^T X)`, one step at a time. *Gram form*: for a tall matrix several
    steps are taken on the small Gram matrix, `S <- p(S) S p(S)`, `Q <- Q p(S)`, before
    `X <- X Q`. S has the squared condition number, and rounding makes its smallest eigenvalues
    noise that grows with the gain of the steps; so it is formed anew (a restart) before that
    noise matters, after two steps in float32 and after every step in bfloat16.

    The matrix is divided by the Schatten norm `||X^T X X^T X||_F^(1/4)`, at most `n**(1/8)`
    times the spectral norm, which the first step has at hand; the Frobenius norm of the
    published iterations may be `n**(1/2)` times the spectral norm, which costs two more steps.

    Attributes:
      schedule: the polynomials.
      gram: True or False for the Gram or the direct form; None: whichever takes fewer
        floating-point operations for the shape.
      frobenius: divide by the Frobenius norm instead, to repeat published runs exactly.
      operands: dtype to which the factors of every product are rounded, `jnp.bfloat16` for
        speed on an accelerator; None: float32 or wider. Sums are in float32 or wider always.
      precision: of float32 products on accelerators, where a restart follows from it as from
        `operands`. `HIGHEST` are six passes of bfloat16 on a TPU, `HIGH` three, `DEFAULT` one.
      skew: the matrices are skew-symmetric, so `X^T X = -X X`, which needs no transpose (a third
        of the time of a product on a CPU). For such matrices only: it is not checked.
    """

    schedule: Schedule
    gram: bool | None = None
    frobenius: bool = False
    operands: Any = None
    precision: jax.lax.Precision = jax.lax.Precision.HIGHEST
    skew: bool = False

    def __post_init__(self):
        check_schedule("NewtonSchulz.schedule", self.schedule)
        check_precision("NewtonSchulz.precision", self.precision)
        check_fields(self)
        if self.operands is not None:
            check_dtype("NewtonSchulz.operands", self.operands)

    def polar(self, x: Float[Array, "*batch m n"]) -> Float[Array, "*batch m n"]:
        own = float(jnp.finfo(self.operands or x.dtype).eps)
        blocks = self._blocks(x, own)
        restarted = self._blocks(x, max(own, rounding(self.precision, x.dtype)))
        if blocks == restarted:
            return self._through(x, blocks)
        return jax.lax.platform_dependent(
            x,
            cpu=functools.partial(self._through, blocks=blocks),
            default=functools.partial(self._through, blocks=restarted),
        )

    def _through(self, x, blocks):
        gram, _ = self._gram_of(x)
        gram, square, inverse = self._normalised(gram, blocks[0][0])
        first = coupled_factor(gram, blocks[0], self._product, square)

        def advance(x, block):
            gram, root = self._gram_of(x)
            square = self._product(root, root) if factor_products(len(block[0])) else None
            return self._product(x, coupled_factor(gram, block, self._product, square))

        return scan_runs(advance, self._product(x, first * inverse), blocks[1:], x.dtype)

    def _product(self, left, right):
        return product(left, right, self.precision, self.operands)

    def _gram_of(self, x):
        """`S = X^T X`, and what has the square of S: a product needs no pass for a sign."""
        root = self._product(x, x) if self.skew else self._product(mT(x), x)
        return (-root if self.skew else root), root

    def _normalised(self, gram: Float[Array, "*batch n n"], step: Coefficients):
        """`X^T X / bound^2`, its square where the first step needs it, and `1 / bound`."""
        trace = nonzero_or_one(jnp.trace(gram, axis1=-2, axis2=-1)[..., None, None])
        gram = gram / trace  # so that the squares below cannot overflow
        square = self._product(gram, gram) if factor_products(len(step)) else None
        if self.frobenius:
            return gram, square, 1 / jnp.sqrt(trace)
        bound = schatten_bound(gram, 1) if square is None else schatten_bound(square, 2)
        bound = nonzero_or_one(bound)
        square = None if square is None else square / bound**2
        return gram / bound, square, 1 / jnp.sqrt(bound * trace)

    def _blocks(self, x, eps: float):
        m, n = x.shape[-2:]
        steps = self.schedule.coefficients
        direct = tuple((step,) for step in steps)
        if self.gram is False:
            return direct
        blocks = gram_blocks(steps, eps)
        cheaper = block_flops(blocks, m, n) < block_flops(direct, m, n)
        return blocks if self.gram or cheaper else direct


def gram_blocks(
    steps: tuple[Coefficients, ...], eps: float
) -> tuple[tuple[Coefficients, ...], ...]:
    """Cuts a schedule where the Gram matrix has to be formed anew.

    Within a block rounding grows by the squared slope of every step, and what `X Q` then is
    differs by that much from what S says it is. A value that S has at the upper end of a step's
    interval, where the steps turn up steeply, must not lie past it: a block ends while the
    difference is below the safety margin of `DEFAULT_MSIGN`.
    """
    body, last = steps[:-_LAST_BLOCK], steps[-_LAST_BLOCK:]
    blocks: list[tuple[Coefficients, ...]] = []
    gain = float("inf")
    for step in body:
        gain *= abs(step[0])
        if eps * gain**2 > _MARGIN:
            blocks.append(())
            gain = abs(step[0])
        blocks[-1] += (step,)
    return (*blocks, last)


def block_flops(blocks: tuple[tuple[Coefficients, ...], ...], m: int, n: int) -> int:
    """Floating-point operations of `NewtonSchulz` on an m x n matrix, products only."""
    small = tall = 0
    for block in blocks:
        tall += 2
        small += 3 * (len(block) - 1) + sum(factor_products(len(step)) for step in block)
    return 2 * n * n * (tall * m + small * n)
