"""Retractions: how a step along a tangent vector ends on the set again."""

from manifoldmuon.manifolds.retractions._analytic import Analytic
from manifoldmuon.manifolds.retractions._cayley import Cayley
from manifoldmuon.manifolds.retractions._exponential import Exponential
from manifoldmuon.manifolds.retractions._polar import Polar
from manifoldmuon.manifolds.retractions._qr import QR
from manifoldmuon.manifolds.retractions._retraction import Retraction
from manifoldmuon.manifolds.retractions._sphere import Geodesic, Normalize, SphereRetraction

__all__ = [
    "QR",
    "Analytic",
    "Cayley",
    "Exponential",
    "Geodesic",
    "Normalize",
    "Polar",
    "Retraction",
    "SphereRetraction",
]
