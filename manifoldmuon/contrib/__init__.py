"""What is new, rarely needed or not yet proved useful: same laws and tests, no promise to stay."""

from manifoldmuon.contrib._doubly_stochastic import (
    DoublyStochastic,
    Nearest,
    Sinkhorn,
)
from manifoldmuon.contrib._isospectral import Isospectral
from manifoldmuon.contrib._sums import nearest_with_sums, sinkhorn

__all__ = [
    "DoublyStochastic",
    "Isospectral",
    "Nearest",
    "Sinkhorn",
    "nearest_with_sums",
    "sinkhorn",
]
