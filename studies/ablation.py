"""The ablation: the effects of constraint, direction and mass."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from studies.display import COLOURS, dress, panels, text_table
from studies.estimates import at_best_rate, estimate, gain, shown
from studies.networks.architectures import Architecture, Funnel, Transformer
from studies.networks.descent import Descent, late_loss
from studies.networks.methods import ARMS, METHODS, Method
from studies.networks.tasks import IMAGES, TEXTS, Characters, Pictures, Task
from studies.study import Cell, Record, Row, Study, option

BASELINE = ("standard", "plain Adam", "none")
GAINS = {
    "constraint": (0, "manifold", "flat"),
    "direction, steepest or gradient": (1, "steepest", "gradient"),
    "direction, steepest or Adam": (1, "steepest", "Adam"),
    "mass": (2, "modular", "uniform"),
}
"""The index of a factor in an arm, the level with the potential gain, and the level without."""

METRICS = ("held_out_losses", "held_out_errors", "losses")

DRAWN = {"gpt": ("held_out_losses", 1.0, "nats"), "images": ("held_out_errors", 100.0, "% points")}
"""The metric in the picture, its factor and its unit, by network."""


@dataclasses.dataclass(frozen=True)
class Ablation(Study):
    """How much do constraint, direction and mass each contribute?

    Trains a character GPT and an image classifier with every combination of

    * constraint: weights on manifolds, or unconstrained;
    * direction: steepest, the gradient, or Adam's, all scaled to the same norm;
    * mass: budgets from the masses, or equal budgets.

    The baseline is plain Adam on the standard parametrisation. Each arm is evaluated at its best
    learning rate, chosen for each seed by the other seeds; differences are paired by seed.
    """

    name: ClassVar[str] = "ablation"

    # fmt: off
    networks: tuple[str, ...] = option(
        ("gpt", "images"), "what is trained", choices=("gpt", "images"))
    width: int = option(32, "of the GPT, of two heads")
    blocks: int = option(2, "of the GPT")
    context: int = option(32, "characters of a window")
    hidden: tuple[int, ...] = option((128, 64), "widths of the hidden layers of the classifier")
    steps: int = option(100, "of each training; the rate falls linearly to zero")
    multiplier: float = option(4.0, "of the scores, except for the baseline")
    images: str = option("digits", "for the classifier", choices=IMAGES)
    text: str = option("pydoc", "for the GPT", choices=TEXTS)
    data_dir: Path | None = option(None, "with the files of the data", recorded=False)
    images_per_step: int = option(32, "the batch of images")
    windows_per_step: int = option(8, "the batch of windows of text")
    widen: int = option(0, "octaves by which each grid of rates is longer at both ends")
    seeds: tuple[int, ...] = option((0, 1, 2, 3), "of the first weights and of the batches")
    # fmt: on

    def __post_init__(self):
        counts = (self.blocks, self.context, self.steps, self.images_per_step,
                  self.windows_per_step, *self.hidden)  # fmt: skip
        if min(counts) < 1 or not self.hidden or self.width < 4 or self.width % 4:
            raise ValueError(
                "blocks, context, steps, batches and hidden widths must be at least 1, and width "
                f"a multiple of 4; got {counts} and {self.width}"
            )
        if not self.networks or len(set(self.seeds)) < 2 or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(
                "there must be a network and two or more different seeds: one chooses the rate of "
                f"the other; got {self.networks} and {self.seeds}"
            )
        if self.widen < 0 or self.multiplier <= 0:
            raise ValueError(
                "widen must be at least 0 and multiplier positive; got "
                f"{self.widen}, {self.multiplier}"
            )

    def cells(self) -> Sequence[Cell]:
        return [
            {"network": network, "constraint": arm[0], "direction": arm[1], "mass": arm[2],
             "seed": seed}
            for network in self.networks
            for arm in (*ARMS, BASELINE)
            for seed in self.seeds
        ]  # fmt: skip

    def run(self, cell: Cell) -> Mapping[str, Any]:
        method: Method = ARMS.get(_arm(cell)) or METHODS["Adam"]
        architecture, task = self._problem(cell["network"])
        network = method.network(architecture, task.inputs, task.classes)
        exponents = method.grid(self.widen)
        multiplier = self.multiplier if method.scaled else 1.0
        descent = Descent(method, network, task, self.steps, 1, multiplier)
        trained = descent.train(2.0 ** np.array(exponents), cell["seed"])
        loss, error = descent.judge(trained)
        return {
            "log2_rates": exponents,
            "losses": late_loss(np.asarray(trained.loss)),
            "held_out_losses": loss,
            "held_out_errors": error,
        }

    def summarise(self, rows: Sequence[Row]) -> Mapping[str, Any]:
        return {
            network: {metric: _summary([r for r in rows if r["network"] == network], metric)
                      for metric in METRICS}
            for network in self.networks
        }  # fmt: skip

    def table(self, record: Record) -> str:
        texts = []
        for network, metrics in record["summary"].items():
            lines = [
                [" ".join([name, found["edge"]]).strip()]
                + [shown(metrics[m]["arms"][name], "+.4f") for m in METRICS]
                for name, found in metrics[METRICS[0]]["arms"].items()
            ]
            gains = [
                [what, *(shown(metrics[m]["gains"][what], "+.4f") for m in METRICS)]
                for what in metrics[METRICS[0]]["gains"]
            ]
            header = ["held-out loss", "held-out error", "training loss"]
            texts += [
                f"{network}: each arm at its best rate",
                text_table(["", *header], lines),
                f"\n{network}: what each choice buys",
                text_table(["", *header], gains),
                "",
            ]
        return "\n".join(texts)

    def plot(self, record: Record) -> Any:
        return picture(record)

    def _problem(self, network: str) -> tuple[Architecture, Task]:
        if network == "gpt":
            task = Characters(self.windows_per_step, self.data_dir, self.text, self.context)
            return Transformer(self.width, self.blocks), task
        pictures = Pictures(self.images_per_step, self.data_dir, self.images)
        return Funnel(self.hidden), pictures


def _arm(cell: Cell) -> tuple[str, str, str]:
    return cell["constraint"], cell["direction"], cell["mass"]


def _summary(rows: Sequence[Row], metric: str) -> dict[str, Any]:
    """Summarise the arms at their best rates, and the gains."""
    arms, values = {}, {}
    for arm in dict.fromkeys(map(_arm, rows)):
        own = [row for row in rows if _arm(row) == arm]
        curves = np.array([row[metric] for row in own], np.float64)
        values[arm], at = at_best_rate(curves)
        exponents = own[0]["log2_rates"]
        edge = "(at the lowest rate)" if at == 0 else ""
        edge = "(at the highest rate)" if at == len(exponents) - 1 else edge
        arms[", ".join(arm)] = {
            "log2_rate": exponents[at], "edge": edge, **estimate(values[arm]),
            "by_seed": values[arm].tolist(),
        }  # fmt: skip
    baseline = values.pop(BASELINE)
    gains = {what: gain(values, *levels) for what, levels in GAINS.items()}
    whole = values[("manifold", "steepest", "modular")]
    gains["all three, over plain Adam"] = estimate(baseline - whole)
    return {"arms": arms, "gains": gains}


def picture(record: Mapping[str, Any]) -> Any:
    """Plot the gains of each choice and the results of every arm, with a row for each network."""
    summary = record["summary"]
    figure, grid = panels(len(summary), 2, width=6.6, height=4.6)
    for (gains, arms), (network, metrics) in zip(grid, summary.items(), strict=True):
        metric, factor, unit = DRAWN[network]
        data = record["settings"]["text" if network == "gpt" else "images"]
        what = "held-out loss" if network == "gpt" else "held-out error"
        _gains(gains, metrics[metric]["gains"], factor)
        dress(gains, f"{network}, {data}: what each choice buys",
              "dots: mean and 95 % interval, paired by seed; crosses: in each other setting",
              f"{what}, lowered by ({unit})", "")  # fmt: skip
        _arms(arms, metrics[metric]["arms"], factor)
        dress(arms, f"{network}, {data}: every arm at its best rate",
              "mean and 95 % interval over seeds; *: at an end of the grid of rates",
              f"{what} ({unit.removesuffix(' points')})", "")  # fmt: skip
    return figure


def _gains(panel: Any, gains: Mapping[str, Any], factor: float) -> None:
    panel.axvline(0, color="#444444", linewidth=1)
    for y, found in enumerate(gains.values()):
        single = [factor * one["mean"] for one in found.get("by_arm", {}).values()]
        panel.plot(single, np.full(len(single), y + 0.22), "x", color="#767676", markersize=4)
        _bar(panel, found, y, factor, COLOURS[0])
    panel.set_yticks(range(len(gains)), [what.replace(", ", ",\n") for what in gains])
    panel.invert_yaxis()


def _arms(panel: Any, arms: Mapping[str, Any], factor: float) -> None:
    ordered = sorted(arms.items(), key=lambda item: item[1]["mean"])
    for y, (name, found) in enumerate(ordered):
        _bar(panel, found, y, factor, COLOURS[0] if name.startswith("manifold") else
             COLOURS[1] if name.startswith("flat") else COLOURS[-1])  # fmt: skip
    labels = [" ".join([name, "*" if found["edge"] else ""]) for name, found in ordered]
    panel.set_yticks(range(len(ordered)), labels, fontsize=8)
    panel.invert_yaxis()


def _bar(panel: Any, found: Mapping[str, Any], y: int, factor: float, colour: str) -> None:
    low, high = found["interval"]
    middle = factor * found["mean"]
    panel.errorbar([middle], [y], xerr=factor * (high - low) / 2, fmt="o", color=colour,
                   markersize=5, elinewidth=1.3, capsize=3)  # fmt: skip
