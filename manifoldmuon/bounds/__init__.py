"""Sound bounds for architectures: on their outputs, on their slopes in inputs and weights.

They follow an architecture module by module, from the sets that its weights live on or from the
weights that it has. They do not rely on declared sensitivities, which describe typical inputs:
every module has a rule that holds for all.
"""

from manifoldmuon.bounds import _bond_rules, _weight_rules  # registers the rules
from manifoldmuon.bounds._network import Bounds, bound, reads, rule
from manifoldmuon.bounds._robustness import (
    CrossEntropy,
    Loss,
    Smoothness,
    SquareError,
    certified_radius,
    smoothness,
)
from manifoldmuon.bounds._sizes import (
    L1,
    L2,
    RMS,
    Heads,
    LInf,
    MaskedLInf,
    Measure,
    NormBound,
    OneHot,
)
from manifoldmuon.bounds._transfer import LipschitzBounds, convert_norm
from manifoldmuon.bounds._weights import ROUNDING, MatrixBounds, Weight, matrix_bounds

__all__ = [
    "bound",
    "Bounds",
    "certified_radius",
    "smoothness",
    "Smoothness",
    "Loss",
    "SquareError",
    "CrossEntropy",
    "NormBound",
    "Measure",
    "RMS",
    "L2",
    "Heads",
    "LInf",
    "MaskedLInf",
    "L1",
    "OneHot",
    "rule",
    "reads",
    "convert_norm",
    "LipschitzBounds",
    "Weight",
    "matrix_bounds",
    "MatrixBounds",
    "ROUNDING",
]

del _bond_rules, _weight_rules
