"""Norms on weights, their dual norms and their duality maps.

The steepest direction of a loss depends on how the size of a step is measured. Each norm here
answers three questions: how large is a weight, how large is a gradient in the dual norm, and
which step of norm one ascends the fastest.
"""

from manifoldmuon.norms._conv import ConvRMSToRMS
from manifoldmuon.norms._frobenius import Frobenius
from manifoldmuon.norms._infinity import Infinity
from manifoldmuon.norms._norm import Effort, Norm
from manifoldmuon.norms._product import product_dual_norm, product_lmo, product_norm
from manifoldmuon.norms._rows import L1ToRMS
from manifoldmuon.norms._spectral import RMSToRMS, Spectral

__all__ = [
    "ConvRMSToRMS",
    "Effort",
    "Frobenius",
    "Infinity",
    "L1ToRMS",
    "Norm",
    "RMSToRMS",
    "Spectral",
    "product_dual_norm",
    "product_lmo",
    "product_norm",
]
