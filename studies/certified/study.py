"""Certified networks: which way of training networks of Lipschitz constant 1 proves most?"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
from jax.tree_util import Partial

from manifoldmuon.robustness import Certified, certify, pgd
from studies.certified.findings import summary, table
from studies.certified.methods import METHODS
from studies.certified.networks import NETWORKS
from studies.certified.picture import picture
from studies.certified.training import CHUNK, Trained, Training
from studies.datasets import Dataset, load_cifar10, load_digits, load_mnist
from studies.study import Cell, Record, Row, Study, option


class Problem(NamedTuple):
    """What is asked of a data set's networks.

    Attributes:
      radii: in pixels between 0 and 1.
      offset: of the loss.
      temperature: of the loss.
    """

    radii: tuple[float, ...]
    offset: float
    temperature: float


PROBLEMS = {
    "digits": Problem((0.25, 0.5, 1.0), 1.5, 0.25),
    "mnist": Problem((0.5, 1.0, 1.58), 2.4, 0.25),
    "cifar10": Problem((36 / 255, 72 / 255, 108 / 255), 1.0, 0.2),
}

POINTS = 33
"""Radii of a curve, from 0 to one and a half times the largest radius."""

ATTACK_STEPS = 50


@dataclasses.dataclass(frozen=True)
class CertifiedNetworks(Study):
    """Which way of training networks of Lipschitz constant 1 proves most?

    Trains the same networks, from the same orthonormal weights, with each method: on the manifold
    (manifold Muon, Riemannian Adam, the Riemannian gradient), by a parametrisation (Björck, Cayley,
    spectral normalisation) under Adam, and free under AdamW. Each method's rate is chosen on
    held-out training images, from as many rates, by the mean of the clean accuracy and of the
    certified accuracies at the radii. Then it trains on all training images, for as many epochs as
    all others and for as much CPU time as all others. What counts is the share of test images
    whose label is right and certified at a radius, by `robustness.certify`, beside those that
    withstand an attack.
    """

    name: ClassVar[str] = "certified"

    # fmt: off
    images: str = option("digits", "the data set", choices=tuple(PROBLEMS))
    data_dir: Path | None = option(None, "with the files of the data", recorded=False)
    networks: tuple[str, ...] = option(("fc-256",), "what is trained", choices=tuple(NETWORKS))
    methods: tuple[str, ...] = option(
        tuple(METHODS), "of training; the first is what others are compared with",
        choices=tuple(METHODS))
    epochs: float = option(2.0, "of each training, rounded to chunks of 40 steps")
    seconds: float = option(4.0, "of CPU time of each training of the other comparison")
    batch: int = option(250, "images of a step")
    offset: float = option(0.0, "of the loss; 0: that of the data set")
    temperature: float = option(0.0, "of the loss; 0: that of the data set")
    held_out: float = option(1 / 6, "share of the training images on which rates are chosen")
    octaves: int = option(0, "by which every method's rates are moved")
    attacked: int = option(500, "test images that are attacked")
    seeds: tuple[int, ...] = option((0, 1, 2, 3, 4), "of the first weights and of the batches")
    # fmt: on

    def __post_init__(self):
        if not self.networks or not self.methods:
            raise ValueError(
                f"there must be a network and a method; got {self.networks}, {self.methods}"
            )
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"there must be a seed, and seeds must differ; got {self.seeds}")
        if min(self.epochs, self.seconds) <= 0 or min(self.batch, self.attacked) < 1:
            raise ValueError(
                "epochs and seconds must be positive, batch and attacked at least 1; got "
                f"{self.epochs}, {self.seconds}, {self.batch}, {self.attacked}"
            )
        if min(self.offset, self.temperature) < 0 or not 0 < self.held_out < 1:
            raise ValueError(
                "offset and temperature must not be negative, and held_out between 0 and 1; got "
                f"{self.offset}, {self.temperature}, {self.held_out}"
            )

    def cells(self) -> Sequence[Cell]:
        return [
            {"network": network, "method": method, "seed": seed}
            for network in self.networks
            for method in self.methods
            for seed in self.seeds
        ]

    def timed(self, cell: Cell) -> bool:
        return True

    def run(self, cell: Cell) -> Mapping[str, Any]:
        data, training = self._data(), self._training(cell["network"], cell["method"])
        tuned = _tuned(self.images, self.data_dir, self.held_out, training, self.epochs)
        rate, seed = 2.0**tuned.log2_rate, cell["seed"]
        chunks = max(1, int(self.seconds / tuned.seconds))
        by_epochs = training.train(data, rate, seed, _steps(data, self.epochs, self.batch))
        by_time = training.train(data, rate, seed, chunks * CHUNK)
        return {
            **tuned._asdict(),
            "epochs": self._judged(training, by_epochs, attack=True),
            "time": self._judged(training, by_time),
        }

    def summarise(self, rows: Sequence[Row]) -> Mapping[str, Any]:
        return summary(rows, self.networks, self.methods)

    def table(self, record: Record) -> str:
        return table(record["summary"], PROBLEMS[record["settings"]["images"]].radii)

    def plot(self, record: Record) -> Any:
        return picture(record, PROBLEMS[record["settings"]["images"]].radii)

    def _data(self) -> Dataset:
        return _load(self.images, self.data_dir)

    def _training(self, network: str, method: str) -> Training:
        data, problem = self._data(), PROBLEMS[self.images]
        way = METHODS[method]
        way = dataclasses.replace(way, exponents=tuple(k + self.octaves for k in way.exponents))
        return Training(
            way, NETWORKS[network], data.train_x.shape[1:], len(data.classes),
            self.batch, self.offset or problem.offset, self.temperature or problem.temperature,
            problem.radii,
        )  # fmt: skip

    def _judged(self, training: Training, trained: Trained, attack: bool = False) -> dict[str, Any]:
        data = self._data()
        found = certify(training.network(), trained.weights, data.test_x, data.test_y)
        attacked = self._attack(training, trained, found) if attack else {}
        return {
            "steps": trained.steps,
            "seconds": trained.seconds,
            "lipschitz": found.bounds.lipschitz_inputs,
            "accuracies": found.curve(_places(training)),
            "curve": found.curve(curve_radii(training.radii)),
            **attacked,
        }

    def _attack(self, training: Training, trained: Trained, certified: Certified) -> dict[str, Any]:
        """Of the first test images: certified, robust under attack, and both though one fails."""
        data, net = self._data(), training.network()
        x, y = data.test_x[: self.attacked], data.test_y[: self.attacked]
        found = certified.first(self.attacked)
        logits = Partial(net.apply, trained.weights)
        proved, robust, broken = [], [], 0
        for radius in training.radii:
            held = (found.predicted == y) & (found.radii >= radius)
            attack = pgd(logits, x, y, radius, key=jax.random.key(0), steps=ATTACK_STEPS)
            proved.append(float(held.mean()))
            robust.append(attack.accuracy)
            broken += int((held & ~attack.robust).sum())
        return {"proved": proved, "robust": robust, "broken": broken}


class Tuned(NamedTuple):
    """A rate, and how it was found.

    Attributes:
      log2_rates: that were tried.
      tuning: for each, held-out accuracies: clean, then certified at the radii.
      log2_rate: the best.
      seconds: of CPU time, for `CHUNK` steps.
    """

    log2_rates: tuple[int, ...]
    tuning: list[list[float]]
    log2_rate: int
    seconds: float


def curve_radii(radii: Sequence[float]) -> np.ndarray:
    """Where a curve is drawn."""
    return np.linspace(0, 1.5 * max(radii), POINTS)


def _places(training: Training) -> np.ndarray:
    """Zero, for the clean accuracy, and the radii."""
    return np.array([0.0, *training.radii])


def _steps(data: Dataset, epochs: float, batch: int) -> int:
    return CHUNK * max(1, round(epochs * len(data.train_y) / batch / CHUNK))


@functools.lru_cache(maxsize=1)
def _load(images: str, folder: Path | None) -> Dataset:
    """The data set, its images with a last axis of channels."""
    if images == "digits":
        data = load_digits(0)
    else:
        data = load_mnist(folder) if images == "mnist" else load_cifar10(folder)
    if data.train_x.ndim == 3:
        data = data._replace(train_x=data.train_x[..., None], test_x=data.test_x[..., None])
    return data


@functools.lru_cache(maxsize=4)
def _tuned(
    images: str, folder: Path | None, held_out: float, training: Training, epochs: float
) -> Tuned:
    whole = _load(images, folder)
    order = np.random.default_rng(0).permutation(len(whole.train_y))
    test, train = np.split(order, [round(held_out * len(order))])
    data = whole._replace(train_x=whole.train_x[train], train_y=whole.train_y[train],
                          test_x=whole.train_x[test], test_y=whole.train_y[test])  # fmt: skip
    seconds = training.seconds_per_chunk(data)
    steps, net = _steps(data, epochs, training.batch), training.network()
    exponents, found = training.method.exponents, []
    for exponent in exponents:
        trained = training.train(data, 2.0**exponent, 0, steps)
        try:
            certified: Certified | None = certify(net, trained.weights, data.test_x, data.test_y)
        except ValueError:  # weights or logits that are not finite: the rate is too high
            certified = None
        places = _places(training)
        curve = np.zeros(len(places)) if certified is None else certified.curve(places)
        found.append(curve.tolist())
    best = int(np.argmax(np.mean(found, axis=1)))
    return Tuned(exponents, found, exponents[best], seconds)
