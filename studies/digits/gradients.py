"""Weights and gradients of manifold Muon on the main job, for benchmarks of solvers."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from studies.classification import shapes_of, trajectory
from studies.digits.methods import PRESETS, stiefel
from studies.digits.settings import Settings
from studies.records import whole

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
    data = settings.load(seed)
    found = trajectory(
        data,
        settings.widths,
        stiefel(shapes_of(data.widths(settings.widths)), PRESETS[settings.preset]),
        settings.learning_rate("stiefel"),
        steps,
        settings.batch_size,
        settings.multiplier,
        seed,
        wanted,
    )
    return [
        (f"layer {layer}, step {count}", given.point, given.gradient)
        for count in wanted
        for layer, given in enumerate(found[count], start=1)
    ]


def save_gradients(path: Path, recorded: Sequence[Recorded]) -> None:
    """Writes the triples to an .npz file: `name/weight` and `name/gradient` for each name."""
    arrays = {}
    for name, weight, gradient in recorded:
        arrays[f"{name}/weight"], arrays[f"{name}/gradient"] = weight, gradient
    with whole(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)
