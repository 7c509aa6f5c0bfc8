"""Measurements as functions, for manifolds, solvers and sweeps of your own."""

from manifoldmuon.lab._erasure import erasure_auc, erasure_ratio, letter_mask, stable_rank
from manifoldmuon.lab._intervals import (
    Estimate,
    difference_estimate,
    half_width,
    mean_and_standard_error,
    mean_estimate,
    slope_estimate,
    student_quantile,
)
from manifoldmuon.lab._retractions import (
    RandomWalk,
    RetractionCost,
    RetractionOrder,
    random_walk,
    retraction_cost,
    retraction_order,
)
from manifoldmuon.lab._solvers import SolverGaps, solver_gaps
from manifoldmuon.lab._timing import interleaved_seconds
from manifoldmuon.lab._transfer import (
    BestRate,
    RateDrift,
    best_rate,
    excess_loss,
    feature_changes,
    rate_drift,
)

__all__ = [
    "letter_mask",
    "erasure_auc",
    "erasure_ratio",
    "stable_rank",
    "RetractionOrder",
    "retraction_order",
    "RandomWalk",
    "random_walk",
    "RetractionCost",
    "retraction_cost",
    "SolverGaps",
    "solver_gaps",
    "BestRate",
    "best_rate",
    "RateDrift",
    "rate_drift",
    "excess_loss",
    "feature_changes",
    "Estimate",
    "mean_estimate",
    "mean_and_standard_error",
    "difference_estimate",
    "slope_estimate",
    "half_width",
    "student_quantile",
    "interleaved_seconds",
]
