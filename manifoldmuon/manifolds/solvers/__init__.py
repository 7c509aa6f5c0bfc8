"""Solvers for steepest directions, each with a certificate: on Stiefel, and on any set."""

from jax.lax import Precision

from manifoldmuon.linalg import NewtonSchulz
from manifoldmuon.manifolds.solvers._barzilai_borwein import BarzilaiBorwein, SpaceDual
from manifoldmuon.manifolds.solvers._bracket import LineDual, LineMultiplier
from manifoldmuon.manifolds.solvers._closed_form import (
    ROUNDED_SCHEDULE,
    ROUNDED_SIGN_SCHEDULE,
    ProjectedPolar,
    SkewPolar,
)
from manifoldmuon.manifolds.solvers._douglas_rachford import DouglasRachford
from manifoldmuon.manifolds.solvers._dual_ascent import DualAscent
from manifoldmuon.manifolds.solvers._resolvents import ClosedForm, Resolvents
from manifoldmuon.manifolds.solvers._solver import (
    ByPlatform,
    MemorylessSolver,
    Steepest,
    StiefelSolver,
)

ACCURATE = ByPlatform(
    cpu=ClosedForm(),
    accelerator=SkewPolar(
        NewtonSchulz(ROUNDED_SIGN_SCHEDULE, precision=Precision.DEFAULT),
        ROUNDED_SCHEDULE,
        Precision.DEFAULT,
    ),
)
"""The default preset: the closed form, up to the singular values that its functions resolve.

On CPUs, in float32, those below about 3e-3 of the largest are left short, which costs about 1e-3 of
the optimum on ill-conditioned gradients; the gap says how much. On accelerators products take one
pass of bfloat16, which costs up to 1e-2; `SkewPolar()` is the closed form in float32 there."""

FAST = ByPlatform(
    cpu=ProjectedPolar(), accelerator=ProjectedPolar(ROUNDED_SCHEDULE, Precision.DEFAULT)
)
"""The cheap preset: the polar factor of the tangent part, made tangent.

On accelerators products take one pass of bfloat16; `ProjectedPolar()` takes float32 there, too."""

__all__ = [
    "ACCURATE",
    "FAST",
    "BarzilaiBorwein",
    "LineMultiplier",
    "ByPlatform",
    "ClosedForm",
    "DouglasRachford",
    "DualAscent",
    "LineDual",
    "MemorylessSolver",
    "ProjectedPolar",
    "Resolvents",
    "SkewPolar",
    "SpaceDual",
    "Steepest",
    "StiefelSolver",
]
