"""The laws of the package's interfaces, as checks that anyone can run on their own code."""

from manifoldmuon.manifolds.solvers._worth import Worth, stiefel_optimum, stiefel_worth
from manifoldmuon.testing._manifolds import check_manifold
from manifoldmuon.testing._msign import check_msign
from manifoldmuon.testing._norms import check_norm
from manifoldmuon.testing._sharding import check_sharding
from manifoldmuon.testing._solvers import STIEFEL_FAMILIES, orthonormal, stiefel_problem
from manifoldmuon.testing._transformations import check_transformation

__all__ = [
    "STIEFEL_FAMILIES",
    "Worth",
    "check_manifold",
    "check_msign",
    "check_norm",
    "check_sharding",
    "check_transformation",
    "orthonormal",
    "stiefel_optimum",
    "stiefel_problem",
    "stiefel_worth",
]
