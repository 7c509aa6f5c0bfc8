"""Typed weight manifolds, spectral steepest descent and modular norms for JAX and Optax.

Submodules are loaded on first use: importing the optimizers does not import the architectures and
their bounds.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from manifoldmuon import bounds, linalg, manifolds, minimize, modules, norms, optim, robustness

try:
    __version__ = importlib.metadata.version("manifoldmuon")
except importlib.metadata.PackageNotFoundError:  # a source tree, not installed
    __version__ = "0+unknown"

__all__ = [
    "linalg",
    "norms",
    "manifolds",
    "optim",
    "minimize",
    "modules",
    "bounds",
    "robustness",
    "__version__",
]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__doc__", "__name__"]
