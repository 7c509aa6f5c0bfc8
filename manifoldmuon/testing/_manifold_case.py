"""A manifold with arrays to ask it about, and everything that it answers."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import numpy as np
from jaxtyping import Array

from manifoldmuon.manifolds import Manifold
from manifoldmuon.testing._assertions import inner_products, numpy

# A JAX array while it is traced, a NumPy array or (NumPy's name for a sum) scalar afterwards.
Numbers = Any


class Answers(NamedTuple):
    """Everything that a manifold says about a point, a gradient and a vector."""

    projected: Numbers
    size: Numbers
    tangent: Numbers
    direction: Numbers
    direction_size: Numbers
    dual: chex.ArrayTree
    residual: Numbers
    gap: Numbers
    moved: Numbers
    distance: Numbers


@dataclasses.dataclass(frozen=True)
class Case:
    """A manifold with one point and three random arrays of its shape."""

    manifold: Manifold
    shape: tuple[int, ...]
    point: np.ndarray
    grad: np.ndarray
    vector: np.ndarray
    other: np.ndarray
    tolerance: float
    gap: float
    overshoot: float
    ask: Callable[..., Answers]

    def project(self, array: Numbers) -> np.ndarray:
        return self.ask(self.point, self.grad, array).projected

    def tangent(self, point: Numbers, vector: Numbers) -> np.ndarray:
        return self.ask(point, self.grad, vector).tangent

    def retract(self, point: Numbers, vector: Numbers) -> np.ndarray:
        return self.ask(point, self.grad, vector).moved

    def norm(self, vector: Numbers) -> np.ndarray:
        return self.ask(self.point, self.grad, vector).size

    def distance(self, point: Numbers) -> np.ndarray:
        return self.ask(point, self.grad, self.vector).distance

    def inner(self, x, y) -> np.ndarray:
        """`<x, y>` over the whole array, in float64."""
        return inner_products(x, y, len(self.shape))


def jitted(function: Callable) -> Callable:
    """Compiled, with NumPy arrays as results."""
    compiled = jax.jit(function)
    return lambda *arrays: numpy(compiled(*arrays))


def ask_manifold(manifold: Manifold, point: Array, grad: Array, vector: Array) -> Answers:
    answer = manifold.steepest(point, grad, manifold.init_dual(point.shape))
    # One compilation answers every question: a check asks with the arrays that it wants.
    return Answers(
        projected=manifold.project(vector),
        size=manifold.norm(vector),
        tangent=manifold.tangent(point, vector),
        direction=answer.direction,
        direction_size=manifold.norm(answer.direction),
        dual=answer.dual,
        residual=answer.residual,
        gap=answer.gap,
        moved=manifold.retract(point, vector),
        distance=manifold.distance(point),
    )
