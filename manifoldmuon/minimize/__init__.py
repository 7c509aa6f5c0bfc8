"""Minimisation on manifolds to convergence: one compiled program, batched and differentiable."""

from manifoldmuon.minimize._auto import Auto
from manifoldmuon.minimize._line_search import LBFGS, ConjugateGradient, GradientDescent
from manifoldmuon.minimize._minimize import minimize
from manifoldmuon.minimize._problem import Reason, Result
from manifoldmuon.minimize._trust_region import TrustRegion

__all__ = [
    "Auto",
    "ConjugateGradient",
    "GradientDescent",
    "LBFGS",
    "Reason",
    "Result",
    "TrustRegion",
    "minimize",
]
