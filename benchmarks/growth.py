"""Growth of a step and its compilation: with width, with leaves, with copies in a stack.

    python -m benchmarks growth    # ten minutes; docs/benchmarks/results/growth.*

The trees and the optimizers are those of `benchmarks.steps`, grown along one axis at a time. Times
are medians of rounds in which everything is measured in turn, compile times are of one call.
"""

from typing import Any

from matplotlib.figure import Figure
from tqdm import tqdm

from benchmarks._command import command, save_with_table
from benchmarks.steps import MUON, measure
from studies.display import dress, markdown_table, panels
from studies.program import parse

OPTIMIZERS = (MUON, "muon", "manifold_muon, FAST", "manifold_muon, ACCURATE")
# What grows: layers, width, whether the layers are stacked; and how the picture counts it.
AXES: dict[str, tuple[tuple[tuple[int, int, bool], ...], str]] = {
    "width": (tuple((2, width, False) for width in (64, 128, 256, 512, 768)), "width"),
    "leaves": (tuple((layers, 64, False) for layers in (2, 4, 8, 16, 32, 64)), "layers"),
    "batch": (tuple((layers, 64, True) for layers in (2, 4, 8, 16, 32, 64)), "layers"),
}
TITLES = {
    "width": "two layers, each leaf by itself",
    "leaves": "width 64, each leaf by itself",
    "batch": "width 64, layers stacked",
}


def table(rows: list[dict]) -> str:
    """The rows as Markdown: seconds of Optax's, and ratios to them."""
    ours = OPTIMIZERS[1:]
    header = ["grows", "layers of width", f"{MUON}, ms", *ours, "compile, s", *ours]
    lines = []
    for row in rows:
        cells = [row["grows"], f"{row['layers']} of {row['width']}"]
        for key, unit in (("seconds", 1e3), ("compile_seconds", 1.0)):
            first = row[key][MUON]
            cells += [f"{first * unit:.1f}", *(f"{row[key][name] / first:.2f}" for name in ours)]
        lines.append(cells)
    return markdown_table(header, lines)


def plot(rows: list[dict]) -> Figure:
    """One column for each axis: a step above, its compilation below."""
    figure, grid = panels(2, len(AXES))
    measured = {"seconds": "one step, seconds", "compile_seconds": "trace and compile, seconds"}
    for line, (key, label) in zip(grid, measured.items(), strict=True):
        for panel, (axis, (_, counted)) in zip(line, AXES.items(), strict=True):
            grown = [row for row in rows if row["grows"] == axis]
            for name in OPTIMIZERS:
                across = [row[counted] for row in grown]
                panel.loglog(across, [row[key][name] for row in grown], "o-", label=name)
            panel.set_xticks([row[counted] for row in grown], [str(row[counted]) for row in grown])
            panel.minorticks_off()
            dress(panel, axis, TITLES[axis], counted, label)
    grid[0, 0].legend(frameon=False)
    return figure


def main(argv: list[str] | None = None) -> None:
    """Runs the benchmark."""
    p = command("growth", "How a step and its compilation grow with width, leaves and batch.")
    p.add_argument("--rounds", type=int, default=7, help="timed rounds (default: %(default)s)")
    p.add_argument("--axes", nargs="+", choices=list(AXES), default=list(AXES))
    options = parse(p, argv, beside=(".md", ".png"))
    rows: list[dict[str, Any]] = []
    for axis in options.axes:
        for tree in tqdm(AXES[axis][0], desc=axis, unit="tree"):
            rows.append({"grows": axis, **measure(*tree, options.rounds, list(OPTIMIZERS))})
    save_with_table(options, {"rounds": options.rounds, "rows": rows}, table(rows))
    plot(rows).savefig(options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
