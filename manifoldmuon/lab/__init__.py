"""Measurements for your own manifolds, retractions and learning-rate sweeps."""

from manifoldmuon.lab._erasure import erasure_auc, letter_mask, stable_rank
from manifoldmuon.lab._rates import BestRate, best_rate, excess_loss
from manifoldmuon.lab._retractions import random_walk, retraction_order

__all__ = [
    "letter_mask",
    "erasure_auc",
    "stable_rank",
    "retraction_order",
    "random_walk",
    "BestRate",
    "best_rate",
    "excess_loss",
]
