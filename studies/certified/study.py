"""Certified networks: which way of training 1-Lipschitz networks certifies most images?"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
from jax.tree_util import Partial

from manifoldmuon.robustness import CertificationResult, certify, pgd
from studies.certified.findings import summary, table
from studies.certified.methods import METHODS
from studies.certified.networks import NETWORKS
from studies.certified.picture import picture
from studies.certified.training import CHUNK, RelativeTime, Trained, Training
from studies.datasets import Dataset, load_cifar10, load_digits, load_mnist
from studies.records import read_record
from studies.study import Cell, Record, Row, Study, option


class Problem(NamedTuple):
    """Settings for a data set.

    Attributes:
      radii: certified radii, with pixels between 0 and 1.
      offset: the offset of the loss.
      temperature: the temperature of the loss.
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
"""The number of radii of a curve, from 0 to 1.5 times the largest radius."""

ATTACK_STEPS = 50

MOMENTA = (0.0, 0.2, 0.6, 0.8, 0.9, 0.95, 0.975, 0.9875)
"""The grid of momenta (for Adam, decays of the first moment); above 0, 1 - momentum halves."""

FIRST_MOMENTUM = 0.9


@dataclasses.dataclass(frozen=True)
class CertifiedNetworks(Study):
    """Which way of training networks of Lipschitz constant 1 proves most?

    Trains the same networks, from the same orthonormal weights, with each method: on the manifold
    (manifold Muon, Muon with a retraction, Riemannian Adam, the Riemannian gradient), by a
    parametrisation (Björck with Adam and with Muon, Cayley and spectral normalisation with Adam),
    and unconstrained with AdamW. Rate and momentum of each method are tuned on held-out training
    images, by the mean of the clean accuracy and the certified accuracies at the radii. The search
    runs over octaves of the rate and of 1 - momentum, and moves to the best point until all its
    neighbours have been tried. Then all methods train on all training images, for equal epochs and
    for equal CPU time. The result is the share of test images that `robustness.certify` certifies
    with the right label at a radius, compared with the share that withstands an attack.
    """

    name: ClassVar[str] = "certified"

    # fmt: off
    images: str = option("digits", "data set", choices=tuple(PROBLEMS))
    data_dir: Path | None = option(None, "folder with the data", recorded=False)
    networks: tuple[str, ...] = option(("fc-256",), "networks to train", choices=tuple(NETWORKS))
    methods: tuple[str, ...] = option(
        tuple(METHODS), "methods of training; the first is the baseline", choices=tuple(METHODS))
    epochs: float = option(2.0, "epochs of each training, rounded to chunks of 10 steps")
    timing: bool = option(True, "also compare methods at equal CPU time")
    seconds: float = option(
        0.0, "CPU seconds of each training at equal time; 0: as many as the first method takes")
    batch: int = option(250, "images per step")
    offset: float = option(0.0, "offset of the loss; 0: the data set's own")
    temperature: float = option(0.0, "temperature of the loss; 0: the data set's own")
    held_out: float = option(1 / 6, "share of the training images that chooses rates")
    tuned: Path | None = option(
        None, "record with tuned rates and momenta; other methods are tuned", recorded=False)
    octaves: int = option(0, "octaves to add to the rates at which tuning starts")
    attacked: int = option(500, "number of test images to attack")
    seeds: tuple[int, ...] = option((0, 1, 2, 3, 4), "seeds of weights and batches")
    # fmt: on

    def __post_init__(self):
        if not self.networks or not self.methods:
            raise ValueError(
                f"networks and methods must not be empty; got {self.networks}, {self.methods}"
            )
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds must be different, and not empty; got {self.seeds}")
        if self.epochs <= 0 or self.seconds < 0 or min(self.batch, self.attacked) < 1:
            raise ValueError(
                "epochs must be positive, seconds not negative, batch and attacked at least 1; got "
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
        return self.timing

    def run(self, cell: Cell) -> Mapping[str, Any]:
        data, training = self._data(), self._training(cell["network"], cell["method"])
        split = self.images, self.data_dir, self.held_out
        tuned = self._read(cell) or _tuned(*split, training, self.epochs)
        rate, momentum, seed = 2.0**tuned.log2_rate, tuned.momentum, cell["seed"]
        steps = _steps(data, self.epochs, self.batch)
        by_epochs = training.train(data, rate, momentum, seed, steps)
        found = {**tuned._asdict(), "epochs": self._judged(training, by_epochs, attack=True)}
        if not self.timing:
            return found
        first = self._training(cell["network"], self.methods[0])
        speed = _timed(*split, training, first)
        budget = self.seconds or speed.reference * steps / CHUNK
        chunks = max(1, round(budget / speed.seconds))
        by_time = training.train(data, rate, momentum, seed, chunks * CHUNK)
        return {
            **found,
            "relative_time": speed._asdict(),
            "time": self._judged(training, by_time),
        }

    def _read(self, cell: Cell) -> "Tuned | None":
        """Read rate and momentum from the record `tuned`; None if it lacks them."""
        rows = [] if self.tuned is None else read_record(self.tuned, self.name)["rows"]
        names = {key: cell[key] for key in ("network", "method")}
        for row in rows:
            if names.items() <= row.items() and "momentum" in row:
                return Tuned(**{field: row[field] for field in Tuned._fields})
        return None

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
        way = dataclasses.replace(way, log2_rate=way.log2_rate + self.octaves)
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

    def _attack(
        self, training: Training, trained: Trained, certified: CertificationResult
    ) -> dict[str, Any]:
        """Return the certified and robust shares of the first images, and the number of images
        certified and yet broken."""
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
    """A tuned rate and momentum, with all trials.

    Attributes:
      log2_rates: log2 of the rates of the trials, in the order of the search.
      momenta: the momenta of the trials.
      tuning: held-out accuracies of each trial: clean, then certified at the radii.
      log2_rate: log2 of the best rate.
      momentum: the best momentum.
    """

    log2_rates: list[int]
    momenta: list[float]
    tuning: list[list[float]]
    log2_rate: int
    momentum: float


def search(judge: Callable[[int, float], list[float]], log2_rate: int) -> Tuned:
    """Maximise the mean of `judge(log2_rate, momentum)` by hill climbing.

    Tries a point of the grid and its eight neighbours, then the neighbours of the best point, until
    all have been tried: the best rate is never the highest or lowest tried.
    """
    best, found = (log2_rate, MOMENTA.index(FIRST_MOMENTUM)), {}
    while True:
        for rate, place in itertools.product((0, -1, 1), repeat=2):
            point = best[0] + rate, best[1] + place
            if point not in found and 0 <= point[1] < len(MOMENTA):
                found[point] = judge(point[0], MOMENTA[point[1]])
        highest = max(found, key=lambda point: np.mean(found[point]))
        if highest == best:
            break
        best = highest
    rates, momenta = [k for k, _ in found], [MOMENTA[place] for _, place in found]
    return Tuned(rates, momenta, list(found.values()), best[0], MOMENTA[best[1]])


def curve_radii(radii: Sequence[float]) -> np.ndarray:
    """Return the radii of a curve."""
    return np.linspace(0, 1.5 * max(radii), POINTS)


def _places(training: Training) -> np.ndarray:
    """Return 0, for the clean accuracy, and the radii."""
    return np.array([0.0, *training.radii])


def _steps(data: Dataset, epochs: float, batch: int) -> int:
    return CHUNK * max(1, round(epochs * len(data.train_y) / batch / CHUNK))


@functools.lru_cache(maxsize=1)
def _load(images: str, folder: Path | None) -> Dataset:
    """Load the data set, with a last axis of channels."""
    if images == "digits":
        data = load_digits(0)
    else:
        data = load_mnist(folder) if images == "mnist" else load_cifar10(folder)
    if data.train_x.ndim == 3:
        data = data._replace(train_x=data.train_x[..., None], test_x=data.test_x[..., None])
    return data


@functools.lru_cache(maxsize=1)
def _held_out(images: str, folder: Path | None, share: float) -> Dataset:
    """Split the training images; the held-out share replaces the test images."""
    whole = _load(images, folder)
    order = np.random.default_rng(0).permutation(len(whole.train_y))
    test, train = np.split(order, [round(share * len(order))])
    return whole._replace(train_x=whole.train_x[train], train_y=whole.train_y[train],
                          test_x=whole.train_x[test], test_y=whole.train_y[test])  # fmt: skip


@functools.lru_cache(maxsize=4)
def _timed(
    images: str, folder: Path | None, held_out: float, training: Training, first: Training
) -> RelativeTime:
    return training.relative_time(first, _held_out(images, folder, held_out))


@functools.lru_cache(maxsize=4)
def _tuned(
    images: str, folder: Path | None, held_out: float, training: Training, epochs: float
) -> Tuned:
    data = _held_out(images, folder, held_out)
    steps, net = _steps(data, epochs, training.batch), training.network()

    def judge(log2_rate: int, momentum: float) -> list[float]:
        places = _places(training)
        weights = training.train(data, 2.0**log2_rate, momentum, 0, steps).weights
        try:
            return certify(net, weights, data.test_x, data.test_y).curve(places).tolist()
        except ValueError:  # weights or logits are not finite: the rate is too high
            return [0.0] * len(places)

    return search(judge, training.method.log2_rate)
