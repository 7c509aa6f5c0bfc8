"""Minimisation on manifolds to convergence: one compiled program, batched and differentiable."""

from manifoldmuon.minimize._auto import Auto
from manifoldmuon.minimize._lbfgs import LBFGS
from manifoldmuon.minimize._minimize import minimize
from manifoldmuon.minimize._problem import Reason, Result
from manifoldmuon.minimize._trust_region import TrustRegion

__all__ = [
    "Auto",
    "LBFGS",
    "Reason",
    "Result",
    "TrustRegion",
    "minimize",
]
