"""Weight spaces as typed values: projection, tangent space, steepest direction, retraction."""

from manifoldmuon.manifolds import retractions as retractions
from manifoldmuon.manifolds import solvers as solvers
from manifoldmuon.manifolds._axes import Axes
from manifoldmuon.manifolds._embedding_rows import EmbeddingRows
from manifoldmuon.manifolds._euclidean import Euclidean
from manifoldmuon.manifolds._hypersphere import Hypersphere
from manifoldmuon.manifolds._manifold import Manifold, Steepest
from manifoldmuon.manifolds._orthogonal import Orthogonal
from manifoldmuon.manifolds._scale import FanRatio, RootDim, ScaleRule
from manifoldmuon.manifolds._stiefel import Stiefel

__all__ = [
    "Axes",
    "EmbeddingRows",
    "Euclidean",
    "FanRatio",
    "Hypersphere",
    "Manifold",
    "Orthogonal",
    "RootDim",
    "ScaleRule",
    "Steepest",
    "Stiefel",
    "retractions",
    "solvers",
]
