"""Weights and gradients of manifold Muon on the main job, for benchmarks of solvers."""

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import manifoldmuon as mm
from examples._data import batches, load
from examples._methods import PRESETS, stiefel
from examples._network import cross_entropy, init_weights, shapes_of
from examples._settings import Settings

Recorded = tuple[str, np.ndarray, np.ndarray]


def record_gradients(
    steps: int = 500,
    seed: int = 0,
    at: Sequence[int] | None = None,
    settings: Settings = Settings(),
) -> list[Recorded]:
    """Trains with manifold Muon and keeps what its solver is given.

    Args:
      steps: how many updates; the learning rate falls linearly to zero over them.
      seed: of the split, of the initial weights and of the order of the data.
      at: the steps to keep, counted from 0; by default the first, the middle and the last one.
      settings: data set, widths, batch size, learning rate, preset and multiplier of the main
        job; its steps, seeds and optimizers are not used.

    Returns:
      Triples of a name such as `layer 1, step 250`, a weight `W` on the Stiefel manifold (scale 1)
      and the momentum `G` there, tall as the solvers take them (a wide layer is transposed), in
      float32. At step 0 the momentum is the gradient of one batch.

    Raises:
      ValueError: if a step to keep is not among the steps.
    """
    wanted = sorted({0, steps // 2, steps - 1} if at is None else set(at))
    if not wanted or wanted[0] < 0 or wanted[-1] >= steps:
        raise ValueError(f"at={wanted} must lie between 0 and {steps - 1}, the last step")
    data = load(settings, seed)
    shapes = shapes_of(data.widths(settings.widths))
    train_x, train_y = jnp.asarray(data.train_x), jnp.asarray(data.train_y)
    order = batches(seed, len(data.train_y), steps, settings.batch_size)
    geometry = stiefel(shapes, PRESETS[settings.preset])
    rate = optax.linear_schedule(settings.learning_rate("stiefel"), 0.0, steps)
    # manifold_muon in two parts, so that the momentum between them can be seen.
    momentum = optax.trace(0.95, nesterov=True)
    descent = mm.optim.manifold_muon(rate, geometry, momentum=None)

    @jax.jit
    def step(weights, states, batch):
        grads = jax.grad(cross_entropy)(
            weights, train_x[batch], train_y[batch], settings.multiplier
        )
        push, first = momentum.update(grads, states[0], weights)
        updates, second = descent.update(push, states[1], weights)
        return optax.apply_updates(weights, updates), (first, second), push

    weights = init_weights(seed, shapes)
    states = momentum.init(weights), descent.init(weights)
    found: list[Recorded] = []
    for count, batch in enumerate(order[: wanted[-1] + 1]):
        moved, states, push = step(weights, states, batch)
        if count in wanted:
            pairs = zip(weights, push, strict=True)
            found += [
                (f"layer {layer}, step {count}", _tall(weight), _tall(gradient))
                for layer, (weight, gradient) in enumerate(pairs, start=1)
            ]
        weights = moved
    return found


def _tall(matrix: jax.Array) -> np.ndarray:
    rows, columns = matrix.shape
    return np.asarray(matrix.T if rows < columns else matrix)


def save_gradients(path: Path, recorded: Sequence[Recorded]) -> None:
    """Writes the triples to an .npz file: `name/weight` and `name/gradient` for each name."""
    arrays = {}
    for name, weight, gradient in recorded:
        arrays[f"{name}/weight"], arrays[f"{name}/gradient"] = weight, gradient
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)
