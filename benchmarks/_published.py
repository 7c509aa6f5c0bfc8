"""Published solvers for the steepest direction on the Stiefel manifold, with published settings.

The dual ascent of "Modular manifolds", and two other implementations of the closed form.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon.linalg import MUON, POLAR_EXPRESS, FixedSchedule


def _msign(
    x: Float[Array, "m n"], steps: int, schedule: FixedSchedule = POLAR_EXPRESS
) -> Float[Array, "m n"]:
    x = x / (jnp.linalg.norm(x) + 1e-7)
    identity = jnp.eye(x.shape[1], dtype=x.dtype)
    for a, b, c in schedule.with_steps(steps).coefficients:
        gram = x.T @ x
        x = x @ (a * identity + b * gram + c * gram @ gram)
    return x


@functools.partial(jax.jit, static_argnames=("iterations", "steps"))
def dual_ascent(
    point: Float[Array, "m n"],
    grad: Float[Array, "m n"],
    step: float = 0.01,
    iterations: int = 100,
    steps: int = 10,
) -> Float[Array, "m n"]:
    """Return the direction after 100 dual ascent iterations, each with a ten-step full msign."""

    def ascend(k, dual):
        direction = _msign(grad + 2 * point @ dual, steps)
        residual = point.T @ direction + direction.T @ point
        return dual - step * (1 - k / iterations) * residual

    start = -(point.T @ grad + grad.T @ point) / 4
    dual = jax.lax.fori_loop(0, iterations - 1, ascend, start)
    return _msign(grad + 2 * point @ dual, steps)


@jax.jit
def closed_form_by_qr(point: Float[Array, "m n"], grad: Float[Array, "m n"]) -> Float[Array, "m n"]:
    """Closed form in the 2n x 2n basis of `qr([W G])`, with eight steps of Polar Express.

    Solonko, Molozhavenko and Rakhuba, arXiv:2608.06218.
    """
    basis, factor = jnp.linalg.qr(jnp.concatenate([point, grad], axis=1))
    n = point.shape[1]
    here, there = factor[:, :n], factor[:, n:]  # W and G in the basis
    return basis @ (_msign(_twice_skew(there @ here.T), 8) @ here)


@jax.jit
def closed_form_by_rows(
    point: Float[Array, "m n"], grad: Float[Array, "m n"]
) -> Float[Array, "m n"]:
    """Closed form by five of Muon's steps on the m x m matrix itself."""
    return _msign(_twice_skew(grad @ point.T), 5, MUON) @ point


def _twice_skew(x):
    return x - x.T
