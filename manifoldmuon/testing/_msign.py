"""The laws of a method for msign, as a check for any implementation."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from manifoldmuon.linalg import MsignMethod, msign
from manifoldmuon.testing._assertions import agree, at_most, check_value_object, require, wide


def check_msign(
    method: MsignMethod,
    shape: tuple[int, ...],
    key: PRNGKeyArray,
    orthogonality: float = 10.0,
    tolerance: float = 2e-5,
) -> None:
    """Checks every law that `MsignMethod` states, at random matrices.

    Args:
      method: what is to be checked.
      shape: of the matrices, wide or tall, with leading axes if wanted.
      key: drives the random matrices.
      orthogonality: the largest `||Q^T Q - I||_F` in units of `eps sqrt(n)`. Infinite for a
        method that stops short of convergence or of full rank.
      tolerance: for float32 results that should be the same, relative to their size.

    Raises:
      AssertionError: a law is broken; the message names it and the size of the violation.

    Examples:
      >>> check_msign(mm.linalg.SVD(), (5, 3), jax.random.key(0))
    """
    check_value_object(method)
    x = jax.random.normal(key, shape)
    answer = msign(x, method)
    require("shape and dtype are kept", answer.shape == shape and answer.dtype == x.dtype)
    _check_values(x, answer, orthogonality, tolerance)
    _check_stack(method, x, answer, tolerance)
    short = msign(x.astype(jnp.bfloat16), method)
    require("bfloat16 is kept", short.dtype == jnp.bfloat16, str(short.dtype))
    expected = msign(x.astype(jnp.bfloat16).astype(x.dtype), method)
    law = "bfloat16 is rounded once, at the end"
    agree(law, short.astype(x.dtype), expected, float(jnp.finfo(jnp.bfloat16).eps))


def _check_values(x, answer, orthogonality, tolerance) -> None:
    """Orthonormal columns or rows, and the singular vectors of x."""
    q, x = wide(answer), wide(x)
    if q.shape[-2] < q.shape[-1]:
        q, x = np.swapaxes(q, -1, -2), np.swapaxes(x, -1, -2)
    n = q.shape[-1]
    error = np.linalg.norm(np.swapaxes(q, -1, -2) @ q - np.eye(n), axis=(-2, -1))
    unit = float(jnp.finfo(jnp.float32).eps) * math.sqrt(n)
    at_most(f"||Q^T Q - I||_F <= {orthogonality} eps sqrt(n)", error / unit, orthogonality)
    h = np.swapaxes(q, -1, -2) @ x
    size = np.linalg.norm(x, 2, axis=(-2, -1))
    asymmetry = np.max(np.abs(h - np.swapaxes(h, -1, -2)), axis=(-2, -1))
    at_most("Q^T X is symmetric", asymmetry / size, 0, tolerance)
    smallest = np.linalg.eigvalsh(h)[..., 0]
    at_most("Q^T X is positive semi-definite", -smallest / size, 0, tolerance)


def _check_stack(method, x, answer, tolerance) -> None:
    """Scales and bad values, all in one batch: matrices do not touch each other."""
    scales = (1.0, -1.0, 1e-30, 1e-10, 1e10, 1e30)
    origin = (0,) * x.ndim
    bad = [0 * x, x.at[origin].set(jnp.nan), x.at[origin].set(jnp.inf)]
    whole = np.round(wide(x) * 64).astype(np.float32)
    # Made in NumPy: XLA may flush the denormal numbers that are wanted here to zero.
    denormal = np.ldexp(whole, -149)
    stack = np.stack([*(np.asarray(c * x) for c in scales), *bad, whole, denormal])
    answers = jax.jit(lambda stack: msign(stack, method))(jnp.asarray(stack))
    *scaled, zero, nan, infinite, expected, found = answers
    for c, one in zip(scales, scaled, strict=True):
        agree(
            f"msign(c x) == sign(c) msign(x) at c = {c:g}",
            one,
            math.copysign(1, c) * answer,
            tolerance,
        )
    require("msign(0) == 0", bool(jnp.all(zero == 0)))
    first = (0,) * (x.ndim - 2)
    require("a NaN stays visible", bool(jnp.all(jnp.isnan(nan[first]))))
    require("an infinity is visible", bool(jnp.all(jnp.isnan(infinite[first]))))
    if x.ndim > 2:
        agree("a NaN touches its own matrix only", nan[1:], answer[1:], tolerance)
    agree("denormal entries count", found, expected, tolerance)
