"""Sound bounds for architectures: on their outputs, on their slopes in inputs and weights.

They follow an architecture module by module, from the sets that its weights live on or from the
weights that it has. They do not rely on declared sensitivities, which describe typical inputs:
every module has a rule that holds for all.
"""

from manifoldmuon.bounds import _rules  # registers the rules
from manifoldmuon.bounds._lipschitz_bounds import LipschitzBounds
from manifoldmuon.bounds._network import Bounds, bound, reads, rule
from manifoldmuon.bounds._norm_bounds import L1, L2, RMS, LInf, NormBound
from manifoldmuon.bounds._weights import MatrixBounds, matrix_bounds

__all__ = [
    "bound",
    "Bounds",
    "NormBound",
    "RMS",
    "L2",
    "LInf",
    "L1",
    "rule",
    "reads",
    "LipschitzBounds",
    "matrix_bounds",
    "MatrixBounds",
]

del _rules
