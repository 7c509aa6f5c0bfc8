"""Weight spaces: which set of matrices suits which network?"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from manifoldmuon.lab import best_rate, excess_loss, half_width, interleaved_seconds
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
from manifoldmuon.manifolds.retractions import Clip
from manifoldmuon.manifolds.solvers import FAST, DouglasRachford
from manifoldmuon.modules import Linear, Module
from manifoldmuon.norms import FanRatio, RMSToRMS, RootRank, Spectral, scale_of
from manifoldmuon.optim import manifold_muon
from studies.display import COLOURS, dress, panels, short, text_table
from studies.estimates import at_best_rate, estimate, shown
from studies.networks.architectures import Architecture, Funnel, Transformer
from studies.networks.descent import Descent, late_loss
from studies.networks.methods import MOMENTUM, Method
from studies.networks.tasks import IMAGES, TEXTS, Characters, Pictures, Task
from studies.study import Cell, Record, Row, Study, option

MUON, FROBENIUS, STIEFEL = "Muon", "Frobenius", "Stiefel"


@functools.lru_cache(maxsize=4)
def sets_of(scale: float) -> dict[str, Manifold]:
    """The sets of the hidden matrices by name: semi-orthogonal matrices lie in all of them.

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
        STIEFEL: Stiefel(ratio, solver=FAST),
        "ball, tangent steps": SpectralBall(ratio, DouglasRachford(steps=2), clip, norm),
    }


SETS = tuple(sets_of(1.0))

EXPONENTS = {"gpt": (-4, 0), "images": (-6, -2)}
"""The grids of learning rates in powers of two."""

METRICS = ("held_out_losses", "held_out_errors", "losses")

WARM = 8
"""Steps before the clock: solvers that go on from the last step's answer have one."""


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


