"""Orthogonal layers: this package's optimizers against PyTorch's parametrisations and geoopt."""

import dataclasses
import functools
import io
import itertools
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from manifoldmuon.manifolds import Stiefel
from manifoldmuon.optim import hybrid, manifold_muon, riemannian_adam
from studies.classification import accuracy, cross_entropy, init_weights
from studies.datasets import batches, load_digits, standardise
from studies.datasets.digits import stratified_split
from studies.display import text_table
from studies.estimates import estimate, shown
from studies.study import Cell, Record, Row, Study, check_choices, option

SHAPES = [(128, 64), (128, 128)]
HEAD = -6  # log2 of the middle rate; Adam's documented 0.001 is too small for so few steps
TUNING_SEED = 0
OURS = "manifold Muon"
PYTHON = Path(".venv-torch/bin/python")
SCRIPT = Path(__file__).with_name("torch_rivals.py")

Pair = tuple[int, int]
"""log2 of the rates of body and head."""

Runs = list[tuple[np.ndarray, ...]]
"""Images, labels, order of the batches, three initial weights, rates of body and head."""

Build = Callable[[Any, optax.GradientTransformation], Any]
"""Maps the rate of the hidden matrices and the head's optimizer to an optimizer of all weights."""


class Trained(NamedTuple):
    """Weights of each run, processor seconds at its start and after each step, and versions."""

    weights: list[list[np.ndarray]]
    times: list[np.ndarray]
    versions: tuple[str, ...] = ()


def _muon(matrices: Stiefel, track_gap: bool) -> Build:
    geometry = [matrices, matrices, None]
    return lambda rate, head: manifold_muon(rate, geometry, rest=head, track_gap=track_gap)


def _riemannian_adam(rate: Any, head: optax.GradientTransformation) -> Any:
    geometry = [Stiefel(), Stiefel(), None]
    return hybrid(riemannian_adam(rate, geometry), geometry, head)


def _adamw(rate: Any, head: optax.GradientTransformation) -> Any:
    body = optax.adamw(rate, weight_decay=1e-2)
    return optax.partition({"body": body, "head": head}, ["body", "body", "head"])


METHODS: dict[str, tuple[int, str | Build]] = {
    "torch, matrix_exp": (-10, "matrix_exp"),
    "torch, cayley": (-10, "cayley"),
    "torch, householder": (-10, "householder"),
    "geotorch": (-10, "geotorch"),
    "geoopt": (-10, "geoopt"),
    "torch, free AdamW": (-10, "AdamW"),
    OURS: (-3, _muon(Stiefel(), True)),
    "manifold Muon, ProjectedPolar": (-3, _muon(Stiefel().for_training(), False)),
    "Riemannian Adam": (-10, _riemannian_adam),
    "optax, free AdamW": (-10, _adamw),
}
"""log2 of the documented rate; the name in `torch_rivals.py`, or what builds the optimizer. Rivals
come first: without their environment the study fails before any work."""


