"""Norms on weights, their dual norms and their duality maps.

The steepest direction of a loss depends on the norm of steps. Each norm here measures weights,
measures gradients in the dual norm, and returns the unit step that ascends the fastest.
"""

from manifoldmuon._internal.scales import ScaleRule
from manifoldmuon.norms._norm import Norm, PowerIterations
from manifoldmuon.norms._scales import FanRatio, Lipschitz, RootDim, RootRank
from manifoldmuon.norms._spectral import ConvRMSToRMS, RMSToRMS, Spectral
from manifoldmuon.norms._vectors import Frobenius, L1ToRMS, MaxAbs, MaxRowNorm

__all__ = [
    "ConvRMSToRMS",
    "FanRatio",
    "Frobenius",
    "MaxAbs",
    "L1ToRMS",
    "Lipschitz",
    "MaxRowNorm",
    "Norm",
    "PowerIterations",
    "RMSToRMS",
    "RootDim",
    "RootRank",
    "ScaleRule",
    "Spectral",
]