@dataclasses.dataclass(frozen=True)
class WeightSpaces(Study):
    """Which set of matrices suits which network?

    Trains a character GPT and an image classifier with their hidden matrices on one set after the
    other: free (Muon), of fixed Frobenius norm, on the spectral sphere, in the spectral ball, in
    spectral bands, on the Stiefel manifold. All else is the same: the first weights (semi-
    orthogonal), the batches, the spectral norm of the steps, the grid of learning rates, and
    embedding and head, which are free. Each set counts at its own best rate, chosen for each seed
    by the other seeds; differences from Muon are paired by seed. Beside the losses: best rates at
    twice the width, losses at half and twice the best rate, losses after fewer steps, singular
    values at the end, and the time of a step.
    """

    name: ClassVar[str] = "weight-spaces"

    # fmt: off
    networks: tuple[str, ...] = option(
        ("gpt", "images"), "what is trained", choices=tuple(EXPONENTS))
    sets: tuple[str, ...] = option(
        SETS[:-1], "of the hidden matrices, Muon among them", choices=SETS)
    scale: float = option(1.0, "of the hidden matrices, first and last")
    width: int = option(32, "of the GPT, of two heads")
    blocks: int = option(2, "of the GPT")
    context: int = option(32, "characters of a window")
    hidden: tuple[int, ...] = option((64, 32), "widths of the hidden layers of the classifier")
    steps: int = option(200, "of each training; the rate falls linearly to zero")
    fewer: int = option(150, "of the shorter trainings of Muon and of fixed Frobenius norm")
    multiplier: float = option(4.0, "of the scores")
    images: str = option("digits", "for the classifier", choices=IMAGES)
    text: str = option("pydoc", "for the GPT", choices=TEXTS)
    data_dir: Path | None = option(None, "with the files of the data", recorded=False)
    images_per_step: int = option(64, "the batch of images")
    windows_per_step: int = option(8, "the batch of windows of text")
    widen: int = option(0, "octaves by which each grid of rates is longer at both ends")
    rounds: int = option(15, "of the timing")
    seeds: tuple[int, ...] = option((0, 1, 2, 3, 4), "of the first weights and of the batches")
    wide_seeds: tuple[int, ...] = option((0,), "those at twice the width, among the others")
    # fmt: on

    def __post_init__(self):
        counts = (self.blocks, self.context, self.images_per_step, self.windows_per_step,
                  self.rounds, *self.hidden)  # fmt: skip
        if min(counts) < 1 or not self.hidden or self.width < 4 or self.width % 4:
            raise ValueError(
                "blocks, context, batches, rounds and hidden widths must be at least 1, and width "
                f"a multiple of 4; got {counts} and {self.width}"
            )
        if not 1 <= self.fewer < self.steps:
            raise ValueError(
                f"fewer must be at least 1 and less than steps; got {self.fewer}, {self.steps}"
            )
        if not self.networks or MUON not in self.sets:
            raise ValueError(
                f"there must be a network, and {MUON} among the sets, with which all else is "
                f"compared; got {self.networks} and {self.sets}"
            )
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"there must be a seed, and seeds must differ; got {self.seeds}")
        if not set(self.wide_seeds) <= set(self.seeds):
            raise ValueError(
                f"wide_seeds must be among the seeds; got {self.wide_seeds} and {self.seeds}"
            )
        if self.widen < 0 or min(self.multiplier, self.scale) <= 0:
            raise ValueError(
                "widen must be at least 0, multiplier and scale positive; got "
                f"{self.widen}, {self.multiplier}, {self.scale}"
            )

    def cells(self) -> Sequence[Cell]:
        short = [name for name in (MUON, FROBENIUS) if name in self.sets]
        parts = (("base", self.sets, self.seeds), ("fewer", short, self.seeds),
                 ("wide", self.sets, self.wide_seeds))  # fmt: skip
        trained: list[Cell] = [
            {"part": part, "network": network, "set": name, "seed": seed}
            for network in self.networks
            for part, sets, seeds in parts
            for name in sets
            for seed in seeds
        ]
        return trained + [{"part": "cost", "network": network} for network in self.networks]

    def timed(self, cell: Cell) -> bool:
        return cell["part"] == "cost"

    def run(self, cell: Cell) -> Mapping[str, Any]:
        if cell["part"] == "cost":
            return {"seconds": self._seconds(cell["network"])}
        descent = self._descent(cell["part"], cell["network"], cell["set"])
        exponents = descent.method.grid(self.widen)
        trained = descent.train(2.0 ** np.array(exponents), cell["seed"])
        loss, error = descent.judge(trained)
        return {
            "log2_rates": exponents,
            "losses": late_loss(np.asarray(trained.loss)),
            "held_out_losses": loss,
            "held_out_errors": error,
            "spectra": self._spectra(cell, trained.final),
        }

    def summarise(self, rows: Sequence[Row]) -> Mapping[str, Any]:
        return {
            network: _summary([row for row in rows if row["network"] == network])
            for network in self.networks
        }

    def table(self, record: Record) -> str:
        return "\n".join(_table(network, found) for network, found in record["summary"].items())

    def plot(self, record: Record) -> Any:
        return picture(record)

    def _problem(self, network: str, factor: int) -> tuple[Architecture, Task]:
        """The network, so many times as wide, and its task."""
        if network == "gpt":
            task = Characters(self.windows_per_step, self.data_dir, self.text, self.context)
            return Transformer(factor * self.width, self.blocks), task
        pictures = Pictures(self.images_per_step, self.data_dir, self.images)
        return Funnel(tuple(factor * size for size in self.hidden)), pictures

    def _descent(self, part: str, network: str, name: str) -> Descent:
        architecture, task = self._problem(network, 2 if part == "wide" else 1)
        method = Hidden(sets_of(self.scale)[name], EXPONENTS[network], self.scale)
        module = method.network(architecture, task.inputs, task.classes)
        steps = self.fewer if part == "fewer" else self.steps
        return Descent(method, module, task, steps, 1, self.multiplier)

    def _spectra(self, cell: Cell, final: Any) -> dict[str, list[float]]:
        """Of all hidden matrices relative to their scale, for each rate: the smallest, the median
        and the largest singular value, and the median of the condition numbers."""
        marked = self._descent(cell["part"], cell["network"], STIEFEL).network.geometry()
        weights, structure = jax.tree.flatten(final)
        manifolds = structure.flatten_up_to(marked)
        values, conditions = [], []
        for weight, manifold in zip(weights, manifolds, strict=True):
            if isinstance(manifold, Stiefel):
                size = scale_of(manifold.scale, weight.shape[-2:])
                found = _singular_values(np.asarray(weight, np.float64) / size)
                conditions.append((found[..., 0] / found[..., -1]).reshape(len(found), -1))
                values.append(found.reshape(len(found), -1))
        every, condition = np.concatenate(values, axis=1), np.concatenate(conditions, axis=1)
        return {
            "smallest": every.min(axis=1).tolist(),
            "median": np.median(every, axis=1).tolist(),
            "largest": every.max(axis=1).tolist(),
            "condition": np.median(condition, axis=1).tolist(),
        }

    def _seconds(self, network: str) -> dict[str, float]:
        """Of the gradient, which is the same for all, and of each set's update."""
        functions: dict[str, Any] = {}
        plain = self._descent("base", network, MUON)
        gradient = jax.jit(jax.grad(plain.loss))
        order = jnp.asarray(plain.task.order(WARM, 0))
        train = jax.tree.map(jnp.asarray, plain.task.parts().train)
        rate = 2.0 ** float(np.mean(EXPONENTS[network]))
        for name in self.sets:
            descent = self._descent("base", network, name)
            tx = descent.method.optimizer(rate, descent.network)
            weights = descent.start(0)
            state = tx.init(weights)
            update = jax.jit(functools.partial(_updated, tx))
            for chosen in order:
                x, y = plain.task.batch_of(train, chosen)
                grads = gradient(weights, x, y)
                functions["gradient"] = functools.partial(gradient, weights, x, y)
                functions[name] = functools.partial(update, grads, state, weights)
                weights, state = functions[name]()
        return interleaved_seconds(functions, self.rounds, middle=min)


