"""The picture of the solver shoot-out."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from manifoldmuon.lab._contestants import EXACT
from manifoldmuon.lab._figures import COLOURS, dress, panels
from manifoldmuon.lab._intervals import reach
from manifoldmuon.lab._study import Record, Row


def picture(record: Record) -> Any:
    """Gaps along the runs, and differences to the exact direction."""
    settings, trained = record["settings"], record["summary"]["training"]
    figure, [(gap_panel, points, losses)] = panels(1, 3, width=5.2, height=4.2)
    _draw_gaps(gap_panel, [row for row in record["rows"] if row["part"] == "gap"])
    for panel, key, title, label in (
        (points, "accuracy_minus_exact", "Test accuracy", "points more than exact"),
        (losses, "log_loss_minus_exact", "Training loss", "log of the loss, minus exact"),
    ):
        others = [solver for solver in trained if solver != EXACT]
        for k, solver in enumerate(others):
            _draw(panel, k, solver, key, trained[solver])
        panel.axhline(0, color="#444444", linewidth=1)
        panel.set_xscale("log")
        panel.set_xticks(settings["rates"], [f"{rate:g}" for rate in settings["rates"]])
        panel.minorticks_off()
        if others:
            panel.legend(frameon=False)
        dress(panel, title, f"paired over {len(settings['seeds'])} seeds, 95 % intervals",
              "learning rate", label)  # fmt: skip
    return figure


def _draw(panel: Any, k: int, solver: str, key: str, by_rate: Mapping[str, Any]) -> None:
    found = [entry[key] for entry in by_rate.values()]
    values = np.array([np.nan if f["value"] is None else f["value"] for f in found])
    reaches = [reach(f["interval"]) or 0.0 for f in found]
    rates = np.array([float(rate) for rate in by_rate]) * 1.08 ** (k - 0.5)
    panel.errorbar(rates, values, reaches, fmt="o", color=COLOURS[1 + k], capsize=3, label=solver)


def _draw_gaps(panel: Any, rows: Sequence[Row]) -> None:
    solvers = list(dict.fromkeys(row["solver"] for row in rows))[::-1]
    for k, (key, colour) in enumerate((("cold", COLOURS[0]), ("warm", COLOURS[3]))):
        for height, solver in enumerate(solvers):
            values = np.ravel([row[key] for row in rows if row["solver"] == solver])
            values = np.maximum(values, 1e-7)
            label = key if height == 0 else None
            y = height + 0.16 - 0.32 * k
            panel.plot(values, np.full(len(values), y), "o", color=colour, markersize=3, alpha=0.35)
            panel.plot(np.median(values), y, "|", color=colour, markersize=9, markeredgewidth=2.4,
                       label=label)  # fmt: skip
    panel.set_xscale("log")
    panel.set_yticks(range(len(solvers)), solvers)
    if solvers:
        panel.legend(frameon=False, title="start (bar: median)", loc="center left",
                     bbox_to_anchor=(0, 0.68))  # fmt: skip
    dress(panel, "Gap on real gradients", "a point for each layer, place and run",
          "relative gap to the optimum", "")  # fmt: skip
