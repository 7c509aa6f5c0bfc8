"""What a retraction does to a point: its order, its drift, the length of its steps, its price."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from manifoldmuon.lab._spaces import SPACES
from manifoldmuon.lab._timing import interleaved
from manifoldmuon.linalg import product
from manifoldmuon.manifolds import Manifold

# Halving from 2**-3 to 2**-7: small enough for the leading term, far above float64's rounding.
TIMES = tuple(2.0**-k for k in range(3, 8))


def order(space: str, retraction: str, seed: int) -> dict[str, Any]:
    """How the distance from the geodesic grows with the step: in float64, for a random tangent.

    Returns:
      `times`, `errors` (both relative to a unit direction), and `slope`, the exponent of the
      errors, None where there are none.
    """
    here = SPACES[space]
    compare, exact = (
        here.build(here.retractions[name], here.shape) for name in (retraction, here.exact)
    )
    with jax.enable_x64(True):
        key = jax.random.key(seed)
        moved = jax.jit(functools.partial(_moves, (compare, exact), shape=here.shape))(key)
        errors = here.norm(np.asarray(moved[0] - moved[1]))
    fitted = np.polyfit(np.log(TIMES), np.log(errors), 1)[0] if errors.min() > 1e-12 else None
    return {"times": TIMES, "errors": errors, "slope": fitted}


def _moves(manifolds: Sequence[Manifold], key: Any, shape: tuple[int, int]) -> list[Any]:
    """The ends of steps of all lengths along one random direction of norm 1, in float64."""
    point_key, key = jax.random.split(key)
    first = manifolds[0]
    point = first.random_point(point_key, shape, jnp.float64)
    vector = first.tangent(point, jax.random.normal(key, shape, jnp.float64))
    vector = jnp.array(TIMES)[:, None, None] * (vector / first.norm(vector))
    points = jnp.broadcast_to(point, vector.shape)
    return [manifold.retract(points, vector) for manifold in manifolds]


def walk(
    space: str, retraction: str, dtype: str, rates: Sequence[float], steps: int, seed: int
) -> dict[str, Any]:
    """A random walk for each rate, along steepest directions of fresh Gaussian gradients.

    Points are kept in the dtype, the arithmetic is in float32 or wider.

    Returns:
      `at`, the steps after which there are numbers; for each rate `distances`, the distance from
      the set after these steps, and `effective`, the length of the first step over the rate.
    """
    here = SPACES[space]
    manifold = here.build(here.retractions[retraction], here.shape)
    point_key, key = jax.random.split(jax.random.key(seed))
    points = manifold.random_point(point_key, (len(rates), *here.shape), jnp.dtype(dtype))
    at = [10**k for k in range(len(str(steps)))]
    at += [steps] * (at[-1] != steps)
    advance, done, first, distances = _advance(manifold), 0, None, []
    for stop in at:
        moved = advance(points, jnp.array(rates, jnp.float32), key, done, stop)
        if first is None:
            change = np.asarray(moved, np.float64) - np.asarray(points, np.float64)
            first = here.norm(change) / np.asarray(rates)
        points, done = moved, stop
        distances.append(here.distance(np.asarray(points, np.float64)))
    return {"at": at, "distances": np.stack(distances, axis=1), "effective": first}


@functools.lru_cache(maxsize=1)
def _advance(manifold: Manifold) -> Any:
    """The walk from one step to another; compiled once for all seeds and lengths."""

    @jax.jit
    def advance(points, rates, key, start, stop):
        def step(k, points):
            grad = jax.random.normal(jax.random.fold_in(key, k), points.shape)
            wide = points.astype(jnp.float32)
            direction = manifold.steepest(wide, grad, manifold.init_dual(points.shape)).direction
            return manifold.retract(points, rates[:, None, None] * direction).astype(points.dtype)

        return jax.lax.fori_loop(start, stop, step, points)

    return advance


def cost(space: str, retraction: str, seed: int, rounds: int = 25) -> dict[str, Any]:
    """The time of a retraction, and of the direction before it, in products of this size.

    Returns:
      `cost` and `direction_cost`: the least times of one run, divided by that of an `(m, n)`
      matrix times an `(n, n)` matrix, float32.
    """
    here = SPACES[space]
    manifold = here.build(here.retractions[retraction], here.large)
    keys = jax.random.split(jax.random.key(seed), 3)
    point = manifold.random_point(keys[0], here.large, jnp.float32)
    grad = jax.random.normal(keys[1], here.large)
    square = jax.random.normal(keys[2], (here.large[1], here.large[1]))
    dual = manifold.init_dual(here.large)
    steepest = jax.jit(lambda p, g: manifold.steepest(p, g, dual).direction)
    retract, multiply = jax.jit(manifold.retract), jax.jit(product)
    step = -0.1 * steepest(point, grad)
    seconds = interleaved(
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
