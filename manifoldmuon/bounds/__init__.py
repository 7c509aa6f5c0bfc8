"""Sound bounds on an architecture's output and on its slopes in inputs and weights.

Bounds are propagated module by module, from the manifolds of the weights or from their values.
Declared sensitivities describe typical inputs and are ignored: every module has a rule that holds
for all inputs.
"""

from manifoldmuon.bounds import _rules  # registers the rules
from manifoldmuon.bounds._lipschitz_bounds import LipschitzBounds
from manifoldmuon.bounds._network import NetworkBounds, bound, propagate
from manifoldmuon.bounds._norm_bounds import L2, RMS, LInf, NormBound, OneHot
from manifoldmuon.bounds._weights import MatrixBounds, matrix_bounds

__all__ = [
    "bound",
    "NetworkBounds",
    "NormBound",
    "RMS",
    "L2",
    "LInf",
    "OneHot",
    "propagate",
    "LipschitzBounds",
    "matrix_bounds",
    "MatrixBounds",
]

del _rules
