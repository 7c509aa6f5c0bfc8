"""Compiled architectures: a record for every weight, and the rules of masses and sharpness.

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

from manifoldmuon._internal.arrays import (
    Floats,
    largest,
    upcast,
)
from manifoldmuon.manifolds import LaidOut, Manifold


@dataclasses.dataclass(frozen=True, eq=False)
class WeightSpec:
    """One weight of an architecture; a leaf of trees, not a node.

    Attributes:
      space: the manifold that the weight lives on, or a `LaidOut`.
      ndim: how many trailing axes make one weight; the axes of `budget` come before them.
      mass: its mass, all copies together.
      budget: the norm that its step gets; one number for each copy.
      path: where the weight is in a model that is built elsewhere; None in one built here.

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
        """The manifold in its own layout."""
        return self.space.manifold if isinstance(self.space, LaidOut) else self.space

    def inward(self, value: Any) -> Any:
        """Return a JAX or NumPy array of the weight in the manifold's own layout."""
        return self.space.layout.inward(value) if isinstance(self.space, LaidOut) else value

    def plain_budget(self) -> float | np.ndarray:
        """Return one number if all copies agree, else an array that broadcasts with the weight."""
        first = float(self.budget.flat[0])
        # Sensitivities such as 1 - 1/6 + 1/6 are 1 up to rounding in float64.
        if np.allclose(self.budget, first, rtol=1e-9, atol=0):
            return first
        return self.budget.reshape(self.budget.shape + (1,) * self.ndim)

    def relative_norm(self, weight: Floats) -> Float[Array, ""]:
        """Return the largest norm in units of the budget; frozen copies do not count."""
        norms = self.manifold.norm.norm(upcast(self.inward(weight)))
        # The largest over what the manifold sees as separate points of one weight.
        extra = tuple(range(self.budget.ndim, norms.ndim))
        norms = largest(norms, extra) if extra else norms
        moving = self.budget > 0
        relative = norms / np.where(moving, self.budget, 1)
        return largest(jnp.where(moving, relative, 0))


class Sharpness(NamedTuple):
    """Bounds on a module's second derivatives (modular norm, arXiv:2405.14813, section 3.4).

    In the modular norm of the weights and the norms of input and output, for every pair of
    perturbations,

    * `||d2f/dw2 [dw, dw']|| <= alpha ||dw|| ||dw'||`,
    * `||d2f/dwdx [dw, dx]|| <= beta ||dw|| ||dx||`,
    * `||d2f/dx2 [dx, dx']|| <= gamma ||dx|| ||dx'||`.

    Attributes:
      alpha: weights with weights.
      beta: weights with inputs.
      gamma: inputs with inputs.

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


def plan_in_sequence(parts: Parts, budget: np.ndarray) -> tuple[Any, ...]:
    """Give each part its mass's part of the budget, over the sensitivity of all that follows it."""
    mass = _total_mass(parts)
    plans = []
    for part in reversed(parts):
        plans.append(part.plan(np.asarray(budget * _fraction(part.mass, mass))))
        budget = _ahead_of(part.sensitivity, budget)
    return tuple(reversed(plans))


def plan_side_by_side(parts: Parts, budget: np.ndarray) -> tuple[Any, ...]:
    """Give each part its mass's part of the budget."""
    mass = _total_mass(parts)
    return tuple(part.plan(np.asarray(budget * _fraction(part.mass, mass))) for part in parts)


def plan_copies(module: Any, copies: int, budget: np.ndarray) -> Any:
    """`plan_in_sequence` of equal modules: a budget for each copy, in a new last axis."""
    following = np.arange(copies)[::-1]
    budgets = _ahead_of(module.sensitivity**following, budget[..., None])
    inner = module.plan(budgets / copies)
    return jax.tree.map(lambda spec: dataclasses.replace(spec, mass=copies * spec.mass), inner)


def sharpness_in_sequence(parts: Iterable[tuple[float, float, Sharpness]]) -> Sharpness:
    """From the mass, sensitivity and sharpness of each part, in order (the paper's proposition 8).

    If a part does not look at its input (sensitivity zero), nothing of those before it reaches the
    output, and the terms that divide by the sensitivity are zero instead.
    """
    mass, sensitivity, (a, b, g) = 0.0, 1.0, LINEAR
    for m, mu, (a2, b2, g2) in parts:
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


def sharpness_side_by_side(parts: Parts) -> Sharpness:
    """Of parts that read the same input (proposition 9)."""
    mass = _total_mass(parts)
    terms = [(_fraction(part.mass, mass), part.sharpness) for part in parts]
    return Sharpness(
        sum(p**2 * sharpness.alpha for p, sharpness in terms),
        sum(p * sharpness.beta for p, sharpness in terms),
        sum(sharpness.gamma for _, sharpness in terms),
    )


def _total_mass(parts: Parts) -> float:
    return float(sum(part.mass for part in parts))


def _fraction(part: float, whole: float) -> float:
    """A part of the mass, 0 of nothing: a mass of zero freezes."""
    return part / whole if whole > 0 else 0.0


def _ahead_of(sensitivity: Any, budget: np.ndarray) -> np.ndarray:
    """The budget of what comes before something of this sensitivity.

    What never reaches the output has no bound on its size, and no reason to move: zero.
    """
    reaches = np.asarray(sensitivity, float) > 0
    return np.where(reaches, budget / np.where(reaches, sensitivity, 1), 0.0)
