"""Sound bounds for architectures: on their outputs, on their slopes in inputs and weights.

A certificate follows an architecture module by module, from the sets that its weights live on or
from the weights that it has. It does not rely on declared sensitivities, which describe typical
inputs: every module has a rule that holds for all.
"""

from manifoldmuon.certificates import _atoms, _attention, _bonds, _combinations  # the rules
from manifoldmuon.certificates._certificate import Certificate
from manifoldmuon.certificates._certify import certify
from manifoldmuon.certificates._losses import (
    CrossEntropy,
    Loss,
    Smoothness,
    SquareError,
    smoothness,
)
from manifoldmuon.certificates._measures import (
    RMS,
    Heads,
    Kept,
    Largest,
    Measure,
    OneHot,
    Size,
    Total,
)
from manifoldmuon.certificates._radius import certified_radius
from manifoldmuon.certificates._reach import Reach, reach
from manifoldmuon.certificates._rule import rule
from manifoldmuon.certificates._transfer import Transfer, read
from manifoldmuon.certificates._weights import Weight

__all__ = [
    "certify",
    "Certificate",
    "certified_radius",
    "smoothness",
    "Smoothness",
    "Loss",
    "SquareError",
    "CrossEntropy",
    "Size",
    "Measure",
    "RMS",
    "Heads",
    "Largest",
    "Kept",
    "Total",
    "OneHot",
    "rule",
    "read",
    "Transfer",
    "Weight",
    "reach",
    "Reach",
]

del _atoms, _attention, _bonds, _combinations
