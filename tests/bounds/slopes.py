"""Largest derivative of a function in its input, by gradient ascent."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from tests.oracles.bounds import STEPS, inside, norm, starts, to_jax, toward


def build(size: Any, shapes: Any, seed: int, kind: int) -> Any:
    """Draw a start of this kind; for a tuple, one for each part."""
    if isinstance(size, tuple):
        pairs = zip(size, shapes, strict=True)
        return tuple(build(s, shape, seed + i, kind) for i, (s, shape) in enumerate(pairs))
    return starts(seed, shapes)[kind]


def input_slope(function: Callable[[Any], Any], inputs: Any, outputs: Any, shapes: Any) -> float:
    """Return the largest derivative found by ascent over allowed inputs and directions."""
    climb = jax.jit(
        jax.value_and_grad(
            lambda x, dx: norm(outputs, jax.jvp(function, (x,), (dx,))[1]), argnums=(0, 1)
        )
    )
    worst = 0.0
    for kind in range(5):
        x = inside(inputs, build(inputs, shapes, 0, kind))
        dx = toward(inputs, build(inputs, shapes, 5, kind))
        for step in range(STEPS):
            value, (gx, gdx) = climb(to_jax(x), to_jax(dx))
            worst = float(np.maximum(worst, value))  # a NaN stays
            dx, way = toward(inputs, gdx), toward(inputs, gx)
            x = inside(inputs, jax.tree.map(lambda a, b, s=step: a + b / (2 + s), x, way))
    return worst
