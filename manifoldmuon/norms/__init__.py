"""Norms on weights, their dual norms and their duality maps.

The steepest direction of a loss depends on how the size of a step is measured. Each norm here
answers three questions: how large is a weight, how large is a gradient in the dual norm, and
which step of norm one ascends the fastest. Combinations make one norm of those of many layers.
"""

from manifoldmuon.norms._combinations import (
    Combination,
    Max,
    RootSumSquares,
    Sum,
    product_dual_norm,
    product_dualize,
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
from manifoldmuon.norms._vectors import Frobenius, L1ToRMS, MaxAbs, MaxRowNorm

__all__ = [
    "Combination",
    "ConvRMSToRMS",
    "FanRatio",
    "Frobenius",
    "MaxAbs",
    "L1ToRMS",
    "MaxRowNorm",
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
    "check_scale",
    "product_dual_norm",
    "product_dualize",
    "product_norm",
    "relative_gap",
    "scale_of",
]
