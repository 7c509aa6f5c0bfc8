"""Measurements: the data sets they run on, and the records that they leave."""

from manifoldmuon.lab import datasets
from manifoldmuon.lab._records import environment, write_record

__all__ = ["datasets", "environment", "write_record"]
