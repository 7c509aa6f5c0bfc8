"""Retractions: bring a point that moved along a tangent vector back to its set.

| points | retractions |
|---|---|
| orthonormal matrices | `Polar`, `QR`, `Cayley`, `Exponential` |
| unit vectors | `Normalize`, `Geodesic` |
| matrices of norm at most 1 | `Clip`, `SoftCap` |
"""

from manifoldmuon.manifolds.retractions._orthonormal import QR, Cayley, Exponential, Polar
from manifoldmuon.manifolds.retractions._retraction import Retraction
from manifoldmuon.manifolds.retractions._spectral import Clip, SoftCap
from manifoldmuon.manifolds.retractions._spheres import Geodesic, Normalize

__all__ = [
    "QR",
    "Cayley",
    "Clip",
    "Exponential",
    "Geodesic",
    "Normalize",
    "Polar",
    "Retraction",
    "SoftCap",
]
