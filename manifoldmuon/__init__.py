"""Typed weight manifolds, spectral steepest descent and modular norms for JAX and Optax."""

import importlib.metadata

from manifoldmuon import bounds, linalg, manifolds, modules, norms, optim

try:
    __version__ = importlib.metadata.version("manifoldmuon")
except importlib.metadata.PackageNotFoundError:  # used from a source tree that is not installed
    __version__ = "0+unknown"

__all__ = ["linalg", "norms", "manifolds", "optim", "modules", "bounds", "__version__"]
