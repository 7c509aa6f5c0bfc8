"""A search over four knobs with a fixed number of trainings, the same for every method."""

import operator
from collections.abc import Callable
from typing import Any

Place = tuple[int, int, int, int]
"""Half octaves of the rate, and powers of the other three knobs, from where the search begins."""

START: Place = (0, 0, 0, 0)

MOVES: tuple[Place, ...] = (
    (2, 0, 0, 0), (-2, 0, 0, 0), (0, 1, 0, 0), (0, -1, 0, 0),
    (0, 0, 1, 0), (0, 0, -1, 0), (0, 0, 0, 1), (0, 0, 0, -1), (1, 0, 0, 0), (-1, 0, 0, 0),
    (2, -1, 0, 0), (-2, 1, 0, 0), (2, 1, 0, 0), (-2, -1, 0, 0),
)  # fmt: skip
"""In the order in which they are tried from the best place so far; no grid has an edge."""


def search(loss: Callable[[Place], float], tries: int, start: Place = START) -> dict[Place, float]:
    """Return the losses of as many places as there are tries.

    From the best place so far the first of `MOVES` that leads to a new one is tried. A loss that
    is not finite is worse than all others.

    Args:
      loss: of a place.
      tries: how many places; fewer if all moves from the best one have been tried.
      start: the first place.
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
    """Return the place of the lowest loss; NaN is worse than all numbers."""
    return min(found, key=lambda place: found[place] if found[place] < 1e9 else 1e9)
