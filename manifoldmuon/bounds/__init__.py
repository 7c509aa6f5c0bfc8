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
    RMS,
    Heads,
    Kept,
    Largest,
    Length,
    Measure,
    OneHot,
    Size,
    Total,
)
from manifoldmuon.bounds._transfer import Transfer, read
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
    "Size",
    "Measure",
    "RMS",
    "Length",
    "Heads",
    "Largest",
    "Kept",
    "Total",
    "OneHot",
    "rule",
    "reads",
    "read",
    "Transfer",
    "Weight",
    "matrix_bounds",
    "MatrixBounds",
    "ROUNDING",
]

del _bond_rules, _weight_rules
