"""Training in timed, compiled chunks of steps, with untimed measurements between chunks."""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import manifoldmuon as mm
from studies.classification import Weights, accuracy, cross_entropy, init_weights, shapes_of
from studies.datasets import batches
from studies.digits.methods import METHODS, PRESETS
from studies.training import begin, train

# Chunks keep every step's weights for the measurements: at most this many numbers.
_KEPT = 2**26

CHUNKS = 20
"""Number of chunks in a run, hence of points on its curves."""


def curves(job: Any, optimizer: str, seed: int) -> dict[str, list[Any]]:
    """Train once, and return the measurements.

    Args:
      job: the settings, a `Digits`.
      optimizer: a name in METHODS.
      seed: seed of the split, the initial weights and the order of the data.

    Returns:
      `step`, the number of steps taken (0, and then after every chunk), and at these steps
      `train_loss` and `test_accuracy` on the whole training and test part, and `largest` and
      `smallest`, the singular values of all layers in float64. For every chunk, the largest over
      its steps and the layers: `distance` from the manifolds, `residual` and `gap` of the
      directions; empty for optimizers without; and `milliseconds` per step. At the end the
      `spectral_norms` and `frobenius_norms` of the layers.
    """
    program, data = _program(job, optimizer), job.load(seed)
    arrays = tuple(jnp.asarray(part) for part in data[:4])
    carry = program.start(seed)
    found: dict[str, list[Any]] = {name: [] for name in _CURVES}

    def note(step: int, weights: Weights) -> None:
        loss, correct = program.evaluate(weights, *arrays)
        values = np.concatenate(singular_values(weights))
        for name, value in zip(
            ("step", "train_loss", "test_accuracy", "largest", "smallest"),
            (step, float(loss), float(correct), values.max(), values.min()),
            strict=True,
        ):
            found[name].append(value)

    note(0, carry[0])
    order = batches(seed, len(data.train_y), job.steps, job.batch_size)
    for length in program.lengths:
        done = found["step"][-1]
        batch = jnp.asarray(order[done : done + length])
        start = time.perf_counter()
        carry, steps = program.chunks[length](carry, *arrays[:2], batch)
        jax.block_until_ready(steps)
        found["milliseconds"].append(1e3 * (time.perf_counter() - start) / length)
        _, (passed, worst) = steps
        note(done + length, carry[0])
        if program.distance is not None:
            found["distance"].append(float(np.max(program.distance(passed))))
        for name, values in worst.items():
            found[name].append(float(np.max(values)))
    for values in singular_values(carry[0]):
        found["spectral_norms"].append(values[0])
        found["frobenius_norms"].append(np.linalg.norm(values))
    return found


_CURVES = (
    *("step", "train_loss", "test_accuracy", "largest", "smallest", "distance", "residual", "gap"),
    *("milliseconds", "spectral_norms", "frobenius_norms"),
)


class _Program(NamedTuple):
    """Compiled functions of an optimizer, for all seeds, which have data of equal shapes."""

    start: Callable[[int], Any]
    lengths: list[int]
    chunks: dict[int, Any]
    evaluate: Any
    distance: Any


@functools.lru_cache(maxsize=1)
def _program(job: Any, optimizer: str) -> _Program:
    method, data = METHODS[optimizer], job.load(job.seeds[0])
    shapes = shapes_of(data.widths(job.widths))
    geometry = method.geometry and method.geometry(shapes, PRESETS[job.preset])
    schedule = optax.linear_schedule(job.learning_rate(optimizer), 0.0, job.steps)
    tx = method.build(schedule, geometry)

    def start(seed: int) -> Any:
        return begin(tx, init_weights(seed, shapes))

    def measure(weights: Any, state: Any) -> Any:
        if geometry is None:
            return weights, {}
        report = mm.optim.monitor(state)
        return weights, {name: _worst(report[name]) for name in ("residual", "gap")}

    def chunk(carry: Any, images: Any, labels: Any, order: Any) -> Any:
        def loss(weights: Any, batch: Any) -> Any:
            return cross_entropy(weights, images[batch], labels[batch], job.multiplier)

        return train(tx, loss, carry, order, measure)

    def evaluate(weights: Any, train_x: Any, train_y: Any, test_x: Any, test_y: Any) -> Any:
        loss = cross_entropy(weights, train_x, train_y, job.multiplier)
        return loss, accuracy(weights, test_x, test_y)

    def farthest(weights: Any) -> Any:
        return _worst(mm.optim.monitor_distance(geometry, weights))

    lengths = chunk_lengths(job.steps, sum(a * b for a, b in shapes))
    # Compiled in advance, so that compilation is not timed.
    compiled = {
        length: jax.jit(chunk)
        .lower(start(0), data.train_x, data.train_y, np.zeros((length, job.batch_size), np.int32))
        .compile()
        for length in set(lengths)
    }
    distance = jax.jit(functools.partial(jax.lax.map, farthest)) if method.constrained else None
    return _Program(start, lengths, compiled, jax.jit(evaluate), distance)


def chunk_lengths(steps: int, numbers: int) -> list[int]:
    """Return the number of steps of each chunk, for a network with `numbers` parameters."""
    length = max(1, min(-(-steps // CHUNKS), _KEPT // numbers))
    whole, rest = divmod(steps, length)
    return [length] * whole + [rest] * (rest > 0)


def singular_values(weights: Weights) -> list[np.ndarray]:
    """Return every layer's singular values in float64, descending; NaN after divergence."""
    wide = [np.asarray(weight, np.float64) for weight in weights]
    return [
        np.linalg.svd(x, compute_uv=False)
        if np.isfinite(x).all()  # LAPACK would raise
        else np.full(min(x.shape), np.nan)
        for x in wide
    ]


def _worst(by_layer: dict[str, jax.Array]) -> jax.Array:
    return jnp.max(jnp.stack(list(by_layer.values())))
