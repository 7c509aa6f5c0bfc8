"""Weights and gradients of manifold Muon on the main job, for benchmarks of solvers."""

from collections.abc import Sequence

import numpy as np

from studies.classification import shapes_of, trajectory
from studies.digits.methods import SOLVERS, stiefel
from studies.digits.study import Digits

Recorded = tuple[str, np.ndarray, np.ndarray]


def record_gradients(
    steps: int = 500, seed: int = 0, at: Sequence[int] | None = None, job: Digits = Digits()
) -> list[Recorded]:
    """Train with manifold Muon and return inputs of its solver.

    Args:
      steps: number of updates; the learning rate decays linearly to zero over them.
      seed: seed of the split, of the initial weights and of the order of the data.
      at: steps to keep, counted from 0; by default the first, the middle and the last.
      job: data set, widths, batch size, learning rate, solver and multiplier.

    Returns:
      Triples of a name such as `layer 1, step 250`, a weight `W` on the Stiefel manifold (scale 1)
      and the momentum `G` at this point, in float32. Both are tall, as the solvers require (wide
      layers are transposed). At step 0 the momentum is the gradient of one batch.

    Raises:
      ValueError: a step to keep is out of range.
    """
    wanted = sorted({0, steps // 2, steps - 1} if at is None else set(at))
    if not wanted or wanted[0] < 0 or wanted[-1] >= steps:
        raise ValueError(f"at must be steps from 0 to {steps - 1}; got {wanted}")
    data = job.load(seed)
    geometry = stiefel(shapes_of(data.widths(job.widths)), SOLVERS[job.solver])
    found = trajectory(
        data, job.widths, geometry, job.learning_rate("stiefel"), steps, job.batch_size,
        job.multiplier, seed, wanted,
    )  # fmt: skip
    return [
        (f"layer {layer}, step {count}", given.point, given.gradient)
        for count in wanted
        for layer, given in enumerate(found[count], start=1)
    ]
