"""Trees and tables as text."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence


class Printed:
    """Mix-in for values that a notebook shows as they are printed, not by their `repr`."""

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def align(rows: Sequence[tuple[str, ...]]) -> str:
    """Return rows of cells as lines, each column padded to its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ([c.ljust(w) for c, w in zip(row, widths, strict=True)] for row in rows)
    return "\n".join("  ".join(cells).rstrip() for cells in lines)


def branches(count: int, rest: str) -> Iterator[tuple[str, str]]:
    """Yield, for each child of a node, what precedes its own line and the lines below it."""
    for i in range(count):
        own, below = ("└─ ", "   ") if i == count - 1 else ("├─ ", "│  ")
        yield rest + own, rest + below
