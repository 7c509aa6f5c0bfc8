"""The sets of the hidden matrices, and training on them."""

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
    """The sets of the hidden matrices by name: semi-orthogonal matrices are in all of them.

    Steps are measured in the spectral norm relative to the scale, whatever the set.

    Args:
      scale: of singular values, beside the square root of fan-out by fan-in.
    """
    ratio = FanRatio(scale)
    norm = Spectral(TRAINING_MSIGN, ratio)
    # By a sign that converges: four steps of it move what lies inside a wide band.
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
        # The solver subtracts what signs have clipped, so that four steps of them will not do.
        "ball, tangent steps": SpectralBall(ratio, DouglasRachford(), clip, Spectral(None, ratio)),
    }


SETS = tuple(sets_of(1.0))


@dataclasses.dataclass(frozen=True)
class Hidden(Method):
    """Hidden matrices on a set; embedding and head in flat space, the same for every set.

    Attributes:
      manifold: of the hidden matrices.
      ends: of the grid of learning rates, in powers of two.
      scale: of the first hidden matrices.
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
            rate, network.geometry(), MOMENTUM, budgets=network.budgets(), certify=False
        )
