"""Largest derivatives of functions in their inputs by gradient ascent, and sizes of outputs."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from manifoldmuon.bounds import bound
from manifoldmuon.modules import Module
from tests.modules.measure import random_like, shapes_of
from tests.oracles.bounds import STEPS, inside, norm, starts, to_jax, toward


def random_weights(net: Module) -> Any:
    """Return random weights of norm about 1, off the manifolds."""
    return jax.tree.map(lambda w: w / np.sqrt(max(w.shape)), random_like(shapes_of(net), 3))


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


def check_outputs(cases: dict[str, tuple[Any, Any, Any, Any]]) -> None:
    """Check sizes of outputs; all modules share a program to save compilation.

    Args:
      cases: modules, weights, sizes of the inputs, which are the largest allowed, and shapes.
    """
    found = {name: bound(net, w, input_norm=size) for name, (net, w, size, _) in cases.items()}

    @jax.jit
    def measured(inputs):
        outputs = {name: net.apply(w, inputs[name]) for name, (net, w, _, _) in cases.items()}
        return {name: norm(found[name].outputs, y) for name, y in outputs.items()}

    for kind in range(5):
        inputs = {
            name: to_jax(inside(size, build(size, shapes, kind, kind)))
            for name, (_, _, size, shapes) in cases.items()
        }
        for name, size in measured(inputs).items():
            assert float(size) <= found[name].output_norm * (1 + 1e-5), name
