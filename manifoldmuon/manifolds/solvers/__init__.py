"""Solvers for the steepest direction on the Stiefel manifold, each with a certificate."""

from manifoldmuon.manifolds.solvers._admm import ADMM
from manifoldmuon.manifolds.solvers._alternating import AlternatingProjection
from manifoldmuon.manifolds.solvers._dual_ascent import DualAscent
from manifoldmuon.manifolds.solvers._fixed_point import FixedPoint
from manifoldmuon.manifolds.solvers._one_step import OneStep
from manifoldmuon.manifolds.solvers._skew_lift import SkewLift
from manifoldmuon.manifolds.solvers._solver import StiefelSolver

ACCURATE = SkewLift()
"""The default preset: the closed form, to within what float32 resolves."""

FAST = OneStep()
"""The cheap preset: the matrix sign of the tangent part, made tangent."""

__all__ = [
    "ACCURATE",
    "ADMM",
    "FAST",
    "AlternatingProjection",
    "DualAscent",
    "FixedPoint",
    "OneStep",
    "SkewLift",
    "StiefelSolver",
]
