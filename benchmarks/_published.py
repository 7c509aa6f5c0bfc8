"""The published dual ascent as a user would run it: the yardstick of the solver benchmark."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# Polar Express for singular values down to 1e-3 (arXiv:2505.16932), then its limit for ever.
_STEPS = (
    (8.28721, -23.59589, 17.30039),
    (4.10706, -2.94785, 0.54484),
    (3.94869, -2.90890, 0.55182),
    (3.31842, -2.48849, 0.51005),
    (2.30065, -1.66890, 0.41881),
    (1.89130, -1.26800, 0.37681),
    (1.87500, -1.25000, 0.37500),
)


def _msign(x: Float[Array, "m n"], steps: int) -> Float[Array, "m n"]:
    x = x / (jnp.linalg.norm(x) * 1.01 + 1e-7)
    identity = jnp.eye(x.shape[1], dtype=x.dtype)
    for a, b, c in (_STEPS + _STEPS[-1:] * steps)[:steps]:
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
