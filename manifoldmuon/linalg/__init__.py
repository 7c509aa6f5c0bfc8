"""Functions of matrices: msign and its methods, schedules and their designer, power iteration."""

from manifoldmuon.linalg._clip import clip_singular_values, positive_part, spectral_projector
from manifoldmuon.linalg._inverse_sqrt import inverse_sqrt
from manifoldmuon.linalg._matrix_norms import nuclear_norm, power_iteration, spectral_norm
from manifoldmuon.linalg._msign import BOUNDED_MSIGN, DEFAULT_MSIGN, TRAINING_MSIGN, msign
from manifoldmuon.linalg._newton_schulz import (
    GramNewtonSchulz,
    MsignMethod,
    NewtonSchulz,
    SkewNewtonSchulz,
)
from manifoldmuon.linalg._polar_express import PolarExpress
from manifoldmuon.linalg._schedules import (
    CUBIC,
    MODULA_SIX_STEP,
    MUON,
    POLAR_EXPRESS,
    QUINTIC,
    FixedSchedule,
    Schedule,
)
from manifoldmuon.linalg._svd import SVD

__all__ = [
    "BOUNDED_MSIGN",
    "CUBIC",
    "DEFAULT_MSIGN",
    "MODULA_SIX_STEP",
    "MUON",
    "POLAR_EXPRESS",
    "QUINTIC",
    "SVD",
    "TRAINING_MSIGN",
    "FixedSchedule",
    "GramNewtonSchulz",
    "MsignMethod",
    "NewtonSchulz",
    "PolarExpress",
    "Schedule",
    "SkewNewtonSchulz",
    "clip_singular_values",
    "inverse_sqrt",
    "msign",
    "nuclear_norm",
    "positive_part",
    "power_iteration",
    "spectral_norm",
    "spectral_projector",
]
