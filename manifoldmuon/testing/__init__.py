"""Checks of the interfaces' laws: run them on your own manifolds, norms and optimizers."""

from manifoldmuon.testing._manifold_laws import check_manifold
from manifoldmuon.testing._meshes import check_inside_shard_map, check_sharding
from manifoldmuon.testing._norm_laws import check_norm
from manifoldmuon.testing._slopes import check_slopes, error_slope
from manifoldmuon.testing._transformation_laws import check_transformation

__all__ = [
    "check_inside_shard_map",
    "check_manifold",
    "check_norm",
    "check_sharding",
    "check_slopes",
    "check_transformation",
    "error_slope",
]