def _updated(tx: optax.GradientTransformation, grads: Any, state: Any, weights: Any) -> Any:
    updates, state = tx.update(grads, state, weights)
    return optax.apply_updates(weights, updates), state


def _singular_values(matrices: np.ndarray) -> np.ndarray:
    """In descending order; NaN for a tree of weights, the first axis, that broke down."""
    fine = np.isfinite(matrices).all(axis=tuple(range(1, matrices.ndim)))
    found = np.linalg.svd(np.where(fine.reshape(-1, *(1,) * (matrices.ndim - 1)), matrices, 0.0),
                          compute_uv=False)  # fmt: skip
    found[~fine] = np.nan
    return found


# --- Findings ----------------------------------------------------------------------------------


def _summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Of one network."""

    def of(part: str, name: str) -> list[Row]:
        return [row for row in rows if row["part"] == part and row["set"] == name]

    def at_best(part: str, name: str, metric: str) -> tuple[np.ndarray, int]:
        return at_best_rate(np.array([row[metric] for row in of(part, name)], np.float64))

    (seconds,) = [row["seconds"] for row in rows if row["part"] == "cost"]
    sets: dict[str, Any] = {}
    for name in dict.fromkeys(row["set"] for row in rows if row["part"] != "cost"):
        sets[name] = _at_best_rates(of("base", name)) | {
            "step": (seconds["gradient"] + seconds[name]) / (seconds["gradient"] + seconds[MUON]),
            "update": seconds[name] / seconds[MUON],
        }
        for metric in METRICS:
            mine, muons = at_best("base", name, metric)[0], at_best("base", MUON, metric)[0]
            sets[name][metric] = {
                **estimate(mine), "by_seed": mine.tolist(), "over_muon": estimate(mine - muons),
            }  # fmt: skip
            if of("fewer", name):
                sets[name][metric]["fewer_over_muon"] = estimate(
                    at_best("fewer", name, metric)[0] - muons
                )
        if wide := of("wide", name):
            sets[name]["wide"] = _transfer(of("base", name), wide)
    return {"sets": sets, "gradient_over_muon": seconds["gradient"] / seconds[MUON]}


def _at_best_rates(rows: Sequence[Row]) -> dict[str, Any]:
    """The best rate, what half and twice the rate cost, and the singular values at the end."""
    curves = np.array([row["held_out_losses"] for row in rows], np.float64)
    exponents = rows[0]["log2_rates"]
    _, at = at_best_rate(curves)
    found: dict[str, Any] = {
        "log2_rate": exponents[at],
        "edge": "below" if at == 0 else "above" if at == len(exponents) - 1 else "",
        "best": best_rate(exponents, curves.tolist())._asdict(),
        "spectra": {
            key: estimate([row["spectra"][key][at] for row in rows])["mean"]
            for key in rows[0]["spectra"]
        },
    }
    for key, neighbour in (("half", at - 1), ("twice", at + 1)):
        inside = 0 <= neighbour < len(exponents)
        found[key] = estimate(curves[:, neighbour] - curves[:, at]) if inside else None
    return found


def _transfer(base: Sequence[Row], wide: Sequence[Row]) -> dict[str, Any]:
    """How the best rate moves when the width doubles, paired by seed, and what it would cost to
    keep the old one."""
    exponents = wide[0]["log2_rates"]
    seeds = [row["seed"] for row in wide]
    narrow = [row["held_out_losses"] for row in base if row["seed"] in seeds]
    curves = [row["held_out_losses"] for row in wide]
    before = best_rate(exponents, narrow).by_seed
    after = best_rate(exponents, curves).by_seed
    known = [(old, new, excess_loss(exponents, curve, old))
             for old, new, curve in zip(before, after, curves, strict=True)
             if old is not None and new is not None]  # fmt: skip
    known = known if len(known) == len(curves) else []
    return {
        "loss": estimate(at_best_rate(np.array(curves, np.float64))[0]),
        "octaves": estimate([new - old for old, new, _ in known]),
        "price": estimate([price for _, _, price in known]),
    }


def _table(network: str, summary: Mapping[str, Any]) -> str:
    lines, others = [], []
    for name, found in summary["sets"].items():
        edge = f" ({found['edge']})" if found["edge"] else ""
        loss = found["held_out_losses"]
        lines.append([
            name, *(shown(found[metric], ".4f") for metric in METRICS[:2]),
            *(shown(found[metric]["over_muon"], "+.4f") for metric in METRICS),
            shown(loss.get("fewer_over_muon"), "+.4f"),
        ])  # fmt: skip
        spectra, wide = found["spectra"], found.get("wide", {})
        others.append([
            name, f"{found['log2_rate']}{edge}", shown(found["best"] | {
                "value": found["best"]["log2_rate"]}, "+.2f"),
            shown(found["half"], "+.3f"), shown(found["twice"], "+.3f"),
            shown(wide.get("octaves"), "+.2f"), shown(wide.get("loss"), ".4f"),
            *(short(spectra[key], ".3g") for key in spectra),
            f"{found['step']:.2f}", f"{found['update']:.2f}",
        ])  # fmt: skip
    return "\n".join([
        f"{network}: each set at its best rate, and beyond Muon, paired by seed",
        text_table(["", "held-out loss", "held-out error", "loss beyond Muon", "error beyond",
                    "training loss beyond", "fewer steps: loss beyond"], lines),
        f"\n{network}: log2 of the best rate, the loss at half and twice that rate, the move of the"
        " best rate at twice the width,\nsingular values at the end, and the time of a step and of"
        " its update against Muon's",
        text_table(["", "grid", "best rate", "half", "twice", "octaves", "loss, wide", "smallest",
                    "median", "largest", "condition", "step", "update"], others),
        "",
    ])  # fmt: skip


def picture(record: Record) -> Any:
    """A row for each network: losses beyond Muon's, losses over the rate, singular values."""
    summary = record["summary"]
    figure, grid = panels(len(summary), 3, width=5.0, height=3.9)
    for (beyond, curves, values), (network, found) in zip(grid, summary.items(), strict=True):
        data = record["settings"]["text" if network == "gpt" else "images"]
        sets = found["sets"]
        palette = dict(zip(SETS, [COLOURS[-1], *COLOURS[:-1], "#999933"], strict=True))
        colours = {name: palette[name] for name in sets}
        _beyond(beyond, sets, colours)
        dress(beyond, f"{network}, {data}", "each set at its best rate, paired by seed, 95 %",
              "held-out loss beyond Muon's (nats)", "")  # fmt: skip
        rows = [r for r in record["rows"] if r["network"] == network and r["part"] == "base"]
        for name, colour in colours.items():
            own = [row for row in rows if row["set"] == name]
            losses = np.array([row["held_out_losses"] for row in own], np.float64).mean(axis=0)
            curves.plot(own[0]["log2_rates"], losses, "o-", color=colour, markersize=3,
                        linewidth=1.4, label=name)  # fmt: skip
        best = min(s["held_out_losses"]["mean"] for s in sets.values())
        curves.set_ylim(best - 0.05, best + 0.75)
        curves.set_xticks(rows[0]["log2_rates"])
        curves.legend(frameon=False, fontsize=7)
        dress(curves, "Sensitivity to the rate", "means over seeds", "log2 of the learning rate",
              "held-out loss")  # fmt: skip
        _ranges(values, sets, colours)
        dress(values, "Singular values at the end", "smallest (from 0.001), median and largest of "
              "all hidden matrices", "relative to the scale", "")  # fmt: skip
    return figure


