"""Certified networks: which way of training 1-Lipschitz networks certifies most images?"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jax.tree_util import Partial
from scipy.stats import qmc

from manifoldmuon.robustness import CertificationResult, certify
from studies.attacks import pgd
from studies.certified.findings import summary, table
from studies.certified.methods import METHODS
from studies.certified.networks import NETWORKS
from studies.certified.picture import picture
from studies.certified.training import CHUNK, RelativeTime, Training, Trial
from studies.datasets import Dataset, load_cifar10, load_digits, load_mnist
from studies.records import read_record
from studies.study import Cell, Record, Row, Study, option


class Problem(NamedTuple):
    """Settings for a data set.

    Attributes:
      radii: certified radii, with pixels between 0 and 1.
      target: the radius whose certified accuracy the search maximises.
      offset: the offset of the loss at which the search starts.
      temperature: the temperature of the loss at which the search starts.
      crop: the largest shift of an augmented image, in pixels.
      flip: whether to mirror augmented images.
    """

    radii: tuple[float, ...]
    target: float
    offset: float
    temperature: float
    crop: int
    flip: bool


PROBLEMS = {
    "digits": Problem((0.25, 0.5, 1.0), 0.5, 1.5, 0.25, 1, False),
    "mnist": Problem((0.5, 1.0, 1.58), 1.58, 2.4, 0.25, 2, False),
    "cifar10": Problem((36 / 255, 72 / 255, 108 / 255), 36 / 255, 1.0, 0.2, 4, True),
}

POINTS = 33
"""The number of radii of a curve, from 0 to 1.5 times the largest radius."""

ATTACK_STEPS = 50

REACH = (2.0, 1.5, 1.5, 1.5)
"""How far the first round of a search goes, in log2 of rate, 1 - momentum, offset and temperature;
each round halves it."""

ROUNDS = 3

FIRST_MOMENTUM = 0.9


@dataclasses.dataclass(frozen=True)
class CertifiedNetworks(Study):
    """Which way of training networks of Lipschitz constant 1 proves most?

    Trains the same networks, from the same orthonormal weights, with each method: on the manifold
    (manifold Muon, Muon with a retraction, Riemannian Adam, the Riemannian gradient), by a
    parametrisation (Björck with Adam and with Muon; Cayley, SOC, AOL and spectral normalisation
    with Adam), and unconstrained with AdamW. Rate and momentum of each method, and offset and
    temperature of its loss, are tuned on held-out training images, by the accuracy that is
    certified at one radius: three rounds of quasi-random trials, each round around the best trial
    so far and half as wide. Then all methods train on all training images, for equal epochs and for
    equal CPU time. The result is the share of test images that `robustness.certify` certifies with
    the right label at a radius, compared with the share that withstands an attack.
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
    augment: bool = option(True, "shift training images at random, and mirror photographs")
    trials: int = option(16, "trials in each of three rounds of a search")
    tuning_epochs: float = option(0.0, "epochs of a trial; 0: as many as the training")
    held_out: float = option(1 / 6, "share of the training images that chooses rates")
    tuned: Path | None = option(
        None, "record with tuned numbers, of any network; other methods are tuned",
        recorded=False)
    speeds: Path | None = option(
        None, "record with relative CPU times, for other machines", recorded=False)
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
        if self.epochs <= 0 or min(self.seconds, self.tuning_epochs) < 0:
            raise ValueError(
                "epochs must be positive, seconds and tuning_epochs not negative; got "
                f"{self.epochs}, {self.seconds}, {self.tuning_epochs}"
            )
        if min(self.batch, self.attacked, self.trials) < 1 or not 0 < self.held_out < 1:
            raise ValueError(
                "batch, attacked and trials must be at least 1, and held_out between 0 and 1; got "
                f"{self.batch}, {self.attacked}, {self.trials}, {self.held_out}"
            )

    def cells(self) -> Sequence[Cell]:
        return [
            {"network": network, "method": method, "seed": seed}
            for network in self.networks
            for method in self.methods
            for seed in self.seeds
        ]

    def timed(self, cell: Cell) -> bool:
        return self.timing and self.speeds is None

    def run(self, cell: Cell) -> Mapping[str, Any]:
        training = self._training(cell["network"], cell["method"])
        split = self.images, self.data_dir, self.held_out
        tuned = self._tuned(cell) or _tuned(
            *split, training, self.tuning_epochs or self.epochs, self.trials
        )
        steps = steps_of(len(self._data().train_y), self.epochs, self.batch)
        found = {**tuned._asdict(), "epochs": self._judged(cell, training, tuned, steps, True)}
        if not self.timing:
            return found
        first = self._training(cell["network"], self.methods[0])
        speed = self._speed(cell) or _timed(*split, training, first)
        budget = self.seconds or speed.reference * steps / CHUNK
        steps = CHUNK * max(1, round(budget / speed.seconds))
        found |= {"time": self._judged(cell, training, tuned, steps)}
        for part in (found["epochs"], found["time"]):
            part["seconds"] = part["steps"] / CHUNK * speed.seconds
        return {**found, "relative_time": speed._asdict()}

    def _tuned(self, cell: Cell) -> "Tuned | None":
        """Read tuned numbers from the record `tuned`, of another network if it lacks this one;
        None if it lacks the method."""
        row = self._row(self.tuned, cell) or self._row(self.tuned, {"method": cell["method"]})
        return None if row is None else Tuned(**{field: row[field] for field in Tuned._fields})

    def _speed(self, cell: Cell) -> RelativeTime | None:
        """Read the CPU time of a step from the record `speeds`; None if it lacks it."""
        row = self._row(self.speeds, cell)
        return None if row is None else RelativeTime(**row["relative_time"])

    def _row(self, path: Path | None, cell: Cell) -> Row | None:
        names = {key: cell[key] for key in cell if key in ("network", "method")}
        rows = [] if path is None else read_record(path, self.name)["rows"]
        return next((row for row in rows if names.items() <= row.items()), None)

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
        crop, flip = (problem.crop, problem.flip) if self.augment else (0, False)
        image, classes = data.train_x.shape[1:], len(data.classes)
        return Training(METHODS[method], NETWORKS[network], image, classes, self.batch, crop, flip)

    def _judged(
        self, cell: Cell, training: Training, tuned: "Tuned", steps: int, attack: bool = False
    ) -> dict[str, Any]:
        data, radii = self._data(), PROBLEMS[self.images].radii
        every = _trained(self.images, self.data_dir, training, tuned.best(self.seeds), steps)
        weights = every[self.seeds.index(cell["seed"])]
        found = certify(training.network(), weights, data.test_x, data.test_y)
        attacked = self._attack(training, weights, found) if attack else {}
        return {
            "steps": steps,
            "lipschitz": found.bounds.lipschitz_inputs,
            "accuracies": found.curve(np.array([0.0, *radii])),
            "curve": found.curve(curve_radii(radii)),
            **attacked,
        }

    def _attack(
        self, training: Training, weights: Any, certified: CertificationResult
    ) -> dict[str, Any]:
        """Return the certified and robust shares of the first images, and the number of images
        certified and yet broken."""
        data, net = self._data(), training.network()
        x, y = data.test_x[: self.attacked], data.test_y[: self.attacked]
        found = certified.first(self.attacked)
        logits = Partial(net.apply, weights)
        proved, robust, broken = [], [], 0
        for radius in PROBLEMS[self.images].radii:
            held = (found.predicted == y) & (found.radii >= radius)
            _, unbroken = pgd(logits, x, y, radius, ATTACK_STEPS)
            unbroken = np.asarray(unbroken)
            proved.append(float(held.mean()))
            robust.append(float(unbroken.mean()))
            broken += int((held & ~unbroken).sum())
        return {"proved": proved, "robust": robust, "broken": broken}


