"""Norms on weights, their dual norms and their duality maps.

The steepest direction of a loss depends on how the size of a step is measured. Each norm here
answers three questions: how large is a weight, how large is a gradient in the dual norm, and
which step of norm one ascends the fastest. Combinations make one norm of those of many layers.
"""

from manifoldmuon.linalg import check_number
from manifoldmuon.norms._combinations import (
    Combination,
    Max,
    RootSumSquares,
    Sum,
    product_dual_norm,
    product_lmo,
    product_norm,
)
from manifoldmuon.norms._norm import (
    FanRatio,
    Norm,
    PowerIterations,
    RootDim,
    RootRank,
    ScaleRule,
    check_scale,
    relative_gap,
    scale_of,
)
from manifoldmuon.norms._spectral import ConvRMSToRMS, RMSToRMS, Spectral
from manifoldmuon.norms._vectors import Frobenius, Infinity, L1ToRMS, LongestRow

__all__ = [
    "Combination",
    "ConvRMSToRMS",
    "FanRatio",
    "Frobenius",
    "Infinity",
    "L1ToRMS",
    "LongestRow",
    "Max",
    "Norm",
    "PowerIterations",
    "RMSToRMS",
    "RootDim",
    "RootRank",
    "RootSumSquares",
    "ScaleRule",
    "Spectral",
    "Sum",
    "check_number",
    "check_scale",
    "product_dual_norm",
    "product_lmo",
    "product_norm",
    "relative_gap",
    "scale_of",
]
