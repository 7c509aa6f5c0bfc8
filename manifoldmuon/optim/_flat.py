"""Which leaves are flat: where addition is the retraction, and weight decay has a meaning."""

from manifoldmuon.manifolds import Axes, Euclidean, Manifold


def is_flat(manifold: Manifold) -> bool:
    """True for `Euclidean`, also behind `Axes`."""
    if isinstance(manifold, Axes):
        return is_flat(manifold.manifold)
    return isinstance(manifold, Euclidean)
