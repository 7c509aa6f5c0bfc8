"""Measurements: studies, the data sets they run on, and the records that they leave."""

from manifoldmuon.lab import datasets, studies
from manifoldmuon.lab._erasure import erasure_auc, erasure_ratio, letter_mask, stable_rank
from manifoldmuon.lab._records import environment, write_record
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
    "letter_mask",
    "erasure_auc",
    "erasure_ratio",
    "stable_rank",
]
