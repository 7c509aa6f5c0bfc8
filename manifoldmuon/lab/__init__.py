"""Measurements for your own manifolds, retractions and learning-rate sweeps."""

from manifoldmuon.lab._erasure import erasure_auc, letter_mask, stable_rank
from manifoldmuon.lab._pictures import plot_monitor, plot_singular_values
from manifoldmuon.lab._rates import BestRate, best_rate, excess_loss
from manifoldmuon.lab._retractions import RandomWalk, RetractionOrder, random_walk, retraction_order

__all__ = [
    "letter_mask",
    "erasure_auc",
    "stable_rank",
    "RetractionOrder",
    "retraction_order",
    "RandomWalk",
    "random_walk",
    "BestRate",
    "best_rate",
    "excess_loss",
    "plot_monitor",
    "plot_singular_values",
]
