"""Hello, GPT: a character model, trained as published or on manifolds."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from studies.datasets import TEXTS, load_text
from studies.display import BLUE, GREY, dress, legend_above, panels, short, text_table
from studies.estimates import estimate, shown
from studies.gpt.methods import METHODS
from studies.gpt.sampling import sample
from studies.gpt.training import PUBLISHED_WINDOWS, run
from studies.study import Cell, Record, Row, Study, option

SHAKESPEARE = {"last_train_loss": 1.7122, "validation_first_windows": 1.8968}
"""Losses that the Modula package publishes for tiny Shakespeare, for a single seed."""

LOSSES = {
    "last_train_loss": "train, the last batch",
    "late_train_loss": "train, the last 100 batches",
    "validation_first_windows": f"validation, the first {PUBLISHED_WINDOWS} windows",
    "validation_whole": "validation, the whole part",
}


@dataclasses.dataclass(frozen=True)
class CharacterGPT(Study):
    """What loss does a character GPT reach, as published and with its weights on manifolds?

    Trains the GPT of the Modula package on tiny Shakespeare or Python's help topics, by the
    published protocol (`published`), with every weight on its manifold in a network of another
    scaling (`constrained`), with free weights in that network (`bounded`), or by other optimizers;
    then draws characters from it. Losses are cross-entropies in nats.
    """

    name: ClassVar[str] = "gpt"

    # fmt: off
    optimizer: str = option("published", "optimizer, with its network", choices=tuple(METHODS))
    learning_rate: float | None = option(
        None, "peak rate, which falls linearly to zero; left out: the optimizer's own")
    steps: int = option(2001, "number of updates")
    batch: int = option(12, "windows per update")
    context: int = option(64, "characters per window")
    width: int = option(128, "width of the residual stream")
    heads: int = option(4, "attention heads")
    blocks: int = option(4, "pairs of an attention block and an MLP block")
    text: str = option("pydoc", "text to train on", choices=TEXTS)
    data_dir: Path | None = option(None, "folder with tinyshakespeare.txt", recorded=False)
    sample: int = option(500, "characters to draw from each trained network")
    temperature: float = option(0.8, "temperature of the sampled text; likelier characters below 1")
    seeds: tuple[int, ...] = option((0, 1, 2), "seeds of weights and batches")
    # fmt: on

    def __post_init__(self):
        counts = (self.steps, self.batch, self.context, self.heads, self.blocks, self.sample)
        rate = 1.0 if self.learning_rate is None else self.learning_rate
        if min(*counts, self.temperature, rate) <= 0 or not self.seeds:
            raise ValueError(
                f"sizes, rate and temperature must be positive, seeds not empty; got {self}"
            )
        if self.width < 1 or self.width % (2 * self.heads):
            raise ValueError(
                f"width must be an even multiple of the {self.heads} heads; got {self.width}"
            )

    def cells(self) -> Sequence[Cell]:
        return [{"seed": seed} for seed in self.seeds]

    def timed(self, cell: Cell) -> bool:
        return True

    def run(self, cell: Cell) -> Mapping[str, Any]:
        text = load_text(self.text, self.data_dir)
        if min(len(text.train), len(text.validation)) <= self.context:
            raise ValueError(
                f"each part of the text must have {self.context + 1} characters or more; got "
                f"{len(text.train)} and {len(text.validation)}"
            )
        measured, weights = run(self, text, cell["seed"])
        network = METHODS[self.optimizer].network(self, len(text.characters))
        prompt, key = jnp.asarray(text.validation[: self.context]), jax.random.key(cell["seed"])
        tokens = sample(network, weights, key, prompt, self.context, self.sample, self.temperature)
        return {**measured, "sample": text.decode(np.asarray(tokens))}

    def summarise(self, rows: Sequence[Row]) -> Mapping[str, Any]:
        published = SHAKESPEARE if self.text == "shakespeare" else {}
        pace = float(np.median([row["milliseconds_per_step"] for row in rows]))
        distances = [row["distance"] for row in rows if row["distance"] is not None]
        return {
            "losses": {
                name: {"published": published.get(name), **estimate(values)}
                for name, values in _losses(rows).items()
            },
            "largest_distance": max(distances, default=None),
            "milliseconds_per_step": pace,
            "tokens_per_second": 1e3 * self.batch * self.context / pace,
        }

    def table(self, record: Record) -> str:
        rows, summary = record["rows"], record["summary"]
        method, lines = METHODS[self.optimizer], []
        for name, values in _losses(rows).items():
            found = summary["losses"][name]
            published = "-" if found["published"] is None else f"{found['published']:.4f}"
            lines.append([LOSSES[name], *(f"{value:.4f}" for value in values),
                          shown(found, ".4f"), published])  # fmt: skip
        header = ["cross-entropy (nats)", *(f"seed {row['seed']}" for row in rows), "mean, 95 %",
                  "published"]  # fmt: skip
        return "\n".join([
            f"{method.label} on {self.text}: {self.steps} steps of {self.batch} windows of "
            f"{self.context} characters, learning rate {method.rate(self):g}",
            text_table(header, lines),
            f"{summary['milliseconds_per_step']:.1f} ms/step; largest distance from the manifolds "
            f"after any step: {short(summary['largest_distance'])}",
            f"\n{rows[0]['sample']}\n",
        ])  # fmt: skip

    def plot(self, record: Record) -> Any:
        figure, [[panel]] = panels(1, 1, width=8.0, height=4.5)
        for row in record["rows"]:
            length = max(1, len(row["train_loss"]) // 60)
            groups = [row["train_loss"][i : i + length]
                      for i in range(0, len(row["train_loss"]), length)]  # fmt: skip
            middles = np.arange(len(groups)) * length + length / 2
            first = row is record["rows"][0]
            panel.plot(middles, [np.mean(group) for group in groups], color=GREY, linewidth=1.2,
                       label="training, by seed" if first else None)  # fmt: skip
            panel.plot(row["step"], row["validation_curve"], color=BLUE, linewidth=2,
                       label="validation, by seed" if first else None)  # fmt: skip
        published = record["summary"]["losses"]["validation_first_windows"]["published"]
        if published is not None:
            panel.axhline(published, color="#444444", linewidth=1, linestyle=(0, (4, 3)),
                          label="validation, published")  # fmt: skip
        panel.set_xlim(0, self.steps)
        legend_above(figure, panel)
        dress(panel, f"{METHODS[self.optimizer].label}, {self.text}", "", "step",
              "cross-entropy (nats)")  # fmt: skip
        return figure


def _losses(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Return each loss by seed; that of a single batch has an error of 0.05."""
    return {
        "last_train_loss": [row["train_loss"][-1] for row in rows],
        "late_train_loss": [float(np.mean(row["train_loss"][-100:])) for row in rows],
        **{name: [row[name] for row in rows] for name in list(LOSSES)[2:]},
    }
