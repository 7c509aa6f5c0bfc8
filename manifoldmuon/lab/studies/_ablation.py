"""The ablation: constraint, direction, mass, and which of the three buys what."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from manifoldmuon.lab._figures import text_table
from manifoldmuon.lab._intervals import shown
from manifoldmuon.lab._rates import late
from manifoldmuon.lab._study import Cell, Record, Row, Study, option
from manifoldmuon.lab.studies._ablation_picture import draw
from manifoldmuon.lab.studies._architectures import Architecture, Funnel, Transformer
from manifoldmuon.lab.studies._arms import ARMS
from manifoldmuon.lab.studies._descent import Descent
from manifoldmuon.lab.studies._effects import at_best_rate, estimate, gain
from manifoldmuon.lab.studies._methods import METHODS, Method
from manifoldmuon.lab.studies._tasks import IMAGES, TEXTS, Characters, Pictures, Task

BASELINE = ("standard", "plain Adam", "none")
GAINS = {
    "constraint": (0, "manifold", "flat"),
    "direction, steepest or gradient": (1, "steepest", "gradient"),
    "direction, steepest or Adam": (1, "steepest", "Adam"),
    "mass": (2, "modular", "uniform"),
}
"""The factor of an arm, the level that may buy something, and what it is compared with."""

METRICS = ("held_out_losses", "held_out_errors", "losses")


@dataclasses.dataclass(frozen=True)
class Ablation(Study):
    """Constraint, direction, mass: which of the three buys what?

    Trains a character GPT and an image classifier with every combination of: weights on their
    manifolds or flat; the steepest direction, the gradient, or Adam's direction, all brought to
    the same norm; budgets that follow from the masses, or equal ones. Beside them, plain Adam on
    the standard parametrisation. Each arm counts at its own best learning rate, chosen for each
    seed by the other seeds; differences are paired by seed.
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
    multiplier: float = option(4.0, "of the scores, but for the baseline")
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
            "losses": late(np.asarray(trained.loss)),
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
                + [_shown(metrics[m]["arms"][name]) for m in METRICS]
                for name, found in metrics[METRICS[0]]["arms"].items()
            ]
            gains = [
                [what, *(_shown(metrics[m]["gains"][what]) for m in METRICS)]
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
        return draw(record)

    def _problem(self, network: str) -> tuple[Architecture, Task]:
        if network == "gpt":
            task = Characters(self.windows_per_step, self.data_dir, self.text, self.context)
            return Transformer(self.width, self.blocks), task
        pictures = Pictures(self.images_per_step, self.data_dir, self.images)
        return Funnel(self.hidden), pictures


def _arm(cell: Cell) -> tuple[str, str, str]:
    return cell["constraint"], cell["direction"], cell["mass"]


def _summary(rows: Sequence[Row], metric: str) -> dict[str, Any]:
    """The arms at their best rates, and the gains."""
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


def _shown(found: Mapping[str, Any]) -> str:
    return shown(found["mean"], found["interval"], "+.4f")
