"""Check a method for msign against the laws of `MsignMethod`."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from manifoldmuon.linalg import MsignMethod, msign
from manifoldmuon.testing import _assertions


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
    """Check every law of `MsignMethod`, at random matrices.

    Args:
      method: method to check.
      shape: shape of the matrices, wide or tall; may have leading axes.
      key: seeds the random matrices.
      orthogonality: largest `||Q^T Q - I||_F` allowed, in units of `eps sqrt(n)`. Infinite for a
        method that stops short of convergence or of full rank.
      tolerance: for float32 results that should be equal, relative to their size.
      condition: largest condition number at which `orthogonality` has to hold.

    Raises:
      AssertionError: laws are broken; a line for each has its number in `MsignMethod`, its name and
        the size of the violation.
    """
    _assertions.check_value_object(method)
    x = jax.random.normal(key, shape)
    hard = _hard_matrices(shape[-2:], key, condition)
    case = CheckedMsign(method, x, msign(x, method), hard, orthogonality, condition, tolerance)
    _assertions.check_all(LAWS, "the docstring of `MsignMethod`", case)


def _check_dtypes(case: CheckedMsign) -> None:
    x, answer = case.x, case.answer
    _assertions.require(
        "shape and dtype are kept", answer.shape == x.shape and answer.dtype == x.dtype
    )
    short = msign(x.astype(jnp.bfloat16), case.method)
    _assertions.require("bfloat16 is kept", short.dtype == jnp.bfloat16, str(short.dtype))
    expected = msign(x.astype(jnp.bfloat16).astype(x.dtype), case.method)
    law = "bfloat16 is rounded once, at the end"
    _assertions.agree(law, short.astype(x.dtype), expected, float(jnp.finfo(jnp.bfloat16).eps))


def _check_random(case: CheckedMsign) -> None:
    _check_values("", case.x, case.answer, case.orthogonality, case.tolerance)


def _check_hard(case: CheckedMsign, full_rank: bool) -> None:
    """Compare with a float64 SVD, on the span of the singular vectors of nonzero values."""
    answers = msign(jnp.stack([one.x for one in case.hard]), case.method)
    for (name, x, rank, condition), q in zip(case.hard, _assertions.wide(answers), strict=True):
        if (rank == min(x.shape)) != full_rank:
            continue
        exact = np.isfinite(case.orthogonality)
        limit = case.orthogonality if full_rank else np.inf
        _check_values(name, x, q, limit, 10 * case.tolerance)
        left, _, right = np.linalg.svd(_assertions.wide(x), full_matrices=False)
        left, right = left[:, :rank], right[:rank]
        within = left.T @ q @ right.T
        if exact:
            error = np.linalg.norm(within - np.eye(rank), 2)
            _assertions.at_most(f"msign(x) == U V^T{name}", error, 0, case.tolerance * condition)
            _assertions.at_most(f"||msign(x)|| <= 1{name}", np.linalg.norm(q, 2), 1, case.tolerance)
        if not np.all(np.any(x, axis=0)) or not np.all(np.any(x, axis=1)):
            rest = np.linalg.norm(q - left @ within @ right, 2)
            _assertions.at_most("rows and columns of zeros stay zero", rest, 0, case.tolerance)


def _hard_matrices(shape: tuple[int, ...], key: PRNGKeyArray, condition: float) -> list[HardMatrix]:
    (x,) = _assertions.normal(key, shape, 1)
    left, _, right = np.linalg.svd(x, full_matrices=False)
    size, half = min(shape), max(min(shape) // 2, 1)
    found = []
    for c in (min(1e3, condition), condition):
        matrix = left * np.geomspace(1, 1 / c, size) @ right
        found.append(HardMatrix(f" at condition {c:g}", matrix.astype(np.float32), size, c))
    found.append(HardMatrix(", without full rank", left[:, :half] @ right[:half], half, 1.0))
    # Rounding does not enlarge exact zeros.
    corner = np.zeros(shape, np.float32)
    corner[:half, :half] = np.linalg.qr(x[:half, :half])[0]
    found.append(HardMatrix(", with rows and columns of zeros", corner, half, 1.0))
    return found


def _check_values(where: str, x, answer, orthogonality, tolerance) -> None:
    """Check that Q has orthonormal columns (or rows) and the singular vectors of x."""
    q, x = _assertions.wide(answer), _assertions.wide(x)
    if q.shape[-2] < q.shape[-1]:
        q, x = np.swapaxes(q, -1, -2), np.swapaxes(x, -1, -2)
    n = q.shape[-1]
    error = np.linalg.norm(np.swapaxes(q, -1, -2) @ q - np.eye(n), axis=(-2, -1))
    unit = float(jnp.finfo(jnp.float32).eps) * math.sqrt(n)
    _assertions.at_most(
        f"||Q^T Q - I||_F <= {orthogonality} eps sqrt(n){where}", error / unit, orthogonality
    )
    h = np.swapaxes(q, -1, -2) @ x
    size = np.linalg.norm(x, 2, axis=(-2, -1))
    asymmetry = np.max(np.abs(h - np.swapaxes(h, -1, -2)), axis=(-2, -1))
    _assertions.at_most(f"Q^T X is symmetric{where}", asymmetry / size, 0, tolerance)
    smallest = np.linalg.eigvalsh(h)[..., 0]
    _assertions.at_most(f"Q^T X is positive semi-definite{where}", -smallest / size, 0, tolerance)


def _check_stack(case: CheckedMsign) -> None:
    """Check scales, NaN, infinity and denormals in a single batch of independent matrices."""
    method, x, answer, tolerance = case.method, case.x, case.answer, case.tolerance
    scales = (1.0, -1.0, 1e-30, 1e-10, 1e10, 1e30)
    origin = (0,) * x.ndim
    bad = [0 * x, x.at[origin].set(jnp.nan), x.at[origin].set(jnp.inf)]
    whole = np.round(_assertions.wide(x) * 64).astype(np.float32)
    # NumPy, because XLA may flush denormal numbers to zero.
    denormal = np.ldexp(whole, -149)
    stack = np.stack([*(np.asarray(c * x) for c in scales), *bad, whole, denormal])
    answers = jax.jit(lambda stack: msign(stack, method))(jnp.asarray(stack))
    *scaled, zero, nan, infinite, expected, found = answers
    for c, one in zip(scales, scaled, strict=True):
        _assertions.agree(
            f"msign(c x) == sign(c) msign(x) at c = {c:g}",
            one,
            math.copysign(1, c) * answer,
            tolerance,
        )
    _assertions.require("msign(0) == 0", bool(jnp.all(zero == 0)))
    first = (0,) * (x.ndim - 2)
    _assertions.require("a NaN stays visible", bool(jnp.all(jnp.isnan(nan[first]))))
    _assertions.require("an infinity is visible", bool(jnp.all(jnp.isnan(infinite[first]))))
    if x.ndim > 2:
        _assertions.agree("a NaN touches its own matrix only", nan[1:], answer[1:], tolerance)
    _assertions.agree("denormal entries count", found, expected, tolerance)


LAWS = (
    (1, _check_dtypes),
    (2, _check_random),
    (2, functools.partial(_check_hard, full_rank=True)),
    (3, functools.partial(_check_hard, full_rank=False)),
    (4, _check_stack),
)
