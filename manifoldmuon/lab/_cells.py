"""Cells: what is measured in one, its key, and which belong together."""

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from manifoldmuon.lab._records import _plain
from manifoldmuon.lab._study import Cell, Row, Study


def measured(study: Study, cell: Cell) -> Row:
    """The row of a cell."""
    found = plain(study.run(cell))
    if twice := cell.keys() & found.keys():
        raise ValueError(f"a cell of {study.name} measures {sorted(twice)}, which it is")
    return {**cell, **found}


def groups_of(study: Study, cells: Sequence[Cell]) -> list[list[Cell]]:
    """The cells in their order, cut where another program begins."""

    def program(cell: Cell) -> Cell:
        return {name: value for name, value in cell.items() if name not in study.traced}

    return [list(group) for _, group in itertools.groupby(cells, program)]


def key_of(cell: Cell) -> str:
    """The same for equal cells."""
    return json.dumps(cell, sort_keys=True)


def plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """As a reader of the record will see it, so that a resumed run cannot tell the difference."""
    return json.loads(json.dumps(_plain(value, "record")))
