"""The retraction laboratory: accuracy, drift and cost of retractions."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from manifoldmuon.lab import random_walk, retraction_order
from manifoldmuon.manifolds import Manifold
from manifoldmuon.optim import init_tree, manifold_muon
from studies import classification
from studies.display import short, text_table
from studies.estimates import half_width, mean_estimate
from studies.retractions.cost import retraction_cost
from studies.retractions.picture import middle, picture
from studies.retractions.spaces import SPACES, Space
from studies.study import Cell, Record, Row, Study, option

NAMES = tuple(dict.fromkeys(name for space in SPACES.values() for name in space.retractions))
DTYPES = ("float32", "bfloat16")
PARTS = ("order", "walk", "cost", "training")


@dataclasses.dataclass(frozen=True)
class RetractionLaboratory(Study):
    """Which retraction should a user choose, and when?

    Measures for every manifold and retraction:

    * the order of accuracy: the slope of the distance from the geodesic, in float64;
    * the distance from the set after one step and after many, along steepest directions of random
      gradients, by dtype and step size, and the effective step |R(W, eta A) - W| / eta;
    * the cost in matrix products of the same size;
    * the final loss of a small classifier of digits, with weights projected back onto the set,
      relative to the package's default retraction and paired by seed, by dtype and step size.

    Two baselines are included: none, and the published scalar 1 / sqrt(1 + eta^2).
    """

    name: ClassVar[str] = "retractions"

    parts: tuple[str, ...] = option(PARTS, "measurements to take", choices=PARTS)
    manifolds: tuple[str, ...] = option(
        tuple(SPACES), "manifolds to measure", choices=tuple(SPACES)
    )
    retractions: tuple[str, ...] = option(
        (), "retractions to measure; left out: all that fit", choices=NAMES
    )
    dtypes: tuple[str, ...] = option(DTYPES, "dtypes of the weights", choices=DTYPES)
    rates: tuple[float, ...] = option((0.003, 0.01, 0.03, 0.1, 0.3, 1.0), "step sizes, as angles")
    walk_steps: int = option(100_000, "steps of the random walks")
    train_steps: int = option(200, "steps of each training")
    seeds: tuple[int, ...] = option((0, 1, 2, 3), "seeds of training; the first serves other parts")

    def __post_init__(self):
        if min(self.walk_steps, self.train_steps) < 1:
            raise ValueError(f"steps must be at least 1; got {self.walk_steps, self.train_steps}")
        if not self.rates or min(self.rates) <= 0:
            raise ValueError(f"rates must be positive; got {self.rates}")
        if not self.seeds:
            raise ValueError("seeds must not be empty")
        pairs = self._pairs()
        for manifold in self.manifolds:
            if not any(manifold == space for space, _ in pairs):
                fitting = ", ".join(SPACES[manifold].retractions)
                raise ValueError(
                    f"retractions must include a retraction of {manifold} ({fitting}); got "
                    f"{self.retractions}"
                )
        for retraction in self.retractions:
            if not any(retraction == name for _, name in pairs):
                raise ValueError(f"{retraction} is a retraction of none of {self.manifolds}")

    def _pairs(self) -> list[tuple[str, str]]:
        """List pairs of a manifold and a retraction, the default retraction first."""
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
        # Ordered by part, so that an interrupted study has some complete parts.
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
            return retraction_cost(manifold, shape, key)
        found = random_walk(manifold, shape, self.rates, self.walk_steps, key, cell["dtype"])
        distances = np.stack([space.distance(points) for points in found.points], axis=1)
        return {"at": found.at, "distances": distances, "effective": found.effective}

    def timed(self, cell: Cell) -> bool:
        return cell["part"] == "cost"

    def _train(self, cell: Cell, space: Space) -> Mapping[str, Any]:
        data, seed = classification.digits(cell["seed"]), cell["seed"]
        shapes = classification.shapes_of(data.widths(space.widths))
        retraction = space.retractions[cell["retraction"]]
        geometry = tuple(space.build(retraction, shape) for shape in shapes)
        templates = [jax.ShapeDtypeStruct(shape, jnp.dtype(cell["dtype"])) for shape in shapes]
        weights = init_tree(list(geometry), jax.random.key(seed), templates)
        weights = classification.train(
            data, _muon_on(geometry), weights, cell["rate"], self.train_steps, seed
        )
        back = [m.project(w.astype("float32")) for m, w in zip(geometry, weights, strict=True)]
        (loss, accuracy), (loss_back, accuracy_back) = (
            classification.evaluate(w, data) for w in (weights, back)
        )
        return {
            "loss": loss,
            "accuracy": accuracy,
            "loss_on_the_set": loss_back,
            "accuracy_on_the_set": accuracy_back,
        }

    def summarise(self, rows: Sequence[Row]) -> Mapping[str, Any]:
        """Summarise the rows by manifold and retraction."""
        pairs = dict.fromkeys((row["manifold"], row["retraction"]) for row in rows)
        found: dict[str, Any] = {space: {} for space, _ in pairs}
        for space, name in pairs:
            own, default = ([r for r in rows if (r["manifold"], r["retraction"]) == (space, which)]
                            for which in (name, next(iter(SPACES[space].retractions))))  # fmt: skip
            found[space][name] = _measured(own) | _trained(own, default)
        return found

    def table(self, record: Record) -> str:
        summary, settings = record["summary"], record["settings"]
        dtypes, rates = settings["dtypes"], settings["rates"]
        at = rates.index(middle(rates))
        lines = []
        for space, entries in summary.items():
            for name, entry in entries.items():
                walks = [entry.get("walk", {}).get(dtype) for dtype in dtypes]
                trained = [entry.get("training", {}).get(dtype) for dtype in dtypes]
                slope = entry.get("slope", 0)
                lines.append([
                    f"{space}, {name}",
                    "exact" if slope is None else short(slope or None, ".2f"),
                    short(entry.get("error_at_eighth")),
                    *(short(w and w["one_step"][at]) for w in walks),
                    *(short(w and w["last_step"][at]) for w in walks),
                    short(walks[0] and walks[0]["effective"][-1], ".3f"),
                    short(entry.get("cost"), ".1f"),
                    short(entry.get("direction_cost"), ".1f"),
                    *(_least(t) for t in trained),
                ])  # fmt: skip
        header = ["", "slope", "error at 1/8", *(f"1 step, {d}" for d in dtypes),
                  *(f"{settings['walk_steps']} steps, {d}" for d in dtypes),
                  f"step at {rates[-1]:g}", "cost", "direction",
                  *(f"least loss, {d}" for d in dtypes)]  # fmt: skip
        legend = (
            f"distances from the set at the rate {rates[at]:g}; costs in products of the same "
            "size;\nlosses at the best of the rates, weights put back on the set, and the 95 % "
            "interval"
        )
        return f"{text_table(header, lines)}\n{legend}"

    def plot(self, record: Record) -> Any:
        return picture(record)


@functools.lru_cache(maxsize=4)
def _muon_on(geometry: tuple[Manifold, ...]) -> classification.Builder:
    """Return the builder of an optimizer; the same one for equal geometries."""
    return lambda rate: manifold_muon(rate, list(geometry))


def _measured(rows: Sequence[Row]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for row in rows:
        if row["part"] == "order":
            found |= {"slope": row["slope"], "error_at_eighth": row["errors"][0]}
        if row["part"] == "cost":
            found |= {"cost": row["cost"], "direction_cost": row["direction_cost"]}
        if row["part"] == "walk":
            found.setdefault("walk", {})[row["dtype"]] = {
                "one_step": [curve[0] for curve in row["distances"]],
                "last_step": [curve[-1] for curve in row["distances"]],
                "effective": row["effective"],
            }
    return found


def _trained(own: Sequence[Row], default: Sequence[Row]) -> dict[str, Any]:
    """Summarise losses by dtype and rate, and ratios to the manifold's default retraction.

    The ratio is a geometric mean over seeds, paired by seed. `diverged` counts seeds without a
    finite loss; if it is positive, loss and ratio are None.
    """
    mine, others = _losses(own), _losses(default)
    if not mine:
        return {}
    found: dict[str, Any] = {}
    for (dtype, rate), values in mine.items():
        lost = sum(value is None for value in values)
        entry: dict[str, Any] = {"diverged": lost, "loss": None, "ratio": None}
        if not lost:
            entry["loss"] = mean_estimate(values)._asdict()
            base = others.get((dtype, rate), [None])
            if None not in base:
                entry["ratio"] = _ratio(values, base)
        found.setdefault(dtype, {})[f"{rate:g}"] = entry
    return {"training": found}


def _ratio(values: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    log = mean_estimate(np.log(np.divide(values, base)))
    interval = log.interval and tuple(float(end) for end in np.exp(log.interval))
    return {"value": float(np.exp(log.value)), "interval": interval}


def _losses(rows: Iterable[Row]) -> dict[tuple[str, float], list[Any]]:
    found: dict[tuple[str, float], list[Any]] = {}
    for row in rows:
        if row["part"] == "training":
            found.setdefault((row["dtype"], row["rate"]), []).append(row["loss_on_the_set"])
    return found


def _least(trained: Mapping[str, Any] | None) -> str:
    """Format the loss at the best rate."""
    losses = [entry["loss"] for entry in (trained or {}).values() if entry["loss"]]
    if not losses:
        return "-"
    best = min(losses, key=lambda loss: loss["value"])
    half = half_width(best["interval"])
    return f"{best['value']:.1e}" + ("" if half is None else f" ± {half:.0e}")
