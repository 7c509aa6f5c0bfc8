"""Compiled architectures: a record for every weight, and the rules of budgets and sharpness.

Budgets flow down from the whole to the weights, sharpness flows up from the parts to the whole
(modular norm, arXiv:2405.14813, section 3).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from manifoldmuon._internal.matrices.arrays import Floats, largest, upcast
from manifoldmuon.manifolds import LaidOut, Manifold


@dataclasses.dataclass(frozen=True, eq=False)
class WeightSpec:
    """Record of a weight of an architecture; a leaf of trees, not a node.

    Attributes:
      space: the weight's manifold, or a `LaidOut`.
      ndim: trailing axes of a weight; the axes of `budget` come before them.
      mass: the weight's mass, summed over copies.
      budget: norm of the weight's step, a number for each copy.
      path: the weight's path in a model of another library; None for modules of this package.

    Examples:
      >>> [float(weight.budget) for weight in (Linear(10, 20) @ Linear(20, 30)).weights()]
      [0.5, 0.5]
    """

    space: Manifold | LaidOut
    ndim: int
    mass: float
    budget: np.ndarray
    path: str | None = None

    @property
    def manifold(self) -> Manifold:
        """The manifold without a layout."""
        return self.space.manifold if isinstance(self.space, LaidOut) else self.space

    def entry(self) -> Manifold | LaidOut:
        """Return the weight's entry in a geometry, which declares its copies."""
        return self.space.stacked(self.budget.ndim + self.ndim - self.space.ndim)

    def inward(self, value: Any) -> Any:
        """Return a weight, a JAX or NumPy array, in the manifold's own layout."""
        return self.space.layout.inward(value) if isinstance(self.space, LaidOut) else value

    def plain_budget(self) -> float | np.ndarray:
        """Return a number if all copies agree, else an array that broadcasts with the weight."""
        first = float(self.budget.flat[0])
        # Sensitivities such as 1 - 1/6 + 1/6 are 1 up to rounding in float64.
        if np.allclose(self.budget, first, rtol=1e-9, atol=0):
            return first
        return self.budget.reshape(self.budget.shape + (1,) * self.ndim)

    def relative_norm(self, weight: Floats) -> Float[Array, ""]:
        """Return the largest norm in units of the budget, without frozen copies."""
        norms = self.manifold.norm.norm(upcast(self.inward(weight)))
        # A weight may be several points of the manifold: take the largest norm.
        extra = tuple(range(self.budget.ndim, norms.ndim))
        norms = largest(norms, extra) if extra else norms
        moving = self.budget > 0
        relative = norms / np.where(moving, self.budget, 1)
        return largest(jnp.where(moving, relative, 0))


class Sharpness(NamedTuple):
    """Bounds on a module's second derivatives (modular norm, arXiv:2405.14813, section 3.4).

    In the modular norm of the weights and the norms of input and output, for every pair of
    perturbations:

    Attributes:
      alpha: `||d2f/dw2 [dw, dw']|| <= alpha ||dw|| ||dw'||`.
      beta: `||d2f/dwdx [dw, dx]|| <= beta ||dw|| ||dx||`.
      gamma: `||d2f/dx2 [dx, dx']|| <= gamma ||dx|| ||dx'||`.

    Examples:
      >>> (Linear(4, 8) @ Linear(8, 4)).sharpness
      Sharpness(alpha=0.5, beta=1.0, gamma=0.0)
    """

    alpha: float
    beta: float
    gamma: float


LINEAR = Sharpness(0.0, 0.0, 0.0)

Parts = Sequence[Any]
"""Modules: each has `mass`, `sensitivity`, `sharpness` and `plan(budget)`."""


def plan_in_sequence(children: Parts, budget: np.ndarray) -> tuple[Any, ...]:
    """Divide the budget by mass, and each part's budget by the sensitivity of all later parts."""
    mass, plans = _total_mass(children), []
    for child in reversed(children):
        plans.append(child.plan(np.asarray(budget * _fraction(child.mass, mass))))
        budget = _ahead_of(child.sensitivity, budget)
    return tuple(reversed(plans))


def plan_side_by_side(children: Parts, budget: np.ndarray) -> tuple[Any, ...]:
    """Divide the budget by mass."""
    mass = _total_mass(children)
    return tuple(child.plan(np.asarray(budget * _fraction(child.mass, mass))) for child in children)


def plan_copies(module: Any, copies: int, budget: np.ndarray) -> Any:
    """Return `plan_in_sequence` of equal modules, with the copies' budgets in a new last axis."""
    following = np.arange(copies)[::-1]
    budgets = _ahead_of(module.sensitivity**following, budget[..., None])
    inner = module.plan(budgets / copies)
    return jax.tree.map(lambda spec: dataclasses.replace(spec, mass=copies * spec.mass), inner)


def sharpness_in_sequence(children: Iterable[tuple[float, float, Sharpness]]) -> Sharpness:
    """Compute the sharpness of a composition (the paper's proposition 8).

    A part of sensitivity 0 ignores its input: earlier parts do not reach the output, and the terms
    divided by the sensitivity are 0. `children` has each part's mass, sensitivity and sharpness.
    """
    mass, sensitivity, (a, b, g) = 0.0, 1.0, LINEAR
    for m, mu, (a2, b2, g2) in children:
        whole = mass + m
        p1, p2 = _fraction(mass, whole), _fraction(m, whole)
        reaches = p1 if mu > 0 else 0.0
        ratio = reaches / mu if mu > 0 else 0.0
        a, b, g = (
            p1 * ratio * a + p2 * p2 * a2 + 2 * ratio * p2 * b2 + ratio * ratio * g2,
            reaches * b + sensitivity * (p2 * b2 + ratio * g2),
            mu * g + sensitivity * sensitivity * g2,
        )
        mass, sensitivity = whole, sensitivity * mu
    return Sharpness(a, b, g)


def sharpness_side_by_side(children: Parts) -> Sharpness:
    """Compute the sharpness of parts that read the same input (the paper's proposition 9)."""
    mass = _total_mass(children)
    terms = [(_fraction(child.mass, mass), child.sharpness) for child in children]
    return Sharpness(
        sum(p**2 * sharpness.alpha for p, sharpness in terms),
        sum(p * sharpness.beta for p, sharpness in terms),
        sum(sharpness.gamma for _, sharpness in terms),
    )


def _total_mass(children: Parts) -> float:
    return float(sum(child.mass for child in children))


def _fraction(part: float, whole: float) -> float:
    """Return `part / whole`, or 0 if the whole is 0: a mass of 0 freezes."""
    return part / whole if whole > 0 else 0.0


def _ahead_of(sensitivity: Any, budget: np.ndarray) -> np.ndarray:
    """Return the budget of the parts before a part of this sensitivity: 0 if it ignores them."""
    reaches = np.asarray(sensitivity, float) > 0
    return np.where(reaches, budget / np.where(reaches, sensitivity, 1), 0.0)
