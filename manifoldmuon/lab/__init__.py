"""Measurements: studies, the data sets they run on, and the records that they leave."""

from manifoldmuon.lab import datasets, studies
from manifoldmuon.lab._contestants import SolverGaps, solver_gaps
from manifoldmuon.lab._coordinates import feature_changes
from manifoldmuon.lab._erasure import erasure_auc, erasure_ratio, letter_mask, stable_rank
from manifoldmuon.lab._rates import BestRate, RateDrift, best_rate, rate_drift
from manifoldmuon.lab._records import environment, write_record
from manifoldmuon.lab._retractions import (
    RandomWalk,
    RetractionCost,
    RetractionOrder,
    random_walk,
    retraction_cost,
    retraction_order,
)
from manifoldmuon.lab._run import run_study
from manifoldmuon.lab._study import Study, option

__all__ = [
    "datasets",
    "studies",
    "Study",
    "option",
    "run_study",
    "environment",
    "write_record",
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
    "feature_changes",
    "letter_mask",
    "erasure_auc",
    "erasure_ratio",
    "stable_rank",
]
