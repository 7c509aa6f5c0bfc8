"""The published dual ascent as a user would run it: the yardstick of the solver benchmark."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon.linalg import POLAR_EXPRESS


def _msign(x: Float[Array, "m n"], steps: int) -> Float[Array, "m n"]:
    x = x / (jnp.linalg.norm(x) + 1e-7)
    identity = jnp.eye(x.shape[1], dtype=x.dtype)
    for a, b, c in POLAR_EXPRESS.with_steps(steps).coefficients:
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
    """100 iterations of dual ascent, each with a ten-step msign of the full matrix."""

    def ascend(k, dual):
        direction = _msign(grad + 2 * point @ dual, steps)
        residual = point.T @ direction + direction.T @ point
        return dual - step * (1 - k / iterations) * residual

    start = -(point.T @ grad + grad.T @ point) / 4
    dual = jax.lax.fori_loop(0, iterations - 1, ascend, start)
    return _msign(grad + 2 * point @ dual, steps)
