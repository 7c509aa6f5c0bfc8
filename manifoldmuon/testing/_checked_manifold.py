"""A manifold under test: a point, three random arrays, and the manifold's answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from manifoldmuon.manifolds import Manifold
from manifoldmuon.manifolds.solvers import Steepest
from manifoldmuon.testing._assertions import agree, inner_products, numpy, require

# A JAX array while it is traced; afterwards a NumPy array or scalar.
Values = Any


class Answers(NamedTuple):
    """All answers of a manifold for a point, a gradient and a vector."""

    projected: Values
    size: Values
    tangent: Values
    direction: Values
    direction_size: Values
    dual: Any
    residual: Values
    gap: Values
    moved: Values
    distance: Values


@dataclasses.dataclass(frozen=True)
class CheckedManifold:
    """A manifold with a point, three random arrays of its shape, and the limits of its laws."""

    manifold: Manifold
    shape: tuple[int, ...]
    key: PRNGKeyArray
    draw: Callable[[PRNGKeyArray], np.ndarray]
    ask: Callable[..., Answers]
    point: np.ndarray
    grad: np.ndarray
    vector: np.ndarray
    other: np.ndarray
    tolerance: float
    gap: float
    on_set: float
    overshoot: float
    convex: bool
    optimum: Callable[[np.ndarray, np.ndarray], float] | None
    nearest: bool

    def project(self, array: Values) -> np.ndarray:
        return self.ask(self.point, self.grad, array).projected

    def project_tangent(self, point: Values, vector: Values) -> np.ndarray:
        return self.ask(point, self.grad, vector).tangent

    def retract(self, point: Values, vector: Values) -> np.ndarray:
        return self.ask(point, self.grad, vector).moved

    def norm(self, vector: Values) -> np.ndarray:
        return self.ask(self.point, self.grad, vector).size

    def distance(self, point: Values) -> np.ndarray:
        return self.ask(point, self.grad, self.vector).distance

    def inner(self, x, y) -> np.ndarray:
        """Return `<x, y>` over the whole array, in float64."""
        return inner_products(x, y, len(self.shape))

    def unit(self, vector: Values) -> np.ndarray:
        """Divide a vector by its norm, or several vectors by their largest norm."""
        return np.asarray(vector / max(max_size(self.norm(vector)), 1e-30))

    def agree(self, law: str, actual, expected, factor: float = 1.0) -> None:
        agree(law, actual, expected, factor * self.tolerance)


def jitted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function, and return its results as NumPy arrays."""
    compiled = jax.jit(function)
    return lambda *arrays: numpy(compiled(*arrays))


def ask_manifold(manifold: Manifold, point: Array, grad: Array, vector: Array) -> Answers:
    answer = manifold.steepest(point, grad, manifold.init_dual(point.shape))
    require("steepest returns a Steepest", isinstance(answer, Steepest), type(answer).__name__)
    # All checks share this compiled function.
    return Answers(
        projected=manifold.project(vector),
        size=manifold.norm.norm(vector),
        tangent=manifold.project_tangent(point, vector),
        direction=answer.direction,
        direction_size=manifold.norm.norm(answer.direction),
        dual=answer.dual,
        residual=answer.residual,
        gap=answer.gap,
        moved=manifold.retract(point, vector),
        distance=manifold.distance(point),
    )


def max_size(size: Values) -> Any:
    """Return the largest size, where an array holds several points."""
    return np.max(size, initial=0)
