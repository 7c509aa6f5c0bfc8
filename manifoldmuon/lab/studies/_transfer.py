"""Learning-rate transfer: whether the best learning rate moves with the size of a network."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from manifoldmuon.lab._figures import text_table
from manifoldmuon.lab._intervals import mean, shown, slope
from manifoldmuon.lab._rates import BestRate, best_rate, excess, late, rate_drift
from manifoldmuon.lab._study import Cell, Record, Row, Study, option
from manifoldmuon.lab.studies._architectures import Residual, Transformer
from manifoldmuon.lab.studies._descent import Descent
from manifoldmuon.lab.studies._effects import at_best_rate
from manifoldmuon.lab.studies._methods import METHODS
from manifoldmuon.lab.studies._sweeps import SWEEPS, Data
from manifoldmuon.lab.studies._tasks import IMAGES, TEXTS
from manifoldmuon.lab.studies._transfer_picture import draw

RATES = "rates"
MASS = "mass"
MASS_METHOD = "modular"
BELOW = 3


@dataclasses.dataclass(frozen=True)
class LearningRateTransfer(Study):
    """Does the best learning rate stay when a network grows?

    Trains networks of several sizes with each method over a grid of learning rates, an octave
    apart. A parabola through the loss around its lowest point gives each seed's best rate; a
    line through all seeds and sizes gives the drift in octaves per doubling. In the same runs the
    coordinate check compares how far the features of each layer move in the first steps, and
    other masses of the residual blocks show what the share of the learning is worth.
    """

    name: ClassVar[str] = "transfer"

    # fmt: off
    sweeps: tuple[str, ...] = option(
        ("mlp-width", "resmlp-depth", "gpt-width"), "which size grows", choices=tuple(SWEEPS))
    methods: tuple[str, ...] = option(tuple(METHODS), "ways of training", choices=tuple(METHODS))
    sizes: tuple[int, ...] = option((), "of every sweep; left out: each sweep's own")
    mass_sweeps: tuple[str, ...] = option(
        ("resmlp-depth",), "those of the sweeps where block masses are compared, at both ends",
        choices=tuple(name for name, sweep in SWEEPS.items() if hasattr(sweep.base, "mass")))
    masses: tuple[float, ...] = option((0.5, 1.0, 3.0, 10.0), "of all blocks")
    widen: int = option(0, "octaves by which each grid is longer at both ends")
    steps: int = option(100, "of each training; the rate falls linearly to zero")
    early: int = option(5, "steps after which features are compared")
    multiplier: float = option(4.0, "of the scores of images in the modular parametrisation")
    text_multiplier: float = option(1.0, "of those of text")
    images: str = option("digits", "for the networks without attention", choices=IMAGES)
    text: str = option("pydoc", "for the GPT", choices=TEXTS)
    data_dir: Path | None = option(None, "with the files of the data", recorded=False)
    images_per_step: int = option(32, "the batch of images")
    windows_per_step: int = option(8, "the batch of windows of text")
    context: int = option(32, "characters of a window")
    seeds: tuple[int, ...] = option((0, 1, 2, 3), "of the first weights and of the batches")
    # fmt: on

    def __post_init__(self):
        least = min(self.steps, self.early, self.images_per_step, self.windows_per_step)
        if least < 1 or self.early > self.steps:
            raise ValueError(
                "steps, early and the batches must be at least 1, and early at most steps; got "
                f"steps={self.steps}, early={self.early}, images_per_step={self.images_per_step}, "
                f"windows_per_step={self.windows_per_step}"
            )
        if not (self.sweeps and self.methods and self.seeds):
            raise ValueError("there must be at least one sweep, one method and one seed")
        if len(set(self.seeds)) < len(self.seeds) or self.widen < 0:
            raise ValueError(
                f"seeds must differ and widen be at least 0; got {self.seeds}, {self.widen}"
            )
        if min(self.multiplier, self.text_multiplier) <= 0:
            raise ValueError(
                f"multipliers must be positive; got {self.multiplier}, {self.text_multiplier}"
            )
        if not self.masses or min(self.masses) <= 0:
            raise ValueError(f"masses must be positive; got {self.masses}")
        for name in set(self.sweeps) & set(SWEEPS):
            _check_sizes(name, self._sizes(name))

    def cells(self) -> Sequence[Cell]:
        cells: list[Cell] = [
            {"part": RATES, "sweep": sweep, "method": method, "size": size, "seed": seed}
            for sweep in self.sweeps
            for size in self._sizes(sweep)
            for method in self.methods
            for seed in self.seeds
        ]
        return cells + [
            {"part": MASS, "sweep": sweep, "method": MASS_METHOD, "size": size, "mass": mass,
             "seed": seed}
            for sweep in self._mass_sweeps()
            for size in (self._sizes(sweep)[0], self._sizes(sweep)[-1])
            for mass in self.masses
            for seed in self.seeds
        ]  # fmt: skip

    def run(self, cell: Cell) -> Mapping[str, Any]:
        sweep, method = SWEEPS[cell["sweep"]], METHODS[cell["method"]]
        task = sweep.task(cell["size"], self._data())
        architecture = sweep.architecture(cell["size"])
        if cell["part"] == MASS:
            assert isinstance(architecture, Residual | Transformer)
            architecture = dataclasses.replace(architecture, mass=cell["mass"])
        network = method.network(architecture, task.inputs, task.classes)
        multiplier = self.text_multiplier if sweep.reads else self.multiplier
        exponents = self._exponents(cell["method"])
        multiplier = multiplier if method.scaled else 1.0
        descent = Descent(method, network, task, self.steps, self.early, multiplier)
        trained = descent.train(2.0 ** np.array(exponents), cell["seed"])
        found = {
            "log2_rates": exponents,
            "first_loss": trained.loss[0, 0],
            "losses": late(np.asarray(trained.loss)),
        }
        if cell["part"] == RATES and sweep.axis == "width":
            found["changes"] = descent.changes(trained, cell["seed"])
        return found

    def summarise(self, rows: Sequence[Row]) -> Mapping[str, Any]:
        rates = [row for row in rows if row["part"] == RATES]
        summary = {}
        for sweep in self.sweeps:
            summary[sweep] = {}
            for method in self.methods:
                own = [r for r in rates if r["sweep"] == sweep and r["method"] == method]
                best = {size: _best(own, size) for size in self._sizes(sweep)}
                entry: dict[str, Any] = {"best": {str(n): b._asdict() for n, b in best.items()}}
                entry |= rate_drift(best)._asdict() | {"price": _price(own, best)}
                if SWEEPS[sweep].axis == "width":
                    entry["coordinates"] = _coordinates(own, best)
                summary[sweep][method] = entry
        masses = [row for row in rows if row["part"] == MASS]
        return {"transfer": summary, "masses": {s: _masses(masses, s) for s in self._mass_sweeps()}}

    def table(self, record: Record) -> str:
        summary = record["summary"]
        lines = [
            [f"{sweep}, {method}", *_best_texts(found), _signed(found, "octaves_per_doubling"),
             _signed(found, "span", "span_interval"), found["steady"], _percent(found["price"])]
            for sweep, methods in summary["transfer"].items()
            for method, found in methods.items()
        ]  # fmt: skip
        header = ["log2 of the best rate", "smallest", "largest", "octaves per doubling",
                  "smallest to largest", "within half an octave",
                  "price of the smallest's rate"]  # fmt: skip
        changes = [
            [f"{sweep}, {method}"] + [_signed(value, "slope")
                                      for value in found["coordinates"]["layers"].values()]
            for sweep, methods in summary["transfer"].items()
            for method, found in methods.items()
            if found.get("coordinates")
        ]  # fmt: skip
        masses = [
            [f"{sweep} {size}", *(shown(x["value"], x["interval"], ".4f") for x in found["losses"])]
            for sweep, sizes in summary["masses"].items()
            for size, found in sizes.items()
        ]
        texts = [text_table(header, lines)]
        if changes:
            columns = max(map(len, changes)) - 1
            changes = [line + [""] * (columns + 1 - len(line)) for line in changes]
            texts += ["\nthe coordinate check: change of features, slope in log2 over log2(width)",
                      text_table(["", *[f"layer {i}" for i in range(1, columns + 1)]],
                                 changes)]  # fmt: skip
        if masses:
            texts += ["\nthe loss at the best rate, by the mass of the blocks",
                      text_table(["", *(f"{mass:g}" for mass in self.masses)], masses)]  # fmt: skip
        return "\n".join(texts)

    def plot(self, record: Record) -> Any:
        return draw(record)

    def _mass_sweeps(self) -> list[str]:
        return [sweep for sweep in self.mass_sweeps if sweep in self.sweeps]

    def _sizes(self, sweep: str) -> tuple[int, ...]:
        return self.sizes or SWEEPS[sweep].sizes

    def _exponents(self, method: str) -> list[int]:
        low, high = METHODS[method].exponents
        return list(range(low - self.widen, high + self.widen + 1))

    def _data(self) -> Data:
        return Data(self.images, self.text, self.data_dir, self.images_per_step,
                    self.windows_per_step, self.context)  # fmt: skip


def _check_sizes(name: str, sizes: tuple[int, ...]) -> None:
    if len(sizes) < 2 or list(sizes) != sorted(set(sizes)):
        raise ValueError(f"sizes must be two or more, ascending; got {sizes}")
    for size in sizes:
        try:
            SWEEPS[name].check(size)
        except ValueError as error:
            raise ValueError(f"the sizes of {name} {error}") from error


def _best(rows: Sequence[Row], size: int) -> BestRate:
    own = [row for row in rows if row["size"] == size]
    return best_rate(own[0]["log2_rates"], [row["losses"] for row in own])


def _price(rows: Sequence[Row], best: Mapping[int, BestRate]) -> dict[str, Any] | None:
    """How much higher the logarithm of the largest network's loss is at the smallest one's best
    rate than at its own."""
    smallest = best[min(best)].log2_rate
    own = [row for row in rows if row["size"] == max(best)]
    if smallest is None:
        return None
    prices = [excess(row["log2_rates"], row["losses"], smallest) for row in own]
    known = [price for price in prices if price is not None]
    return mean(known)._asdict() if len(known) == len(own) else None


def _coordinates(rows: Sequence[Row], best: Mapping[int, BestRate]) -> dict[str, Any] | None:
    """The slopes at one rate for all widths, some octaves below the narrowest network's best.

    There features respond in proportion to the rate; near the best one they saturate.
    """
    narrow = best[min(best)].log2_rate
    if narrow is None:
        return None
    exponents = rows[0]["log2_rates"]
    at = int(np.argmin(np.abs(np.subtract(exponents, narrow - BELOW))))
    layers = {}
    for layer in rows[0]["changes"]:
        pairs = [(row["size"], row["changes"][layer][at]) for row in rows]
        if any(not change for _, change in pairs):  # none, or not a number
            layers[layer] = {"slope": None, "interval": None}
            continue
        x, y = zip(*pairs, strict=True)
        line = slope(np.log2(x).tolist(), np.log2(y).tolist())
        layers[layer] = {"slope": line.value, "interval": line.interval}
    return {"log2_rate": exponents[at], "layers": layers}


def _masses(rows: Sequence[Row], sweep: str) -> dict[str, Any]:
    """By size: for every mass the loss at its best rate and that rate, and the best mass.

    As in the ablation, the rate of a seed is the one that is best for the other seeds.
    """
    own = [row for row in rows if row["sweep"] == sweep]
    found: dict[str, Any] = {}
    for size in dict.fromkeys(row["size"] for row in own):
        here = [row for row in own if row["size"] == size]
        masses = list(dict.fromkeys(row["mass"] for row in here))
        curves = [[r["losses"] for r in here if r["mass"] == mass] for mass in masses]
        losses = [mean(at_best_rate(np.array(each, np.float64))[0]) for each in curves]
        grid = here[0]["log2_rates"]
        found[str(size)] = {
            "masses": masses,
            "losses": [loss._asdict() for loss in losses],
            "log2_rates": [best_rate(grid, each)._asdict() for each in curves],
            "best_mass": masses[int(np.argmin([loss.value for loss in losses]))],
        }
    return found


def _best_texts(found: Mapping[str, Any]) -> list[str]:
    ends = list(found["best"].values())
    return [_best_text(ends[0]), _best_text(ends[-1])]


def _best_text(best: Mapping[str, Any]) -> str:
    if best["edge"]:
        return f"{best['edge']} the grid"
    return _signed(best, "log2_rate")


def _percent(price: Mapping[str, Any] | None) -> str:
    """Of the loss itself, from its logarithm."""
    if price is None:
        return "-"
    ends = price["interval"] and [100 * math.expm1(end) for end in price["interval"]]
    return shown(100 * math.expm1(price["value"]), ends, "+.1f") + " %"


def _signed(found: Mapping[str, Any], value: str, interval: str = "interval") -> str:
    return shown(found[value], found[interval], "+.2f")