def _beyond(panel: Any, sets: Mapping[str, Any], colours: Mapping[str, str]) -> None:
    panel.axvline(0, color="#444444", linewidth=1)
    for y, (name, found) in enumerate(sets.items()):
        over = found["held_out_losses"]["over_muon"]
        panel.errorbar([over["mean"]], [y], xerr=half_width(over["interval"]), fmt="o", capsize=3,
                       color=colours[name], markersize=5, elinewidth=1.3)  # fmt: skip
    panel.set_yticks(range(len(sets)), list(sets))
    panel.invert_yaxis()


def _ranges(panel: Any, sets: Mapping[str, Any], colours: Mapping[str, str]) -> None:
    for y, (name, found) in enumerate(sets.items()):
        spectra = found["spectra"]
        if None in spectra.values():  # a training broke down
            continue
        panel.plot([max(spectra["smallest"], 1e-3), spectra["largest"]], [y, y], "|-",
                   color=colours[name], linewidth=1.6, markersize=9)  # fmt: skip
        panel.plot([spectra["median"]], [y], "o", color=colours[name], markersize=5)
    panel.set_xscale("log")
    lowest = min(max(found["spectra"]["smallest"] or 1, 1e-3) for found in sets.values())
    highest = max(found["spectra"]["largest"] or 1 for found in sets.values())
    ticks = [x for x in (1e-3, 0.01, 0.1, 0.3, 1, 3, 10, 30) if lowest / 2 < x < 2 * highest]
    panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    panel.minorticks_off()
    panel.set_yticks(range(len(sets)), list(sets))
    panel.invert_yaxis()
