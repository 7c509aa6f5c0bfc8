"""Retractions: how a step along a tangent vector ends on the set again.

Those of matrices with orthonormal columns (`Retraction`): `Polar`, `QR`, `Analytic`, `Cayley`,
`Exponential`. Those of bounded singular values (`SpectralRetraction`): `Clip`, `SoftCap`. Those of
spheres (`SphereRetraction`): `Normalize`, `Geodesic`.
"""

from manifoldmuon.manifolds.retractions._orthonormal import (
    QR,
    Analytic,
    Cayley,
    Exponential,
    Polar,
    Retraction,
    positive_qr,
)
from manifoldmuon.manifolds.retractions._spectral import Clip, SoftCap, SpectralRetraction
from manifoldmuon.manifolds.retractions._spheres import Geodesic, Normalize, SphereRetraction

__all__ = [
    "QR",
    "Analytic",
    "Cayley",
    "Clip",
    "Exponential",
    "Geodesic",
    "Normalize",
    "Polar",
    "Retraction",
    "SoftCap",
    "SpectralRetraction",
    "SphereRetraction",
    "positive_qr",
]