@dataclasses.dataclass(frozen=True)
class TorchLayers(Study):
    """Do orthogonal layers train better or faster here than in PyTorch?

    A ReLU network without biases (64-128-128-10) classifies scikit-learn's digits: orthonormal
    hidden matrices, a free head under Adam. Initial weights, batches, steps and the linear decay of
    both rates are identical in both frameworks, in float32. The rates of body and head are tuned
    for each method by the loss on images that no other run sees: a grid of octaves around the
    body's documented rate and the head's 1/64, then the neighbours of the best until none is
    missing. Fresh seeds then draw the test images, weights and batches. Times are processor time of
    all threads, in rounds over all methods; set-up includes the first step and compilation. The
    methods of PyTorch run eagerly, in an environment of their own: python -m venv .venv-torch, then
    .venv-torch/bin/pip install torch geotorch geoopt
    """

    name: ClassVar[str] = "torch-layers"

    # fmt: off
    methods: tuple[str, ...] = option(
        tuple(METHODS), f"of the hidden matrices, {OURS!r} among them", choices=tuple(METHODS))
    seeds: tuple[int, ...] = option((1, 2, 3, 4, 5), f"of the test; {TUNING_SEED} is for tuning")
    steps: int = option(100, "of a training")
    batch: int = option(64, "images of a step")
    body: tuple[int, ...] = option((-2, -1, 0, 1, 2), "octaves of the body's rate")
    head: tuple[int, ...] = option((-1, 0, 1), "octaves of the head's rate")
    rounds: int = option(3, "of timing")
    python: Path | None = option(
        None, f"of the environment with torch ({PYTHON} if left out)", recorded=False)
    # fmt: on

    def __post_init__(self):
        check_choices(self)
        if OURS not in self.methods or TUNING_SEED in self.seeds:
            raise ValueError(f"needs {OURS!r}, and seeds other than {TUNING_SEED}; got {self}")
        sizes = len(self.seeds), self.steps - 1, self.batch, len(self.body), len(self.head)
        if min(*sizes, self.rounds) < 1:
            raise ValueError(f"needs a seed, two steps, a batch, rates and a round; got {self}")

    def cells(self) -> Sequence[Cell]:
        rounds = [{"round": k} for k in range(self.rounds)]
        return [*({"method": name} for name in self.methods), *rounds]

    def timed(self, cell: Cell) -> bool:
        return "round" in cell

    def run(self, cell: Cell) -> Mapping[str, Any]:
        if "round" in cell:
            return {"milliseconds": {name: self._time(name) for name in self.methods}}
        name = cell["method"]

        def losses(pairs: Sequence[Pair]) -> list[float]:
            found = self._train(name, [(TUNING_SEED, pair) for pair in pairs])
            return [_score(weights, _digits()[2])[0] for weights in found.weights]

        body, head = [METHODS[name][0] + k for k in self.body], [HEAD + k for k in self.head]
        tuning = tune(losses, body, head)
        best = min(tuning, key=lambda pair: tuning[pair])
        found = self._train(name, [(seed, best) for seed in self.seeds])
        tests = [_split(seed)[2:] for seed in self.seeds]
        scores = [_score(*both) for both in zip(found.weights, tests, strict=True)]
        return {
            "tuning": [(*pair, tuning[pair]) for pair in sorted(tuning)],
            "loss": [loss for loss, _ in scores],
            "accuracy": [correct for _, correct in scores],
            "distance": max(_distance(weight) for own in found.weights for weight in own[:2]),
            "versions": found.versions,
        }

    def _time(self, name: str) -> dict[str, float]:
        jax.clear_caches()
        _step.cache_clear()
        found = self._train(name, [(TUNING_SEED, (METHODS[name][0], HEAD))])
        first, *others = 1e3 * np.diff(found.times[0])
        return {"set_up": float(first), "step": float(np.median(others))}

    def _train(self, name: str, places: Sequence[tuple[int, Pair]]) -> Trained:
        """Train at each seed and pair of rates."""
        runs = []
        for seed, pair in places:
            images, labels, *_ = _split(seed)
            order = batches(seed, len(labels), self.steps, self.batch)
            rates = np.exp2(np.array(pair, np.float32))
            runs.append((images, labels, order, *_start(seed), rates))
        _, how = METHODS[name]
        if isinstance(how, str):
            return _train_there(how, runs, self.python or PYTHON)
        return _train_here(how, runs)

    def summarise(self, rows: Sequence[Row]) -> Mapping[str, Any]:
        trained = {row["method"]: row for row in rows if "method" in row}
        rounds = [row["milliseconds"] for row in rows if "round" in row]
        found = {}
        for name, row in trained.items():
            tuning = {(body, head): loss for body, head, loss in row["tuning"] if loss is not None}
            best = min(tuning, key=lambda pair: tuning[pair])
            near = [tuning[p] for p in tuning if max(abs(p[0] - best[0]), abs(p[1] - best[1])) <= 1]
            found[name] = {
                "log2_rates": best,
                "trials": len(row["tuning"]),
                "octave_off": max(near) / tuning[best],
                "distance": row["distance"],
            }
            for key in ("loss", "accuracy"):
                values, ours = (np.array(of[key], np.float64) for of in (row, trained[OURS]))
                found[name] |= {key: estimate(values), f"{key}_beyond": estimate(values - ours)}
            for key in ("step", "set_up"):
                found[name][key] = statistics.median(own[name][key] for own in rounds)
        return found

    def table(self, record: Record) -> str:
        lines = [
            [
                name,
                "2^{} 2^{}".format(*found["log2_rates"]),
                f"{found['trials']}",
                f"{found['octave_off']:.2f}",
                shown(found["loss"], ".4f"),
                shown(found["loss_beyond"], "+.4f"),
                shown(found["accuracy"], ".4f"),
                f"{found['distance']:.0e}",
                f"{found['step']:.2f}",
                f"{found['set_up']:.0f}",
            ]
            for name, found in record["summary"].items()
        ]
        header = ["", "body, head", "trials", "octave off", "test loss", f"beyond {OURS}"]
        return text_table([*header, "accuracy", "distance", "step (ms)", "set-up (ms)"], lines)


