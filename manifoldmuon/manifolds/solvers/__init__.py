"""Solvers for steepest directions, with duality gaps: on Stiefel, and on any set."""

from manifoldmuon.manifolds.solvers._barzilai_borwein import BarzilaiBorwein
from manifoldmuon.manifolds.solvers._closed_form import ClosedForm, SkewPolar
from manifoldmuon.manifolds.solvers._douglas_rachford import DouglasRachford
from manifoldmuon.manifolds.solvers._dual_ascent import DualAscent
from manifoldmuon.manifolds.solvers._line_multiplier import LineMultiplier
from manifoldmuon.manifolds.solvers._projected_polar import ProjectedPolar
from manifoldmuon.manifolds.solvers._projection import euclidean_direction, projected_direction
from manifoldmuon.manifolds.solvers._resolvents import Resolvents
from manifoldmuon.manifolds.solvers._solver import Normal, Solver, Steepest, StiefelSolver

__all__ = [
    "BarzilaiBorwein",
    "ClosedForm",
    "DouglasRachford",
    "DualAscent",
    "LineMultiplier",
    "Normal",
    "ProjectedPolar",
    "Resolvents",
    "SkewPolar",
    "Solver",
    "Steepest",
    "StiefelSolver",
    "euclidean_direction",
    "projected_direction",
]
