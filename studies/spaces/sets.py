"""Constraint sets for hidden matrices, and training on these sets."""

import dataclasses
import functools
from typing import Any

import jax
import optax

from manifoldmuon.linalg import TRAINING_MSIGN
from manifoldmuon.manifolds import (
    Euclidean,
    Hypersphere,
    Manifold,
    SpectralBall,
    SpectralBand,
    SpectralSphere,
    Stiefel,
)
from manifoldmuon.manifolds.retractions import Clip, SoftCap
from manifoldmuon.manifolds.solvers import DouglasRachford, ProjectedPolar
from manifoldmuon.modules import Linear, Module
from manifoldmuon.norms import FanRatio, RMSToRMS, RootRank, Spectral
from manifoldmuon.optim import manifold_muon
from studies.networks.architectures import Architecture
from studies.networks.methods import MOMENTUM, Method

MUON, FROBENIUS, STIEFEL = "Muon", "Frobenius", "Stiefel"


@functools.lru_cache(maxsize=4)
def sets_of(scale: float) -> dict[str, Manifold]:
    """Return the sets by name; all contain the semi-orthogonal matrices, scaled.

    For every set, steps are measured in the spectral norm relative to the scale.

    Args:
      scale: the scale of singular values, in addition to sqrt(fan_out / fan_in).
    """
    ratio = FanRatio(scale)
    norm = Spectral(TRAINING_MSIGN, ratio)
    # Clip with a converged sign: four steps would move matrices inside a wide band.
    clip = Clip()
    bands = {
        f"band {high:g}": SpectralBand(1 / high, high, ratio, None, clip, norm)
        for high in (3.0, 1.5, 1.1)
    }
    return {
        MUON: Euclidean(norm),
        FROBENIUS: Hypersphere(RootRank(ratio), ndim=2, step_norm=norm),
        "spectral sphere": SpectralSphere(ratio, norm),
        "spectral ball": SpectralBall(ratio, None, clip, norm),
        **bands,
        STIEFEL: Stiefel(ratio, solver=ProjectedPolar()),
        "ball, soft cap": SpectralBall(ratio, None, SoftCap(), norm),
        # The solver subtracts clipped parts, for which a sign of four steps is too inaccurate.
        "ball, tangent steps": SpectralBall(ratio, DouglasRachford(), clip, Spectral(None, ratio)),
    }


SETS = tuple(sets_of(1.0))


@dataclasses.dataclass(frozen=True)
class Hidden(Method):
    """Hidden matrices on a set; other weights unconstrained and the same for every set.

    Attributes:
      manifold: the set of the hidden matrices.
      ends: the lowest and highest learning rate of the grid, as exponents of 2.
      scale: the factor of the initial hidden matrices.
    """

    manifold: Manifold
    ends: tuple[int, int]
    scale: float = 1.0

    @property
    def exponents(self) -> tuple[int, int]:
        return self.ends

    def network(self, architecture: Architecture, inputs: int, outputs: int) -> Module:
        heads = []

        def place(atom: Any) -> Any:
            if not isinstance(atom, Linear):
                return atom.on(atom.free_space())
            if atom.fan_out == outputs:
                heads.append(atom)
                return atom.on(Euclidean(RMSToRMS(TRAINING_MSIGN)))
            return atom.on(self.manifold)

        network = architecture.modular(inputs, outputs).map_atoms(place)
        if len(heads) != 1:
            raise ValueError(f"{outputs}, the number of classes, is the width of a hidden layer")
        return network

    def first(self, weights: Any, network: Module) -> Any:
        def scaled(weight: Any, manifold: Manifold) -> Any:
            return self.scale * weight if manifold == self.manifold else weight

        return jax.tree.map(scaled, weights, network.geometry())

    def optimizer(self, rate: Any, network: Module) -> optax.GradientTransformation:
        return manifold_muon(
            rate, network.geometry(), MOMENTUM, budgets=network.budgets(), track_gap=False
        )
