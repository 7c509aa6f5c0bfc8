"""Certificates of robustness that others can check."""

from manifoldmuon.robustness._export import add_array, describe, export

__all__ = ["export", "describe", "add_array"]
