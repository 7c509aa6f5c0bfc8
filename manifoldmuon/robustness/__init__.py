"""Classifiers whose labels are proved to withstand small changes of their input.

A network of Lipschitz constant 1 keeps its label under every movement of the input that is shorter
than its margin allows: `certify` says how short, image by image, and
`export` writes what others need to check it.
"""

from manifoldmuon.robustness._certificates import Certified, certified_accuracy, certify
from manifoldmuon.robustness._export import Arrays, describe, export

__all__ = ["Certified", "certified_accuracy", "certify", "export", "describe", "Arrays"]
