"""Manifold Muon on CIFAR-10: the exact direction against cheaper directions, and AdamW."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
import optax

import manifoldmuon as mm
from manifoldmuon.manifolds import Euclidean, Stiefel
from manifoldmuon.manifolds.solvers import ProjectedPolar
from manifoldmuon.norms import Spectral
from studies import classification
from studies.display import text_table
from studies.estimates import estimate, shown
from studies.study import Cell, Record, Row, Study, option

HIDDEN, BATCH = (128, 64), 1024


def _without_projection(rate: Any) -> optax.GradientTransformation:
    """Build msign of the gradient without projection; only the retraction keeps the manifold."""
    return mm.optim.chain(
        mm.optim.scale_by_steepest(Euclidean(Spectral())),
        optax.scale_by_learning_rate(rate),
        mm.optim.retract(Stiefel()),
    )


METHODS: dict[str, tuple[float, Any]] = {
    "exact": (0.1, lambda rate: mm.optim.manifold_muon(rate, Stiefel(), momentum=None)),
    "one step": (
        0.1,
        lambda rate: mm.optim.manifold_muon(rate, Stiefel(solver=ProjectedPolar()), momentum=None),
    ),
    "no projection": (0.1, _without_projection),
    "adamw": (3e-3, optax.adamw),
}
"""Peak learning rate and optimizer."""


@dataclasses.dataclass(frozen=True)
class ManifoldCIFAR(Study):
    """What does the exact direction of manifold Muon gain on CIFAR-10?

    Follows the protocol of "Modular Manifolds": a ReLU network 3072-128-64-10 without biases,
    weights with orthonormal columns, cross-entropy, batches of 1024 standardised images, five
    epochs, the learning rate 0.1 falling linearly to zero, no momentum. Five epochs of 10,000
    images are 49 steps, of the whole set 245.
    """

    name: ClassVar[str] = "manifold-cifar"

    lengths: tuple[int, ...] = option((49, 245), "steps of the trainings")
    data_dir: Path | None = option(None, "folder or archive of CIFAR-10", recorded=False)
    seeds: tuple[int, ...] = option((0, 1, 2), "seeds of weights and batches")

    def cells(self) -> Sequence[Cell]:
        return [
            {"method": method, "steps": steps, "seed": seed}
            for steps in self.lengths
            for method in METHODS
            for seed in self.seeds
        ]

    def run(self, cell: Cell) -> Mapping[str, Any]:
        data, (rate, build) = classification.cifar10(self.data_dir), METHODS[cell["method"]]
        shapes = classification.shapes_of(data.widths(HIDDEN))
        weights = classification.train(
            data, build, classification.init_weights(cell["seed"], shapes), rate, cell["steps"],
            cell["seed"], BATCH, 1.0,
        )  # fmt: skip
        values = np.concatenate([np.linalg.svd(np.asarray(w), compute_uv=False) for w in weights])
        return {
            "images": len(data.train_y),
            "test_accuracy": _accuracy(weights, data.test_x, data.test_y),
            "train_accuracy": _accuracy(weights, data.train_x, data.train_y),
            "smallest": values.min(),
            "largest": values.max(),
        }

    def summarise(self, rows: Sequence[Row]) -> Mapping[str, Any]:
        return {
            method: {
                str(steps): estimate([
                    row["test_accuracy"] for row in rows
                    if (row["method"], row["steps"]) == (method, steps)
                ])
                for steps in self.lengths
            }
            for method in METHODS
        }  # fmt: skip

    def table(self, record: Record) -> str:
        lines = [
            [method, *(shown(own, ".3f") for own in found.values())]
            for method, found in record["summary"].items()
        ]
        return text_table(["test accuracy, 95 %", *(f"{n} steps" for n in self.lengths)], lines)


_accuracy = jax.jit(classification.accuracy)
