"""Check a method for msign against the laws of `MsignMethod`."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from manifoldmuon.linalg import MsignMethod, msign
from manifoldmuon.testing._assertions import (
    agree,
    at_most,
    check_all,
    check_value_object,
    normal,
    require,
    wide,
)
from tests.compiled import ask


class HardMatrix(NamedTuple):
    """A single matrix with singular values that are far apart or zero."""

    name: str
    x: np.ndarray
    rank: int
    condition: float


class CheckedMsign(NamedTuple):
    """A method with random matrices, its answers, and the limits of its laws."""

    method: MsignMethod
    x: jax.Array
    answer: jax.Array
    hard: list[HardMatrix]
    orthogonality: float
    condition: float
    tolerance: float


def check_msign(
    method: MsignMethod,
    shape: tuple[int, ...],
    key: PRNGKeyArray,
    orthogonality: float = 10.0,
    tolerance: float = 2e-5,
    condition: float = 1e6,
) -> None:
    """Check every law of `MsignMethod`, at random matrices with any leading axes.

    Args:
      orthogonality: largest `||Q^T Q - I||_F` allowed, in units of `eps sqrt(n)`. Infinite for a
        method that stops short of convergence or of full rank.
      tolerance: for float32 results that should be equal, relative to their size.
      condition: largest condition number at which `orthogonality` has to hold.
    """
    check_value_object(method)
    x = jax.random.normal(key, shape)
    hard = _hard_matrices(shape[-2:], key, condition)
    case = CheckedMsign(method, x, msign(x, method), hard, orthogonality, condition, tolerance)
    check_all(LAWS, "the docstring of `MsignMethod`", case)


def _check_dtypes(case: CheckedMsign) -> None:
    x, answer, rounded = case.x, case.answer, case.x.astype(jnp.bfloat16)
    require("shape and dtype are kept", answer.shape == x.shape and answer.dtype == x.dtype)
    short = msign(rounded, case.method)
    require("bfloat16 is kept", short.dtype == jnp.bfloat16, str(short.dtype))
    expected, eps = msign(rounded.astype(x.dtype), case.method), float(jnp.finfo(jnp.bfloat16).eps)
    agree("bfloat16 is rounded once, at the end", short.astype(x.dtype), expected, eps)


def _check_random(case: CheckedMsign) -> None:
    _check_values("", case.x, case.answer, case.orthogonality, case.tolerance)


def _check_hard(case: CheckedMsign, full_rank: bool) -> None:
    """Compare with a float64 SVD, on the span of the singular vectors of nonzero values."""
    answers = msign(jnp.stack([one.x for one in case.hard]), case.method)
    for (name, x, rank, condition), q in zip(case.hard, wide(answers), strict=True):
        if (rank == min(x.shape)) != full_rank:
            continue
        limit = case.orthogonality if full_rank else np.inf
        _check_values(name, x, q, limit, 10 * case.tolerance)
        left, _, right = np.linalg.svd(wide(x), full_matrices=False)
        left, right = left[:, :rank], right[:rank]
        within = left.T @ q @ right.T
        if np.isfinite(case.orthogonality):
            error = np.linalg.norm(within - np.eye(rank), 2)
            at_most(f"msign(x) == U V^T{name}", error, 0, case.tolerance * condition)
            at_most(f"||msign(x)|| <= 1{name}", np.linalg.norm(q, 2), 1, case.tolerance)
        if not np.all(np.any(x, axis=0)) or not np.all(np.any(x, axis=1)):
            rest = np.linalg.norm(q - left @ within @ right, 2)
            at_most("rows and columns of zeros stay zero", rest, 0, case.tolerance)


def _hard_matrices(shape: tuple[int, ...], key: PRNGKeyArray, condition: float) -> list[HardMatrix]:
    (x,) = normal(key, shape, 1)
    left, _, right = np.linalg.svd(x, full_matrices=False)
    size, half = min(shape), max(min(shape) // 2, 1)
    corner = np.zeros(shape, np.float32)
    corner[:half, :half] = np.linalg.qr(x[:half, :half])[0]
    spread = lambda c: np.asarray(left * np.geomspace(1, 1 / c, size) @ right, np.float32)  # noqa: E731
    conditions = (min(1e3, condition), condition)
    return [
        *(HardMatrix(f" at condition {c:g}", spread(c), size, c) for c in conditions),
        HardMatrix(", without full rank", left[:, :half] @ right[:half], half, 1.0),
        # Rounding does not enlarge exact zeros.
        HardMatrix(", with rows and columns of zeros", corner, half, 1.0),
    ]


def _check_values(where: str, x, answer, orthogonality, tolerance) -> None:
    """Check that Q has orthonormal columns (or rows) and the singular vectors of x."""
    q, x = wide(answer), wide(x)
    if q.shape[-2] < q.shape[-1]:
        q, x = q.mT, x.mT
    n = q.shape[-1]
    error = np.linalg.norm(q.mT @ q - np.eye(n), axis=(-2, -1))
    unit = float(jnp.finfo(jnp.float32).eps) * math.sqrt(n)
    law = f"||Q^T Q - I||_F <= {orthogonality} eps sqrt(n){where}"
    at_most(law, error / unit, orthogonality)
    h, size = q.mT @ x, np.linalg.norm(x, 2, axis=(-2, -1))
    asymmetry = np.max(np.abs(h - h.mT), axis=(-2, -1))
    at_most(f"Q^T X is symmetric{where}", asymmetry / size, 0, tolerance)
    smallest = np.linalg.eigvalsh(h)[..., 0]
    at_most(f"Q^T X is positive semi-definite{where}", -smallest / size, 0, tolerance)


def _check_stack(case: CheckedMsign) -> None:
    """Check scales, NaN, infinity and denormals in a single batch of independent matrices."""
    x, answer, tolerance = case.x, case.answer, case.tolerance
    scales = (1.0, -1.0, 1e-30, 1e-10, 1e10, 1e30)
    origin = (0,) * x.ndim
    bad = [0 * x, x.at[origin].set(jnp.nan), x.at[origin].set(jnp.inf)]
    whole = np.round(wide(x) * 64).astype(np.float32)
    # NumPy, because XLA may flush denormal numbers to zero.
    denormal = np.ldexp(whole, -149)
    stack = np.stack([*(np.asarray(c * x) for c in scales), *bad, whole, denormal])
    *scaled, zero, nan, infinite, expected, found = ask(lambda x: msign(x, case.method), stack)
    for c, one in zip(scales, scaled, strict=True):
        agree(f"msign(c x) == sign(c) msign(x) at c = {c:g}", one, np.sign(c) * answer, tolerance)
    require("msign(0) == 0", bool(np.all(zero == 0)))
    first = (0,) * (x.ndim - 2)
    require("a NaN stays visible", bool(np.all(np.isnan(nan[first]))))
    require("an infinity is visible", bool(np.all(np.isnan(infinite[first]))))
    if x.ndim > 2:
        agree("a NaN touches its own matrix only", nan[1:], answer[1:], tolerance)
    agree("denormal entries count", found, expected, tolerance)


LAWS = (
    (1, _check_dtypes),
    (2, _check_random),
    (2, functools.partial(_check_hard, full_rank=True)),
    (3, functools.partial(_check_hard, full_rank=False)),
    (4, _check_stack),
)
