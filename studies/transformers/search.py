"""Search over four knobs, with the same number of trainings for every method."""

import operator
from collections.abc import Callable
from typing import Any

Place = tuple[int, int, int, int]
"""Half octaves of the rate and exponents of the other three knobs, relative to the start."""

START: Place = (0, 0, 0, 0)

MOVES: tuple[Place, ...] = (
    (2, 0, 0, 0), (-2, 0, 0, 0), (0, 1, 0, 0), (0, -1, 0, 0),
    (0, 0, 1, 0), (0, 0, -1, 0), (0, 0, 0, 1), (0, 0, 0, -1), (1, 0, 0, 0), (-1, 0, 0, 0),
    (2, -1, 0, 0), (-2, 1, 0, 0), (2, 1, 0, 0), (-2, -1, 0, 0),
)  # fmt: skip
"""Moves from the best point so far, in order; the grid is unbounded."""


def search(loss: Callable[[Place], float], tries: int, start: Place = START) -> dict[Place, float]:
    """Return the losses of all tried points.

    Each try is the first of `MOVES` from the best point so far that leads to a new point. A loss
    that is not finite is worse than all others.

    Args:
      loss: returns the loss of a point.
      tries: the number of points; fewer if all moves from the best point have been tried.
      start: the first point.
    """
    found: dict[Place, float] = {start: loss(start)}
    while len(found) < tries:
        at = best_place(found)
        near = (tuple(map(operator.add, at, move)) for move in MOVES)
        place: Any = next((place for place in near if place not in found), None)
        if place is None:
            break
        found[place] = loss(place)
    return found


def best_place(found: dict[Place, float]) -> Place:
    """Return the point of the lowest loss; NaN is worse than all numbers."""
    return min(found, key=lambda place: found[place] if found[place] < 1e9 else 1e9)
