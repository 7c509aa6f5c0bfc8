"""Classifiers whose labels are proved to withstand small changes of their input.

A network of Lipschitz constant 1 keeps its label under every movement of the input that is shorter
than its margin allows: `certify` says how short, image by image, and `export` writes what others
need to check it. Losses ask for such margins, and attacks show how much is left to certify.
"""

from manifoldmuon.robustness._attacks import AttackResult, pgd
from manifoldmuon.robustness._certificates import (
    CertificationResult,
    certified_accuracy,
    certified_radius,
    certify,
)
from manifoldmuon.robustness._export import describe, export
from manifoldmuon.robustness._losses import margin_cross_entropy, multiclass_hinge

__all__ = [
    "AttackResult",
    "CertificationResult",
    "certified_accuracy",
    "certified_radius",
    "certify",
    "describe",
    "export",
    "margin_cross_entropy",
    "multiclass_hinge",
    "pgd",
]
