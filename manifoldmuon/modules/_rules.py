"""The combination rules: budgets flow down, sharpness flows up (arXiv:2405.14813, section 3)."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from manifoldmuon.modules._interface import ModuleInterface
from manifoldmuon.modules._sharpness import LINEAR, Share, Sharpness, composed, concatenated

Parts = Sequence[ModuleInterface]


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


def plan_copies(module: ModuleInterface, copies: int, target: np.ndarray) -> Any:
    """`plan_in_sequence` of equal modules: a budget for each copy, in a new last axis."""
    behind = np.arange(copies)[::-1]  # how many copies come after each
    targets = _before(target[..., None], module.sensitivity**behind)
    inner = module.plan(targets / copies)
    return jax.tree.map(lambda leaf: dataclasses.replace(leaf, mass=copies * leaf.mass), inner)


def sharpness_in_sequence(parts: Parts) -> Sharpness:
    """From the first part to the last, two at a time."""
    return _fold((part.mass, part.sensitivity, part.sharpness) for part in parts)


def sharpness_of_copies(module: ModuleInterface, copies: int) -> Sharpness:
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
