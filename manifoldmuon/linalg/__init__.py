"""Functions of matrices: msign and its methods, schedules and their designer, power iteration."""

from manifoldmuon.linalg._clip import clip_singular_values, positive_part, spectral_projector
from manifoldmuon.linalg._decompositions import QDWH, SVD, GramEigh, Sketch
from manifoldmuon.linalg._inverse_roots import (
    DEFAULT_INVERSE_SQRT,
    InverseRoot,
    inverse_root,
    inverse_sqrt,
    inverse_sqrt_minus_one,
    largest_row_sum,
)
from manifoldmuon.linalg._matrix_norms import (
    largest_eigenpair,
    nuclear_norm,
    nuclear_parts,
    power_iteration,
    spectral_bound,
    spectral_norm,
)
from manifoldmuon.linalg._msign import (
    BOUNDED_MSIGN,
    DEFAULT_MSIGN,
    TRAINING_MSIGN,
    msign,
    polar_derivative,
    solve_lyapunov,
)
from manifoldmuon.linalg._newton_schulz import MsignMethod, NewtonSchulz, check_method
from manifoldmuon.linalg._polar_express import PolarExpress
from manifoldmuon.linalg._polynomials import factor_products
from manifoldmuon.linalg._rational import inverse, zolotarev
from manifoldmuon.linalg._schedules import (
    CUBIC,
    MODULA_SIX_STEP,
    MUON,
    POLAR_EXPRESS,
    QUINTIC,
    FixedSchedule,
    Schedule,
    check_schedule,
)

__all__ = [
    "CUBIC",
    "DEFAULT_INVERSE_SQRT",
    "DEFAULT_MSIGN",
    "MODULA_SIX_STEP",
    "MUON",
    "POLAR_EXPRESS",
    "QDWH",
    "QUINTIC",
    "SVD",
    "BOUNDED_MSIGN",
    "TRAINING_MSIGN",
    "FixedSchedule",
    "GramEigh",
    "InverseRoot",
    "MsignMethod",
    "NewtonSchulz",
    "PolarExpress",
    "Schedule",
    "Sketch",
    "spectral_projector",
    "check_method",
    "check_schedule",
    "clip_singular_values",
    "factor_products",
    "inverse",
    "inverse_root",
    "inverse_sqrt",
    "inverse_sqrt_minus_one",
    "largest_eigenpair",
    "largest_row_sum",
    "msign",
    "nuclear_norm",
    "nuclear_parts",
    "polar_derivative",
    "positive_part",
    "power_iteration",
    "solve_lyapunov",
    "spectral_bound",
    "spectral_norm",
    "zolotarev",
]
