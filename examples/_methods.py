"""The optimizers that are compared: each is a geometry and an Optax transformation."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import optax

import manifoldmuon as mm
from manifoldmuon.manifolds import Euclidean, Hypersphere, Stiefel
from manifoldmuon.manifolds.solvers import ACCURATE, FAST, StiefelSolver
from manifoldmuon.norms import RMSToRMS

Shapes = list[tuple[int, int]]

PRESETS: dict[str, StiefelSolver] = {"accurate": ACCURATE, "fast": FAST}


@dataclasses.dataclass(frozen=True)
class Method:
    """One row of the table.

    Attributes:
      label: its name in the table and in the picture.
      learning_rate: the peak rate, tuned on the digits by `benchmarks/tuning.py`: on images held
        out from the training parts of splits that the job does not use.
      build: from a learning rate (a number or a schedule) and a geometry to the transformation.
      geometry: from the weights' shapes and the solver to their manifolds; None for AdamW.
      curved: whether the manifolds constrain the weights, so that there is a distance from them.
    """

    label: str
    learning_rate: float
    build: Callable[[optax.ScalarOrSchedule, Any], optax.GradientTransformation]
    geometry: Callable[[Shapes, StiefelSolver], Any] | None = None
    curved: bool = False


def build_adamw(
    learning_rate: optax.ScalarOrSchedule, geometry: None, weight_decay: float = 1.0
) -> optax.GradientTransformation:
    """AdamW, which knows no geometry."""
    del geometry
    return optax.adamw(learning_rate, weight_decay=weight_decay)


def flat(shapes: Shapes, solver: StiefelSolver) -> Any:
    """Muon's geometry: all of space, in the norm whose learning rates transfer across widths."""
    del shapes, solver
    return Euclidean(RMSToRMS())


def spheres(shapes: Shapes, solver: StiefelSolver) -> Any:
    """One sphere per matrix, of the size that it has on the Stiefel manifold."""
    del solver
    return [Hypersphere(math.sqrt(min(shape)), ndim=2) for shape in shapes]


def stiefel(shapes: Shapes, solver: StiefelSolver) -> Any:
    """All singular values 1, so that the network without its multiplier is 1-Lipschitz."""
    del shapes
    return Stiefel(solver=solver)


METHODS = {
    "adamw": Method("AdamW", 3e-3, build_adamw),
    "muon": Method("Muon", 3e-3, mm.optim.muon, flat),
    "sphere": Method("hypersphere descent", 1e-2, mm.optim.manifold_muon, spheres, curved=True),
    "stiefel": Method("manifold Muon", 1e-1, mm.optim.manifold_muon, stiefel, curved=True),
}