class Tuned(NamedTuple):
    """The numbers of a method, with all trials.

    Attributes:
      trials: rate, momentum, offset and temperature of each trial, in the order of the search.
      tuning: held-out accuracies of each trial: clean, then certified at the radii.
      rate: the best rate.
      momentum: the best momentum.
      offset: the best offset of the loss.
      temperature: the best temperature of the loss.
    """

    trials: list[list[float]]
    tuning: list[list[float]]
    rate: float
    momentum: float
    offset: float
    temperature: float

    def best(self, seeds: Sequence[int]) -> tuple[Trial, ...]:
        """Return the best trial with each seed."""
        return tuple(
            Trial(self.rate, self.momentum, self.offset, self.temperature, seed) for seed in seeds
        )


def search(
    judge: Callable[[Sequence[Trial]], list[list[float]]], start: Trial, column: int, count: int
) -> Tuned:
    """Maximise a column of `judge(trials)` over three rounds of `count` quasi-random trials.

    A round lies around the best trial so far, and its first trial is that one.
    """
    halton: Any = qmc.Halton  # SciPy 1.14, the oldest, calls `rng` `seed`
    draws = 2 * halton(len(REACH), seed=0).random(ROUNDS * count) - 1
    trials, tuning, best = [], [], start
    for turn in range(ROUNDS):
        moves = draws[turn * count : (turn + 1) * count] * REACH / 2**turn
        moves[0] = 0
        factors = 2.0**moves
        drawn = [
            Trial(best.rate * a, max(0.0, 1 - (1 - best.momentum) * b), best.offset * c,
                  best.temperature * d, start.seed)
            for a, b, c, d in factors.tolist()
        ]  # fmt: skip
        trials += drawn
        tuning += judge(drawn)
        best = trials[int(np.argmax([found[column] for found in tuning]))]
    return Tuned([list(trial[:-1]) for trial in trials], tuning, *best[:-1])


