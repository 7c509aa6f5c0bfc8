"""The retraction laboratory: what each way back to the set does, and what it costs."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from manifoldmuon.lab import _training
from manifoldmuon.lab._classifier import shapes_of
from manifoldmuon.lab._retractions import random_walk, retraction_cost, retraction_order
from manifoldmuon.lab._spaces import SPACES, Space
from manifoldmuon.lab._study import Cell, Record, Row, Study, option
from manifoldmuon.lab.studies._retractions_findings import findings, table
from manifoldmuon.lab.studies._retractions_picture import picture

NAMES = tuple(dict.fromkeys(name for space in SPACES.values() for name in space.retractions))
DTYPES = ("float32", "bfloat16")
PARTS = ("order", "walk", "cost", "training")


@dataclasses.dataclass(frozen=True)
class RetractionLaboratory(Study):
    """Which retraction should a user choose, and when?

    For every manifold, retraction, dtype and step size: the order of accuracy, as the slope of
    the distance from the geodesic in float64; the distance from the set after one step and after
    many, along steepest directions of random gradients; the effective step |R(W, eta A) - W| /
    eta; the cost in products of the same size; and the final loss of a small classifier of
    digits, its weights put back on the set, beside that of the package's default, seed by seed.
    Two baselines are included: none, and the published scalar 1 / sqrt(1 + eta^2).
    """

    name: ClassVar[str] = "retractions"

    parts: tuple[str, ...] = option(PARTS, "what is measured", choices=PARTS)
    manifolds: tuple[str, ...] = option(tuple(SPACES), "on which", choices=tuple(SPACES))
    retractions: tuple[str, ...] = option((), "which; left out: all that fit", choices=NAMES)
    dtypes: tuple[str, ...] = option(DTYPES, "in which the weights are kept", choices=DTYPES)
    rates: tuple[float, ...] = option((0.003, 0.01, 0.03, 0.1, 0.3, 1.0), "step sizes, as angles")
    walk_steps: int = option(100_000, "of the random walks")
    train_steps: int = option(200, "of training")
    seeds: tuple[int, ...] = option((0, 1, 2, 3), "of training; the first is that of all else")

    def __post_init__(self):
        if min(self.walk_steps, self.train_steps) < 1:
            raise ValueError(f"steps must be at least 1; got {self.walk_steps, self.train_steps}")
        if not self.rates or min(self.rates) <= 0:
            raise ValueError(f"rates must be positive; got {self.rates}")
        if not self.seeds:
            raise ValueError("seeds must name one seed at least")
        pairs = self._pairs()
        for manifold in self.manifolds:
            if not any(manifold == space for space, _ in pairs):
                fitting = ", ".join(SPACES[manifold].retractions)
                raise ValueError(f"none of the retractions fits {manifold}; there are {fitting}")
        for retraction in self.retractions:
            if not any(retraction == name for _, name in pairs):
                raise ValueError(f"the retraction {retraction} fits none of {self.manifolds}")

    def _pairs(self) -> list[tuple[str, str]]:
        """Manifolds with their retractions, the default of each first."""
        return [
            (space, name)
            for space in self.manifolds
            if space in SPACES
            for name in SPACES[space].retractions
            if not self.retractions or name in self.retractions
        ]

    def cells(self) -> Sequence[Cell]:
        every: list[Cell] = []
        for space, name in self._pairs():
            pair = {"manifold": space, "retraction": name}
            one = {"seed": self.seeds[0]}
            every += [pair | {"part": part} | one for part in ("order", "cost")]
            every += [pair | {"part": "walk", "dtype": d} | one for d in self.dtypes]
            every += [
                pair | {"part": "training", "dtype": dtype, "rate": rate, "seed": seed}
                for dtype in self.dtypes
                for rate in self.rates
                for seed in self.seeds
            ]
        # Part by part, so that an interrupted study has some parts whole.
        return [cell for part in self.parts for cell in every if cell["part"] == part]

    def run(self, cell: Cell) -> Mapping[str, Any]:
        space, key = SPACES[cell["manifold"]], jax.random.key(cell["seed"])
        if cell["part"] == "training":
            return self._train(cell, space)
        shape = space.large if cell["part"] == "cost" else space.shape
        manifold = space.build(space.retractions[cell["retraction"]], shape)
        if cell["part"] == "order":
            exact = space.build(space.retractions[space.exact], shape)
            return retraction_order(manifold, exact, shape, key)._asdict()
        if cell["part"] == "cost":
            cost = retraction_cost(manifold, shape, key)
            return {"cost": cost.retraction, "direction_cost": cost.direction}
        found = random_walk(manifold, shape, self.rates, self.walk_steps, key, cell["dtype"])
        distances = np.stack([space.distance(points) for points in found.points], axis=1)
        return {"at": found.at, "distances": distances, "effective": found.effective}

    def timed(self, cell: Cell) -> bool:
        return cell["part"] == "cost"

    def _train(self, cell: Cell, space: Space) -> Mapping[str, Any]:
        data = _training.digits(cell["seed"])
        shapes = shapes_of(data.widths(space.widths))
        retraction = space.retractions[cell["retraction"]]
        geometry = tuple(space.build(retraction, shape) for shape in shapes)
        found = _training.train(
            data,
            geometry,
            space.widths,
            cell["rate"],
            self.train_steps,
            cell["seed"],
            cell["dtype"],
        )
        back = [
            m.project(w.astype("float32")) for m, w in zip(geometry, found.weights, strict=True)
        ]
        loss, correct = _training.evaluate(back, data)
        return {
            "loss": found.loss,
            "accuracy": found.accuracy,
            "loss_on_the_set": loss,
            "accuracy_on_the_set": correct,
        }

    def summarise(self, rows: Sequence[Row]) -> Mapping[str, Any]:
        return findings(rows)

    def table(self, record: Record) -> str:
        return table(record["summary"], record["settings"])

    def plot(self, record: Record) -> Any:
        return picture(record)
