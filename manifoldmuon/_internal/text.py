"""Trees and tables as text."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence


class Printed:
    """Mix-in that makes notebooks show a value as `print` does, not by its `repr`."""

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def align(rows: Sequence[tuple[str, ...]]) -> str:
    """Return rows of cells as lines, each column padded to its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ([c.ljust(w) for c, w in zip(row, widths, strict=True)] for row in rows)
    return "\n".join("  ".join(cells).rstrip() for cells in lines)


def branches(count: int, rest: str) -> Iterator[tuple[str, str]]:
    """Yield two prefixes for each child of a node: for its own line and for the lines below."""
    for i in range(count):
        own, below = ("└─ ", "   ") if i == count - 1 else ("├─ ", "│  ")
        yield rest + own, rest + below
