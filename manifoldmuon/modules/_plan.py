"""Compiled architectures: a record for every weight, and the rules that make it.

Budgets flow down from the whole to the weights, sharpness flows up from the parts to the whole
(modular norm, arXiv:2405.14813, section 3).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from manifoldmuon._internal.arrays import upcast
from manifoldmuon.manifolds import LaidOut, Manifold


@dataclasses.dataclass(frozen=True, eq=False)
class WeightSpec:
    """One weight of an architecture; a leaf of trees, not a node.

    Attributes:
      space: the manifold that the weight lives on, or a `LaidOut`.
      ndim: how many trailing axes make one weight; the axes of `budget` come before them.
      mass: its mass, all copies together.
      budget: the target norm; one number for each copy.
      path: where the weight is in a model that is built elsewhere; None in one built here.
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
        """A JAX or NumPy array of the weight, in the manifold's own layout."""
        return self.space.layout.inward(value) if isinstance(self.space, LaidOut) else value

    def plain_budget(self) -> float | np.ndarray:
        """One number where all copies agree, else an array that broadcasts against the weight."""
        first = float(self.budget.flat[0])
        # Sensitivities such as 1 - 1/6 + 1/6 are 1 but for rounding in float64.
        if np.allclose(self.budget, first, rtol=1e-9, atol=0):
            return first
        return self.budget.reshape(self.budget.shape + (1,) * self.ndim)

    def relative_norm(self, weight: Float[Array, "..."]) -> Float[Array, ""]:
        """The largest norm in units of the budget; frozen copies do not count."""
        norms = self.manifold.norm.norm(upcast(self.inward(weight)))
        # The largest over what the manifold sees as separate points of one weight.
        extra = tuple(range(self.budget.ndim, norms.ndim))
        norms = jnp.max(norms, axis=extra, initial=0) if extra else norms
        moving = self.budget > 0
        share = norms / np.where(moving, self.budget, 1)
        return jnp.max(jnp.where(moving, share, 0), initial=0)


def map_weights(function: Callable[..., Any], specs: Any, *trees: Any) -> Any:
    """`function(spec, ...)` over what `Module.weights` returns and trees of its structure.

    Raises:
      ValueError: a tree has another structure.
    """
    leaves, structure = jax.tree.flatten(specs)
    flat = []
    for tree in trees:
        found = jax.tree.structure(tree)
        if found != structure:
            raise ValueError(
                "expected a tree of the structure that init returns, "
                f"{_outline(structure)}; got {_outline(found)}"
            )
        flat.append(jax.tree.leaves(tree))
    mapped = [function(*pieces) for pieces in zip(leaves, *flat, strict=True)]
    return jax.tree.unflatten(structure, mapped)


def _outline(structure: Any) -> str:
    return str(structure).removeprefix("PyTreeDef(").removesuffix(")")


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
    """

    alpha: float
    beta: float
    gamma: float


LINEAR = Sharpness(0.0, 0.0, 0.0)


class Share(NamedTuple):
    """Inputs of the rules for one part: its share of the mass, and its attributes."""

    share: float
    sensitivity: float
    sharpness: Sharpness


def composed(first: Share, second: Share) -> Sharpness:
    """Sharpness of `second` after `first` (proposition 8 of the paper).

    Where `second` does not look at its input (sensitivity zero), nothing of `first` reaches the
    output, and the terms that divide by the sensitivity are zero instead.
    """
    p1, mu1, (a1, b1, g1) = first
    p2, mu2, (a2, b2, g2) = second
    ratio = p1 / mu2 if mu2 > 0 else 0.0
    reaches = p1 if mu2 > 0 else 0.0
    return Sharpness(
        p1 * ratio * a1 + p2 * p2 * a2 + 2 * ratio * p2 * b2 + ratio * ratio * g2,
        reaches * b1 + mu1 * (p2 * b2 + ratio * g2),
        mu2 * g1 + mu1 * mu1 * g2,
    )


def concatenated(parts: list[Share]) -> Sharpness:
    """Sharpness of parts that read the same input side by side (proposition 9)."""
    return Sharpness(
        sum(part.share**2 * part.sharpness.alpha for part in parts),
        sum(part.share * part.sharpness.beta for part in parts),
        sum(part.sharpness.gamma for part in parts),
    )


Parts = Sequence[Any]
"""Modules: each has `mass`, `sensitivity`, `sharpness` and `plan(target)`."""


def plan_in_sequence(parts: Parts, target: np.ndarray) -> tuple[Any, ...]:
    """Each part gets its share of the target, over the sensitivity of all that comes after it."""
    mass = _total_mass(parts)
    plans, after = [], target
    for part in reversed(parts):
        plans.append(part.plan(_given(after, part.mass, mass)))
        after = _before(after, part.sensitivity)
    return tuple(reversed(plans))


def plan_side_by_side(parts: Parts, target: np.ndarray) -> tuple[Any, ...]:
    """Each part gets its share of the target."""
    mass = _total_mass(parts)
    return tuple(part.plan(_given(target, part.mass, mass)) for part in parts)


def plan_copies(module: Any, copies: int, target: np.ndarray) -> Any:
    """`plan_in_sequence` of equal modules: a budget for each copy, in a new last axis."""
    behind = np.arange(copies)[::-1]  # how many copies come after each
    targets = _before(target[..., None], module.sensitivity**behind)
    inner = module.plan(targets / copies)
    return jax.tree.map(lambda spec: dataclasses.replace(spec, mass=copies * spec.mass), inner)


def sharpness_in_sequence(parts: Parts) -> Sharpness:
    """From the first part to the last, two at a time."""
    return _fold((part.mass, part.sensitivity, part.sharpness) for part in parts)


def sharpness_of_copies(module: Any, copies: int) -> Sharpness:
    """`sharpness_in_sequence` of equal modules."""
    return _fold([(module.mass, module.sensitivity, module.sharpness)] * copies)


def sharpness_side_by_side(parts: Parts) -> Sharpness:
    """All parts at once."""
    mass = _total_mass(parts)
    return concatenated(
        [Share(_share(part.mass, mass), part.sensitivity, part.sharpness) for part in parts]
    )


def _fold(attributes: Iterable[tuple[float, float, Sharpness]]) -> Sharpness:
    mass, sensitivity, sharpness = 0.0, 1.0, LINEAR
    for m, mu, sharp in attributes:
        whole = mass + m
        before = Share(_share(mass, whole), sensitivity, sharpness)
        sharpness = composed(before, Share(_share(m, whole), mu, sharp))
        mass, sensitivity = whole, sensitivity * mu
    return sharpness


def _total_mass(parts: Parts) -> float:
    return float(sum(part.mass for part in parts))


def _share(part: float, whole: float) -> float:
    """The part's share; 0 of nothing, so that a mass of zero freezes."""
    return part / whole if whole > 0 else 0.0


def _given(target: np.ndarray, part: float, whole: float) -> np.ndarray:
    """The part's share of the target; an array also without axes, where NumPy makes a scalar."""
    return np.asarray(target * _share(part, whole))


def _before(target: np.ndarray, sensitivity: Any) -> np.ndarray:
    """The target norm of what comes before something of this sensitivity.

    What never reaches the output has no bound on its size, and no reason to move: zero.
    """
    reaches = np.asarray(sensitivity, float) > 0
    return np.where(reaches, target / np.where(reaches, sensitivity, 1), 0.0)
