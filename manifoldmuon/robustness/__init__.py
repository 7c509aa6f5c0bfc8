"""Certified robustness: classifiers with labels proved under small changes of the input.

A 1-Lipschitz network keeps its label under every movement of the input shorter than a radius given
by its margin: `certify` computes the radius of each image, and `export` writes a certificate that
others can check. `margin_cross_entropy` trains for such margins.
"""

from manifoldmuon.robustness._certificates import CertificationResult, certify
from manifoldmuon.robustness._export import describe, export
from manifoldmuon.robustness._losses import margin_cross_entropy

__all__ = [
    "CertificationResult",
    "certify",
    "describe",
    "export",
    "margin_cross_entropy",
]
