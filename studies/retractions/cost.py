"""The cost of retractions."""

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from manifoldmuon.manifolds import Manifold
from studies.timing import interleaved_seconds


def retraction_cost(
    manifold: Manifold, shape: tuple[int, int], key: PRNGKeyArray, rounds: int = 25
) -> dict[str, float]:
    """Return the cost of a retraction and of a direction, relative to a matrix product.

    The product is `(m, n)` times `(n, n)`, in float32. Measurements are interleaved, and the
    minimum over rounds is used.

    Args:
      manifold: the manifold with the retraction.
      shape: the shape `(m, n)` of the point; large enough for a product to take a millisecond.
      key: the random key of the point and the gradient.
      rounds: the number of measurements.
    """
    keys = jax.random.split(key, 3)
    point = manifold.random_point(keys[0], shape, jnp.float32)
    grad = jax.random.normal(keys[1], shape)
    square = jax.random.normal(keys[2], (shape[1], shape[1]))
    dual = manifold.init_dual(shape)
    steepest = jax.jit(lambda p, g: manifold.steepest(p, g, dual).direction)
    retract = jax.jit(manifold.retract)
    multiply = jax.jit(lambda x, y: jnp.matmul(x, y, precision="highest"))
    step = -0.1 * steepest(point, grad)
    seconds = interleaved_seconds(
        {
            "product": lambda: multiply(point, square),
            "retraction": lambda: retract(point, step),
            "direction": lambda: steepest(point, grad),
        },
        rounds,
        middle=min,
    )
    return {
        "cost": seconds["retraction"] / seconds["product"],
        "direction_cost": seconds["direction"] / seconds["product"],
    }
