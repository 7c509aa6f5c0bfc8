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

from manifoldmuon.manifolds import Stiefel
from manifoldmuon.norms import ScaleRule
from studies.networks.architectures import Architecture, Funnel, Transformer
from studies.networks.descent import Descent, late_loss
from studies.networks.tasks import IMAGES, TEXTS, Characters, Pictures, Task
from studies.spaces.findings import summary, table
from studies.spaces.picture import picture
from studies.spaces.sets import FROBENIUS, MUON, SETS, STIEFEL, Hidden, sets_of
from studies.study import Cell, Record, Row, Study, option
from studies.timing import interleaved_seconds

EXPONENTS = {"gpt": (-4, 0), "images": (-6, -2)}
"""The lowest and highest learning rate of each grid, as exponents of 2."""

WARM = 8
"""Steps before timing, so that warm-started solvers are warm."""


@dataclasses.dataclass(frozen=True)
class WeightSpaces(Study):
    """Which set of matrices suits which network?

    Trains a character GPT and an image classifier with their hidden matrices on different sets:
    unconstrained (Muon), fixed Frobenius norm, spectral sphere, spectral ball, spectral bands,
    Stiefel manifold. Initial weights (semi-orthogonal), batches, the norm of the steps (spectral)
    and the grid of learning rates are the same; embedding and head are unconstrained. Each set is
    evaluated at its best rate, chosen for each seed by the other seeds; differences from Muon are
    paired by seed. Also measured: best rates at twice the width, losses at half and twice the best
    rate, losses after fewer steps, final singular values, and the time of a step.
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
            network: summary([row for row in rows if row["network"] == network])
            for network in self.networks
        }

    def table(self, record: Record) -> str:
        return "\n".join(table(network, found) for network, found in record["summary"].items())

    def plot(self, record: Record) -> Any:
        return picture(record)

    def _problem(self, network: str, factor: int) -> tuple[Architecture, Task]:
        """Return the network, `factor` times as wide, and its task."""
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
        """Return, for each rate, the smallest, median and largest singular value of all hidden
        matrices relative to their scale, and the median condition number."""
        marked = self._descent(cell["part"], cell["network"], STIEFEL).network.geometry()
        weights, structure = jax.tree.flatten(final)
        manifolds = structure.flatten_up_to(marked)
        values, conditions = [], []
        for weight, manifold in zip(weights, manifolds, strict=True):
            if isinstance(manifold, Stiefel):
                scale = manifold.scale
                size = scale.of(weight.shape[-2:]) if isinstance(scale, ScaleRule) else scale
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
        """Return the seconds of the gradient, the same for all sets, and of each set's update."""
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
    """Return singular values in descending order; NaN along the first axis (rates) for weights
    that are not finite."""
    fine = np.isfinite(matrices).all(axis=tuple(range(1, matrices.ndim)))
    found = np.linalg.svd(np.where(fine.reshape(-1, *(1,) * (matrices.ndim - 1)), matrices, 0.0),
                          compute_uv=False)  # fmt: skip
    found[~fine] = np.nan
    return found