def curve_radii(radii: Sequence[float]) -> np.ndarray:
    """Return the radii of a curve."""
    return np.linspace(0, 1.5 * max(radii), POINTS)


def steps_of(images: int, epochs: float, batch: int) -> int:
    """Return the steps of these epochs, in whole chunks."""
    return CHUNK * max(1, round(epochs * images / batch / CHUNK))


@functools.lru_cache(maxsize=1)
def _load(images: str, folder: Path | None) -> Dataset:
    """Load the data set, with a last axis of channels and the mean of the pixels subtracted."""
    if images == "digits":
        data = load_digits(0)
    else:
        data = load_mnist(folder) if images == "mnist" else load_cifar10(folder)
    train, test = (x if x.ndim == 4 else x[..., None] for x in (data.train_x, data.test_x))
    mean = train.mean(dtype=np.float64).astype(np.float32)
    return data._replace(train_x=train - mean, test_x=test - mean)


@functools.lru_cache(maxsize=1)
def _held_out(images: str, folder: Path | None, share: float) -> Dataset:
    """Split the training images; the held-out share replaces the test images."""
    whole = _load(images, folder)
    order = np.random.default_rng(0).permutation(len(whole.train_y))
    test, train = np.split(order, [round(share * len(order))])
    return whole._replace(train_x=whole.train_x[train], train_y=whole.train_y[train],
                          test_x=whole.train_x[test], test_y=whole.train_y[test])  # fmt: skip


@functools.lru_cache(maxsize=2)
def _trained(
    images: str, folder: Path | None, training: Training, trials: tuple[Trial, ...], steps: int
) -> list[Any]:
    return training.train(_load(images, folder), trials, steps)


@functools.lru_cache(maxsize=4)
def _timed(
    images: str, folder: Path | None, held_out: float, training: Training, first: Training
) -> RelativeTime:
    return training.relative_time(first, _held_out(images, folder, held_out))


@functools.lru_cache(maxsize=4)
def _tuned(
    images: str, folder: Path | None, held_out: float, training: Training, epochs: float, count: int
) -> Tuned:
    data, net, problem = _held_out(images, folder, held_out), training.network(), PROBLEMS[images]
    steps, places = steps_of(len(data.train_y), epochs, training.batch), [0.0, *problem.radii]

    def judge(trials: Sequence[Trial]) -> list[list[float]]:
        return [proved(weights) for weights in training.train(data, trials, steps)]

    def proved(weights: Any) -> list[float]:
        try:
            return certify(net, weights, data.test_x, data.test_y).curve(np.array(places)).tolist()
        except ValueError:  # weights or logits are not finite: the rate is too high
            return [0.0] * len(places)

    rate = 2.0**training.method.log2_rate
    start = Trial(rate, FIRST_MOMENTUM, problem.offset, problem.temperature, 0)
    return search(judge, start, places.index(problem.target), count)
