"""Solvers for the steepest direction on the Stiefel manifold, each with a certificate."""

from manifoldmuon.manifolds.solvers._closed_form import OneStep, SkewLift
from manifoldmuon.manifolds.solvers._iterative import (
    ADMM,
    AlternatingProjection,
    DualAscent,
    FixedPoint,
)
from manifoldmuon.manifolds.solvers._resolvents import ClosedForm, Resolvents
from manifoldmuon.manifolds.solvers._solver import MemorylessSolver, Steepest, StiefelSolver

ACCURATE = ClosedForm()
"""The default preset: the closed form, up to the singular values that its functions resolve.

Those below about 3e-3 of the largest are left short, which costs about 1e-3 of the optimum on
ill-conditioned gradients; the gap says how much. By products or by resolvents, see `ClosedForm`."""

FAST = OneStep()
"""The cheap preset: the polar factor of the tangent part, made tangent."""

__all__ = [
    "ACCURATE",
    "ADMM",
    "FAST",
    "AlternatingProjection",
    "ClosedForm",
    "DualAscent",
    "FixedPoint",
    "MemorylessSolver",
    "OneStep",
    "Resolvents",
    "SkewLift",
    "Steepest",
    "StiefelSolver",
]
