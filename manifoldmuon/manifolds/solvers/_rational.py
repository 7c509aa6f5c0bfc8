"""Parts of rational functions of matrices: Zolotarev's coefficients, and inverses.

Inverses are computed here because LAPACK takes four times as long on stacks of matrices, and stalls
where its threads and XLA's compete for processors.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from manifoldmuon._internal.matrices.arrays import Squares, identity_like, product

_LEAF = 16  # eliminated entry by entry
_BLOCK = 32  # eliminated at once: a tenth faster than blocks of 64, and a third less to compile


class Poles(NamedTuple):
    """`f(x) = x sum_j weights_j / (x^2 + shifts_j)`, from `1 - error` to 1 on the interval."""

    weights: np.ndarray
    shifts: np.ndarray
    error: float


@functools.lru_cache(maxsize=64)
def zolotarev(poles: int, lower: float) -> Poles:
    """Return the odd rational function with `poles` pole pairs closest to 1 on `[lower, 1]`.

    Its error falls geometrically with the number of poles, and its largest value is scaled to 1
    (Zolotarev 1877; Nakatsukasa and Freund, SIAM Review 58, 2016, sec. 3).
    """
    sn, cn = _jacobi(np.arange(1, 2 * poles) / (2 * poles), lower)
    squares = (lower * sn / cn) ** 2
    odd, even = squares[0::2], squares[1::2]
    gaps = odd[:, None] - odd
    np.fill_diagonal(gaps, -1)
    # The residues of prod (x^2 + even) / prod (x^2 + odd).
    weights = np.prod(even - odd[:, None], axis=1) / np.prod(-gaps, axis=1)
    x = np.geomspace(lower, 1, 20001)
    values = x * np.sum(weights / (x[:, None] ** 2 + odd), axis=1)
    return Poles(weights / values.max(), odd, float(1 - values.min() / values.max()))


def _jacobi(fraction: np.ndarray, complement: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the elliptic functions sn and cn at these fractions of the quarter period.

    By the arithmetic-geometric mean (Abramowitz and Stegun, 16.4 and 17.6), which starts from the
    complementary modulus: here it is known exactly.
    """
    a, b = [1.0], complement
    c = [np.sqrt(1 - complement**2)]
    while c[-1] > 1e-16 * a[-1]:
        c.append((a[-1] - b) / 2)
        a, b = [*a, (a[-1] + b) / 2], np.sqrt(a[-1] * b)
    angle = 2 ** (len(a) - 1) * fraction * np.pi / 2  # a_N u, and u = part pi / (2 a_N)
    for mean, half in zip(a[:0:-1], c[:0:-1], strict=True):
        angle = (angle + np.arcsin(half / mean * np.sin(angle))) / 2
    return np.sin(angle), np.cos(angle)


def inverse(x: Squares) -> Squares:
    """Return the inverse of matrices with a positive definite symmetric part, without pivoting.

    Blocks are eliminated in turn, each by the inverses of its triangular factors: the inverse of a
    block itself would lose as many digits as its condition number has. Mostly products; as accurate
    as LAPACK for these matrices.

    A symmetric matrix that is not positive definite has a pivot that is not positive, and gives
    NaN.
    """
    n = x.shape[-1]
    if n <= _BLOCK:
        lower, upper = _inverse_factors(x)
        return product(upper, lower)
    count = -(-n // _BLOCK)
    block = -(-n // count)
    padding = count * block - n
    if padding:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, padding), (0, padding)])
        x = x + jnp.diag(jnp.arange(count * block) >= n).astype(x.dtype)
    identity = identity_like(x)

    def eliminate(k, x):
        start = k * block
        rows = jax.lax.dynamic_slice_in_dim(x, start, block, -2)
        columns = jax.lax.dynamic_slice_in_dim(x, start, block, -1)
        lower, upper = _inverse_factors(jax.lax.dynamic_slice_in_dim(rows, start, block, -1))
        unit = jax.lax.dynamic_slice_in_dim(identity, start, block, -2)
        # A single outer product updates all four parts: the block, its row, its column, the rest.
        return x - product(product(columns - unit.mT, upper), product(lower, rows + unit))

    return jax.lax.fori_loop(0, count, eliminate, x)[..., :n, :n]


def _inverse_factors(x):
    """Return triangular `(l, u)` with `u l = x^-1`."""
    n = x.shape[-1]
    if n <= _LEAF:
        return _inverse_factors_by_entry(x)
    half = n // 2
    top, right = x[..., :half, :half], x[..., :half, half:]
    left, bottom = x[..., half:, :half], x[..., half:, half:]
    l1, u1 = _inverse_factors(top)
    left, right = product(left, u1), product(l1, right)
    l2, u2 = _inverse_factors(bottom - product(left, right))
    zero = jnp.zeros_like(left)
    lower = jnp.block([[l1, zero.mT], [-product(l2, product(left, l1)), l2]])
    return lower, jnp.block([[u1, -product(product(u1, right), u2)], [zero, u2]])


def _inverse_factors_by_entry(x):
    """Eliminate `[[x, 1], [1, 0]]`, which leaves both factors next to the pivots."""
    n = x.shape[-1]
    index = jnp.arange(2 * n)
    eye = jnp.broadcast_to(identity_like(x), x.shape)
    table = jnp.block([[x, eye], [eye, jnp.zeros_like(x)]])

    def eliminate(k, table):
        row = jax.lax.dynamic_slice_in_dim(table, k, 1, -2)
        column = jax.lax.dynamic_slice_in_dim(table, k, 1, -1)
        pivot = jax.lax.dynamic_slice_in_dim(row, k, 1, -1)
        later = index > k
        return table - jnp.where(later[:, None], column, 0) * (jnp.where(later, row, 0) / pivot)

    table = jax.lax.fori_loop(0, n, eliminate, table)
    # Every (2 n + 1)-th entry: `jnp.diagonal` would gather them, in three kernels.
    pivots = table.reshape(*x.shape[:-2], 4 * n * n)[..., : 2 * n * n : 2 * n + 1]
    root = jax.lax.rsqrt(pivots)
    return root[..., :, None] * table[..., :n, n:], table[..., n:, :n] * root[..., None, :]