def tune(
    losses_of: Callable[[Sequence[Pair]], Sequence[float]], body: Sequence[int], head: Sequence[int]
) -> dict[Pair, float]:
    """Return the losses on a grid, and around the best until no neighbour of it is missing."""
    found: dict[Pair, float] = {}
    new = list(itertools.product(body, head))
    while new and len(found) < 200:
        losses = np.nan_to_num(np.array(losses_of(new), np.float64), nan=np.inf)
        found.update(zip(new, losses.tolist(), strict=True))
        x, y = min(found, key=lambda pair: found[pair])
        around = itertools.product((x - 1, x, x + 1), (y - 1, y, y + 1))
        new = [pair for pair in around if pair not in found]
    return found


# --- Data and training ---------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def _digits() -> tuple[Any, Any, tuple[Any, Any]]:
    """Return images and labels to train and test with, and the part held out for tuning."""
    images, labels, *held_out, _ = standardise(load_digits(0))
    return images, labels, (held_out[0], held_out[1])


def _split(seed: int) -> tuple[np.ndarray, ...]:
    """Return images and labels of the training and the test part of this seed."""
    images, labels, _ = _digits()
    train, test = stratified_split(labels, seed, 0.25)
    return images[train], labels[train], images[test], labels[test]


def _start(seed: int) -> list[np.ndarray]:
    """Return uniform orthonormal hidden matrices, and a Gaussian head."""
    head = np.random.default_rng(seed).normal(size=(10, 128)).astype(np.float32) / np.sqrt(128)
    return [*map(np.asarray, init_weights(seed, SHAPES)), head.astype(np.float32)]


@functools.lru_cache(maxsize=1)
def _step(build: Build) -> Any:
    @jax.jit
    def step(weights: Any, state: Any, images: Any, labels: Any, batch: Any, rates: Any) -> Any:
        tx = build(rates[0], optax.adam(rates[1]))
        grads = jax.grad(cross_entropy)(weights, images[batch], labels[batch], 1.0)
        updates, state = tx.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state

    return step


def _train_here(build: Build, runs: Runs) -> Trained:
    found = Trained([], [])
    for *arrays, order, first, second, head, rates in runs:
        times = [time.process_time()]
        images, labels, *weights = map(jnp.asarray, (*arrays, first, second, head))
        state = build(0.0, optax.adam(0.0)).init(weights)
        for k, batch in enumerate(order):
            left = rates * np.float32(1 - k / len(order))
            weights, state = _step(build)(weights, state, images, labels, batch, left)
            jax.block_until_ready(weights)
            times.append(time.process_time())
        found.weights.append([np.asarray(weight) for weight in weights])
        found.times.append(np.array(times))
    return found


def _train_there(rival: str, runs: Runs, python: Path) -> Trained:
    if not python.exists():
        raise ValueError(
            f"{python} is missing: python -m venv .venv-torch, then .venv-torch/bin/pip install "
            "torch geotorch geoopt; or name the Python of such an environment with --python"
        )
    given = io.BytesIO()
    np.savez(given, *map(np.stack, zip(*runs, strict=True)))
    command = [python, "-I", SCRIPT, rival]  # isolated: `studies` has files such as datasets
    done = subprocess.run(command, input=given.getvalue(), capture_output=True)
    if done.returncode:
        raise ValueError(f"{SCRIPT.name} {rival}: {done.stderr.decode()[-300:]}")
    *weights, times, versions = np.load(io.BytesIO(done.stdout)).values()
    return Trained(
        list(map(list, zip(*weights, strict=True))), list(times), tuple(versions.tolist())
    )


def _score(weights: list[Any], part: Any) -> tuple[float, float]:
    """Return loss and accuracy."""
    images, labels = part
    loss = cross_entropy(weights, images, labels, 1.0)
    return float(loss), float(accuracy(weights, images, labels))


def _distance(weight: np.ndarray) -> float:
    """Return the largest distance of a singular value from 1, in float64."""
    return float(np.abs(np.linalg.svd(weight.astype(np.float64), compute_uv=False) - 1).max())
