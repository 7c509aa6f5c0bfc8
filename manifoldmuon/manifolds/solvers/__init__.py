"""Solvers for the steepest direction on the Stiefel manifold, each with a certificate."""

from manifoldmuon.manifolds.solvers._closed_form import OneStep, SkewLift
from manifoldmuon.manifolds.solvers._iterative import (
    ADMM,
    AlternatingProjection,
    DualAscent,
    FixedPoint,
)
from manifoldmuon.manifolds.solvers._solver import MemorylessSolver, Steepest, StiefelSolver

ACCURATE = SkewLift()
"""The default preset: the closed form, up to the singular values that its schedule resolves.

Those below about 2e-3 of the largest are left short, which costs up to 6e-4 of the optimum on
ill-conditioned gradients; the gap says how much."""

FAST = OneStep()
"""The cheap preset: the polar factor of the tangent part, made tangent."""

__all__ = [
    "ACCURATE",
    "ADMM",
    "FAST",
    "AlternatingProjection",
    "DualAscent",
    "FixedPoint",
    "MemorylessSolver",
    "OneStep",
    "SkewLift",
    "Steepest",
    "StiefelSolver",
]
