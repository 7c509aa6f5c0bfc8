"""Text that users read: trees, tables, and what to install."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

Node = tuple[tuple[str, ...], list[Any]]
"""Cells of a row, and child nodes."""


class Printed:
    """Mix-in that makes notebooks show a value as `print` does, not by its `repr`."""

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def missing_extra(what: str, package: str, extra: str) -> ImportError:
    """Return the error of an import that needs an extra of this package."""
    return ImportError(
        f"{what} needs {package}: pip install '.[{extra}]' from the root of the source"
    )


def align(rows: Sequence[tuple[str, ...]]) -> str:
    """Return rows of cells as lines, each column padded to its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ([c.ljust(w) for c, w in zip(row, widths, strict=True)] for row in rows)
    return "\n".join("  ".join(cells).rstrip() for cells in lines)


def tree(header: tuple[str, ...], root: Node) -> str:
    """Return a table with a row for each node, and branches drawn in the first column."""
    rows = [header]

    def add(node: Node, first: str, rest: str) -> None:
        (name, *cells), children = node
        rows.append((first + name, *cells))
        for i, child in enumerate(children):
            own, below = ("└─ ", "   ") if i == len(children) - 1 else ("├─ ", "│  ")
            add(child, rest + own, rest + below)

    add(root, "", "")
    return align(rows)
