"""Functions of matrices: msign and its methods, schedules and their designer, power iteration.

What the layers above share is public here as well: parts of matrices, products that accelerators do
not round, and powers of two that keep squares in range.
"""

from manifoldmuon.linalg._clip import above, clip_singular_values, positive_part
from manifoldmuon.linalg._decompositions import QDWH, SVD, GramEigh, Sketch
from manifoldmuon.linalg._inverse_roots import (
    DEFAULT_INVERSE_SQRT,
    InverseRoot,
    inverse_root,
    inverse_sqrt,
)
from manifoldmuon.linalg._lapack import one_by_one
from manifoldmuon.linalg._matrix import (
    check_precision,
    combine,
    frobenius_norm,
    identity_like,
    inner_product,
    inside_shard_map,
    mT,
    normalize,
    one_for_zero,
    over,
    overlap,
    prescale,
    product,
    rounding,
    skew,
    sym,
    tall,
    times_power_of_two,
    trailing,
    turned_like,
    upcast,
    varying_alike,
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
    DEFAULT_MSIGN,
    TRAINING_MSIGN,
    msign,
    polar_derivative,
    solve_lyapunov,
)
from manifoldmuon.linalg._newton_schulz import MsignMethod, NewtonSchulz, check_method
from manifoldmuon.linalg._polar_express import PolarExpress
from manifoldmuon.linalg._polynomials import factor_products
from manifoldmuon.linalg._rational import check_poles, inverse, zolotarev
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
from manifoldmuon.linalg._sums import center, nearest_with_sums, sinkhorn

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
    "TRAINING_MSIGN",
    "FixedSchedule",
    "GramEigh",
    "InverseRoot",
    "MsignMethod",
    "NewtonSchulz",
    "PolarExpress",
    "Schedule",
    "Sketch",
    "above",
    "center",
    "check_method",
    "check_poles",
    "check_precision",
    "check_schedule",
    "clip_singular_values",
    "combine",
    "factor_products",
    "frobenius_norm",
    "identity_like",
    "inner_product",
    "inside_shard_map",
    "inverse",
    "inverse_root",
    "inverse_sqrt",
    "largest_eigenpair",
    "mT",
    "msign",
    "nearest_with_sums",
    "normalize",
    "nuclear_norm",
    "nuclear_parts",
    "one_by_one",
    "one_for_zero",
    "over",
    "overlap",
    "polar_derivative",
    "positive_part",
    "power_iteration",
    "prescale",
    "product",
    "rounding",
    "sinkhorn",
    "skew",
    "solve_lyapunov",
    "spectral_bound",
    "spectral_norm",
    "sym",
    "tall",
    "times_power_of_two",
    "trailing",
    "turned_like",
    "upcast",
    "varying_alike",
    "zolotarev",
]
