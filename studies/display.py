"""Helpers for pictures in a common style, tables and short numbers."""

from collections.abc import Sequence
from typing import Any

COLOURS = ("#0072B2", "#C58000", "#CC79A7", "#000000", "#767676", "#3A9AD0", "#009E73")
"""Okabe and Ito's colours, orange and sky darkened to a contrast of 3 with white; no vermilion,
which is close to the dark orange for colour-blind readers."""

BLUE, ORANGE, PURPLE, BLACK, GREY, SKY, GREEN = COLOURS


def panels(rows: int, columns: int, width: float = 5.0, height: float = 3.8) -> tuple[Any, Any]:
    """Create a figure and its panels: an array of shape (rows, columns), panel sizes in inches."""
    from matplotlib.figure import Figure

    size = (columns * width, rows * height)
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def dress(panel: Any, title: str, subtitle: str, x: str, y: str) -> None:
    """Add titles, axis labels, and a grid behind the data."""
    panel.set_title(f"{title}\n", loc="left", fontsize=11, fontweight="bold")
    second = panel.annotate(
        subtitle, (0, 1), xytext=(0, 5), xycoords="axes fraction",
        textcoords="offset points", fontsize=8.5, color="#555555",
    )  # fmt: skip
    second.set_in_layout(False)  # a long subtitle must not change the size of the panel
    panel.set_xlabel(x)
    panel.set_ylabel(y)
    panel.grid(color="#e2e2e2", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def legend_above(figure: Any, panel: Any, columns: int = 4) -> None:
    """Draw the legend of a panel above the figure, off the data."""
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=columns, frameon=False)


def text_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Format rows as a text table: first column left-aligned, the others right-aligned."""
    cells = [header, *lines]
    widths = [max(len(line[i]) for line in cells) for i in range(len(header))]

    def join(line: Sequence[str]) -> str:
        first, *others = (
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        return "  ".join([first, *others]).rstrip()

    rule = "-" * max(len(join(line)) for line in cells)
    return "\n".join([join(header), rule, *map(join, lines)])


def markdown_table(header: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    """Format rows as a Markdown table."""
    first, *rest = ("| " + " | ".join(map(str, row)) + " |" for row in (header, *lines))
    rest = [line.replace(" ± ", "\u00a0±\u00a0") for line in rest]  # does not break
    return "\n".join([first.replace("|  |", "| |", 1), "|---" * len(header) + "|", *rest])


def short(value: float | None, form: str = ".1e") -> str:
    """Format a number; None becomes a dash."""
    return "-" if value is None else format(value, form)
