"""Effects of choices, paired by seed, each arm at its own best learning rate."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from manifoldmuon.lab._intervals import mean

Levels = tuple[str, ...]
"""One level for each factor: an arm."""


def at_best_rate(
    losses: Float[np.ndarray, "seeds rates"],
) -> tuple[Float[np.ndarray, " seeds"], int]:
    """Each seed's loss at the rate that is best for the other seeds, and the best rate for all.

    Rate and loss come from different seeds, so that a large grid flatters no one. A single seed
    has no others and takes its own best. Losses that are not finite are worse than all others.
    """
    worst = np.max(losses, initial=1.0, where=np.isfinite(losses))
    losses = np.where(np.isfinite(losses), losses, 10 * worst)
    others = losses.sum(axis=0) - losses if len(losses) > 1 else losses
    chosen = others.argmin(axis=1)
    return losses[np.arange(len(losses)), chosen], int(losses.mean(axis=0).argmin())


def gain(
    values: Mapping[Levels, Float[np.ndarray, " seeds"]], factor: int, level: str, without: str
) -> dict[str, Any]:
    """How much lower the loss is with a level of a factor than without.

    Args:
      values: by arm, the loss of every seed; every combination of levels.
      factor: which of the levels of an arm.
      level: the one that may buy something.
      without: the one that it is compared with.

    Returns:
      `mean` over the levels of the other factors, with its `interval` over seeds, and
      `by_arm`, the same for each of them. Positive numbers are gains.
    """
    by_arm, per_seed = {}, []
    for arm, loss in values.items():
        if arm[factor] == level:
            other = (*arm[:factor], without, *arm[factor + 1 :])
            per_seed.append(values[other] - loss)
            name = ", ".join(part for k, part in enumerate(arm) if k != factor)
            by_arm[name] = estimate(per_seed[-1])
    return estimate(np.mean(per_seed, axis=0)) | {"by_arm": by_arm}


def estimate(values: Float[np.ndarray, " seeds"]) -> dict[str, Any]:
    """The mean and its interval, for a record."""
    found = mean(values)
    return {"mean": found.value, "interval": found.interval}
