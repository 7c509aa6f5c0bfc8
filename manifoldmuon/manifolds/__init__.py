"""Manifolds of weights: projection, tangent space, steepest direction, retraction."""

from manifoldmuon.manifolds import retractions as retractions
from manifoldmuon.manifolds import solvers as solvers
from manifoldmuon.manifolds._euclidean import Euclidean
from manifoldmuon.manifolds._layout import Layout
from manifoldmuon.manifolds._low_rank import low_rank
from manifoldmuon.manifolds._manifold import Entry as Entry
from manifoldmuon.manifolds._manifold import LaidOut, Manifold
from manifoldmuon.manifolds._rotations import Rotations
from manifoldmuon.manifolds._spectral_sets import SpectralBall, SpectralBand
from manifoldmuon.manifolds._spectral_sphere import SpectralSphere
from manifoldmuon.manifolds._spheres import EmbeddingRows, Hypersphere
from manifoldmuon.manifolds._stiefel import Grassmann, Orthogonal, Stiefel

__all__ = [
    "EmbeddingRows",
    "Euclidean",
    "Grassmann",
    "Hypersphere",
    "LaidOut",
    "Layout",
    "Manifold",
    "Orthogonal",
    "Rotations",
    "SpectralBall",
    "SpectralBand",
    "SpectralSphere",
    "Stiefel",
    "low_rank",
    "retractions",
    "solvers",
]
