"""Optimizers to compare: each has a geometry and an Optax transformation."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import optax

import manifoldmuon as mm
from manifoldmuon.manifolds import Euclidean, Hypersphere, Stiefel
from manifoldmuon.manifolds.solvers import ClosedForm, ProjectedPolar, StiefelSolver
from manifoldmuon.norms import RMSToRMS

Shapes = list[tuple[int, int]]

SOLVERS: dict[str, StiefelSolver] = {"ClosedForm": ClosedForm(), "ProjectedPolar": ProjectedPolar()}


@dataclasses.dataclass(frozen=True)
class Method:
    """Row of the table.

    Attributes:
      label: name in the table and in the figure.
      learning_rate: peak learning rate; see METHODS for its source.
      build: function from a learning rate (number or schedule) and a geometry to the optimizer.
      geometry: function from the weights' shapes and the solver to manifolds; None for AdamW.
      constrained: whether the weights have a distance from their manifolds.
    """

    label: str
    learning_rate: float
    build: Callable[[optax.ScalarOrSchedule, Any], optax.GradientTransformation]
    geometry: Callable[[Shapes, StiefelSolver], Any] | None = None
    constrained: bool = False


def build_adamw(
    learning_rate: optax.ScalarOrSchedule, geometry: None, weight_decay: float = 1.0
) -> optax.GradientTransformation:
    """Build AdamW, which ignores the geometry."""
    del geometry
    return optax.adamw(learning_rate, weight_decay=weight_decay)


def build_muon(learning_rate: optax.ScalarOrSchedule, geometry: Any) -> Any:
    """Build Muon with a fully converged msign and with gaps, for the table."""
    return mm.optim.muon(learning_rate, geometry, method=None, track_gap=True)


def unconstrained(shapes: Shapes, solver: StiefelSolver) -> Any:
    """Return Muon's geometry: flat space, with a norm for learning rates that transfer in width."""
    del shapes, solver
    return Euclidean(RMSToRMS())


def spheres(shapes: Shapes, solver: StiefelSolver) -> Any:
    """Return a sphere per matrix, with the Frobenius norm of a Stiefel matrix."""
    del solver
    return [Hypersphere(math.sqrt(min(shape)), ndim=2) for shape in shapes]


def stiefel(shapes: Shapes, solver: StiefelSolver) -> Any:
    """Return Stiefel manifolds: the network without its multiplier is 1-Lipschitz."""
    del shapes
    return Stiefel(solver=solver)


# Every rate, AdamW's weight decay and the multiplier come from the grids of `benchmarks.tuning`:
# accuracy on images held out from the training parts, with ten seeds and splits unused in the job.
# At multiplier 4, in percent (95 % intervals ± 0.4 to 0.9, muon at 0.001: 1.9):
#   adamw    0.001: 97.99   0.003: 98.09   0.01: 97.95   0.03: 97.50   (weight decay 1)
#            best of weight decay 0: 98.06, 0.1: 98.02, 3: 97.64
#   muon     0.001: 92.74   0.002: 97.50   0.005: 98.30  0.01: 97.53   0.02: 96.35
#   sphere   0.003: 97.88   0.01: 98.19    0.03: 97.64   0.1: 96.56
#   stiefel  0.01: 98.37    0.03: 98.33    0.1: 98.58    0.3: 98.40
# Other multipliers (1, 2, 8) improve AdamW and Muon by at most 0.1, within the error, and the
# sphere not at all; only the Stiefel manifold depends on the multiplier, as expected: see `logits`
# in `studies.classification`.
METHODS = {
    "adamw": Method("AdamW", 3e-3, build_adamw),
    "muon": Method("Muon", 5e-3, build_muon, unconstrained),
    "sphere": Method(
        "hypersphere descent", 1e-2, mm.optim.manifold_muon, spheres, constrained=True
    ),
    "stiefel": Method("manifold Muon", 1e-1, mm.optim.manifold_muon, stiefel, True),
}
