"""The retraction laboratory: what each way back to the set does, and what it costs."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from manifoldmuon.lab import _training, _walks
from manifoldmuon.lab._classifier import shapes_of
from manifoldmuon.lab._figures import COLOURS, dress, panels, short, text_table
from manifoldmuon.lab._spaces import SPACES
from manifoldmuon.lab._study import Cell, Record, Row, Study, option

NAMES = tuple(dict.fromkeys(name for space in SPACES.values() for name in space.retractions))
DTYPES = ("float32", "bfloat16")
PARTS = ("order", "walk", "cost", "training")
WIDTHS = (64, 64)

# A retraction and its counterpart on the sphere share a colour.
_COLOUR = dict(zip(NAMES, COLOURS, strict=False))
_COLOUR |= {"normalize": _COLOUR["polar"], "geodesic": _COLOUR["exponential"]}


@dataclasses.dataclass(frozen=True)
class RetractionLaboratory(Study):
    """Which retraction should a user choose, and when?

    For every manifold, retraction, dtype and step size: the order of accuracy, as the slope of
    the distance from the geodesic in float64; the distance from the set after one step and after
    many, along steepest directions of random gradients; the effective step |R(W, eta A) - W| /
    eta; the cost in products of the same size; and the final loss of a small classifier of
    digits, as it is and with its weights put back on the set. Two baselines are included: none,
    and the published scalar 1 / sqrt(1 + eta^2).
    """

    name: ClassVar[str] = "retractions"

    parts: tuple[str, ...] = option(PARTS, "what is measured", choices=PARTS)
    manifolds: tuple[str, ...] = option(tuple(SPACES), "on which", choices=tuple(SPACES))
    retractions: tuple[str, ...] = option(NAMES, "which, where they fit", choices=NAMES)
    dtypes: tuple[str, ...] = option(DTYPES, "in which the weights are kept", choices=DTYPES)
    rates: tuple[float, ...] = option((0.01, 0.1, 1.0), "step sizes, as angles")
    walk_steps: int = option(1000, "of the random walks; 100000 takes half an hour")
    train_steps: int = option(200, "of training")
    seeds: tuple[int, ...] = option((0, 1, 2), "of training; the first is that of all else")

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
            if name in self.retractions
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
        where = cell["manifold"], cell["retraction"]
        if cell["part"] == "order":
            return _walks.order(*where, cell["seed"])
        if cell["part"] == "cost":
            return _walks.cost(*where, cell["seed"])
        if cell["part"] == "walk":
            return _walks.walk(*where, cell["dtype"], self.rates, self.walk_steps, cell["seed"])
        return self._train(cell)

    def _train(self, cell: Cell) -> Mapping[str, Any]:
        data, space = _training.digits(cell["seed"]), SPACES[cell["manifold"]]
        retraction = space.retractions[cell["retraction"]]
        shapes = shapes_of(data.widths(WIDTHS))
        geometry = tuple(space.build(retraction, shape) for shape in shapes)
        found = _training.train(
            data, geometry, WIDTHS, cell["rate"], self.train_steps, cell["seed"], cell["dtype"]
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
        found: dict[str, Any] = {}
        for space, name in self._pairs():
            mine = [r for r in rows if (r["manifold"], r["retraction"]) == (space, name)]
            found.setdefault(space, {})[name] = self._summary_of(mine)
        for space, entries in found.items():
            best = {name: e.get("training", {}).get("float32") for name, e in entries.items()}
            base = best.get(next(iter(SPACES[space].retractions)))
            for name, mine in best.items():
                if mine and base:
                    against = np.subtract(mine["losses"], base["losses"])
                    entries[name]["loss_minus_default"] = _training.mean_and_error(against)
        return found

    def _summary_of(self, rows: Sequence[Row]) -> dict[str, Any]:
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
        trained = [row for row in rows if row["part"] == "training"]
        if trained:
            found["training"] = {dtype: self._best(trained, dtype) for dtype in self.dtypes}
        return found

    def _best(self, rows: Sequence[Row], dtype: str) -> dict[str, Any]:
        """At the rate of the lowest mean loss, all weights put back on the set."""

        def losses(rate: float) -> list[float]:
            here = [row for row in rows if (row["dtype"], row["rate"]) == (dtype, rate)]
            values = [row["loss_on_the_set"] for row in here]
            return [float("inf") if value is None else value for value in values]

        rate = min(self.rates, key=lambda rate: float(np.mean(losses(rate))))
        return {"rate": rate, "losses": losses(rate)}

    def table(self, record: Record) -> str:
        lines = []
        middle = self.rates.index(_middle(self.rates))
        for space, entries in record["summary"].items():
            for name, entry in entries.items():
                walks = [entry.get("walk", {}).get(dtype) for dtype in self.dtypes]
                slope = entry.get("slope", 0)
                lines.append([
                    f"{space}, {name}",
                    "exact" if slope is None else short(slope or None, ".2f"),
                    short(entry.get("error_at_eighth")),
                    *(short(w and w["one_step"][middle]) for w in walks),
                    *(short(w and w["last_step"][middle]) for w in walks),
                    short(walks[0] and walks[0]["effective"][-1], ".3f"),
                    short(entry.get("cost"), ".1f"),
                    short(entry.get("direction_cost"), ".1f"),
                    *(_loss(entry.get("training", {}).get(dtype)) for dtype in self.dtypes),
                ])  # fmt: skip
        header = ["", "slope", "error at 1/8", *(f"1 step, {d}" for d in self.dtypes),
                  *(f"{self.walk_steps} steps, {d}" for d in self.dtypes),
                  f"step at {self.rates[-1]:g}", "cost", "direction",
                  *(f"loss, {d}" for d in self.dtypes)]  # fmt: skip
        legend = (
            f"distances from the set at the rate {self.rates[middle]:g}; costs in products of the "
            "same size;\nlosses at the best of the rates, mean ± standard error over the seeds, "
            "weights put back on the set"
        )
        return f"{text_table(header, lines)}\n{legend}"

    def plot(self, record: Record) -> Any:
        draw = {"order": _orders, "walk": self._drifts, "cost": _costs, "training": self._losses}
        figure, grid = panels(len(self.manifolds), len(self.parts), width=3.9, height=3.1)
        for space, line in zip(self.manifolds, grid, strict=True):
            for part, panel in zip(self.parts, line, strict=True):
                here = (space, part)
                rows = [r for r in record["rows"] if (r["manifold"], r["part"]) == here]
                draw[part](panel, rows)
                panel.set_title(f"{space}: {panel.get_title(loc='left')}", loc="left",
                                fontsize=11, fontweight="bold")  # fmt: skip
        return figure

    def _drifts(self, panel: Any, rows: list[Row]) -> None:
        rate = _middle(self.rates)
        for row in rows:
            curve = _numbers(row["distances"][self.rates.index(rate)])
            first = row["dtype"] == self.dtypes[0]
            panel.plot(row["at"], np.maximum(curve, 1e-8), color=_COLOUR[row["retraction"]],
                       linestyle="-" if first else (0, (3, 2)), marker="o", markersize=3,
                       linewidth=1.6, label=row["retraction"] if first else None)  # fmt: skip
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_ylim(1e-8, 1e4)
        panel.legend(frameon=False, fontsize=7.5, ncols=3, loc="upper left")
        dress(panel, "drift", f"rate {rate:g}, {self._dashes()}", "steps",
              "distance from the set")  # fmt: skip

    def _losses(self, panel: Any, rows: list[Row]) -> None:
        names = list(dict.fromkeys(row["retraction"] for row in rows))
        for k, name in enumerate(names):
            shifted = np.asarray(self.rates) * 1.05 ** (k - len(names) / 2)
            for dtype in self.dtypes:
                mine = [r for r in rows if (r["retraction"], r["dtype"]) == (name, dtype)]
                found = [_mean_loss(mine, rate) for rate in self.rates]
                first = dtype == self.dtypes[0]
                panel.errorbar(shifted, [mean for mean, _ in found], [e or 0 for _, e in found],
                               color=_COLOUR[name], linestyle="-" if first else (0, (3, 2)),
                               marker="o", markersize=3.5, linewidth=1.4,
                               label=name if first else None)  # fmt: skip
        panel.set_xscale("log")
        panel.set_yscale("log")
        low, high = panel.get_ylim()
        panel.set_ylim(low, 30 * high)  # room for the legend
        panel.legend(frameon=False, fontsize=7.5, ncols=3, loc="upper left")
        dress(panel, "training", f"{self._dashes()}; weights put back on the set",
              "learning rate", "final training loss")  # fmt: skip

    def _dashes(self) -> str:
        return self.dtypes[0] + "".join(f", dashed: {dtype}" for dtype in self.dtypes[1:])


def _mean_loss(rows: list[Row], rate: float) -> tuple[float, float | None]:
    """NaN where a training has diverged."""
    return _training.mean_and_error(
        _numbers([row["loss_on_the_set"] for row in rows if row["rate"] == rate])
    )


def _orders(panel: Any, rows: list[Row]) -> None:
    for row in rows:
        slope = "exact" if row["slope"] is None else f"{row['slope']:.1f}"
        panel.plot(row["times"], np.maximum(_numbers(row["errors"]), 1e-17),
                   color=_COLOUR[row["retraction"]], marker="o", markersize=3.5,
                   label=f"{row['retraction']}, {slope}", linewidth=1.6)  # fmt: skip
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_ylim(1e-10, 1)
    panel.legend(frameon=False, fontsize=7.5, ncols=2, loc="upper left")
    dress(panel, "order of accuracy", "with the slope, in float64",
          "step", "distance from the geodesic")  # fmt: skip


def _costs(panel: Any, rows: list[Row]) -> None:
    costs = {row["retraction"]: row for row in rows}
    names = list(costs)[::-1]
    panel.barh(names, [costs[name]["cost"] for name in names], color=[_COLOUR[n] for n in names])
    for k, name in enumerate(names):
        panel.annotate(f"{costs[name]['cost']:.1f}", (costs[name]["cost"], k), xytext=(3, 0),
                       textcoords="offset points", va="center", fontsize=8)  # fmt: skip
    dress(panel, "cost", "of a step at the rate 0.1", "time in products of the same size", "")
    panel.grid(axis="y", visible=False)
    panel.set_xscale("log")
    panel.set_xlim(0.1, 1000)


def _middle(rates: Sequence[float]) -> float:
    return sorted(rates)[(len(rates) - 1) // 2]


def _numbers(values: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values])


def _loss(best: dict[str, Any] | None) -> str:
    if best is None:
        return "-"
    mean, error = _training.mean_and_error(_numbers(best["losses"]))
    return f"{mean:.1e} ± {error or 0:.0e}"
