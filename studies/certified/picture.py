"""The picture of certified networks, from nothing but their record."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from manifoldmuon.lab import half_width
from studies.certified.findings import PARTS
from studies.display import COLOURS, dress, panels
from studies.study import Record


def picture(record: Record, radii: Sequence[float]) -> Any:
    """A row for each network: accuracy against radius, against CPU time, and under attack."""
    summary, images = record["summary"], record["settings"]["images"]
    figure, grid = panels(len(summary), 3, width=5.0, height=4.0)
    for (curves, times, attacks), (network, methods) in zip(grid, summary.items(), strict=True):
        colours = dict(zip(methods, COLOURS, strict=False))
        for method, found in methods.items():
            curve = found["epochs"]["curve"]
            x = np.linspace(0, 1.5 * max(radii), len(curve))
            curves.plot(x, 100 * np.array(curve), color=colours[method], label=method)
            for part, marker in zip(PARTS, "os", strict=True):
                mine = found[part]
                last = mine["accuracies"][-1]
                error = half_width(last["interval"])
                times.errorbar(
                    [mine["seconds"]["mean"]], [100 * last["mean"]],
                    yerr=None if error is None else 100 * error, fmt=marker, capsize=3,
                    color=colours[method], markersize=5,
                )  # fmt: skip
            proved = [100 * e["mean"] for e in found["proved"]]
            robust = [100 * e["mean"] for e in found["robust"]]
            attacks.plot(radii, robust, "v--", color=colours[method], linewidth=1, markersize=4)
            attacks.plot(radii, proved, "o-", color=colours[method], linewidth=1, markersize=4)
        for radius in radii:
            curves.axvline(radius, color="#bbbbbb", linewidth=0.8, zorder=0)
        curves.legend(frameon=False, fontsize=7)
        dress(curves, f"{network}, {images}", "certified accuracy, equal epochs",
              "radius in pixels between 0 and 1", "% of the test images")  # fmt: skip
        times.set_xscale("log")
        dress(times, f"At radius {max(radii):.3g}", "equal epochs (circles), equal CPU time "
              "(squares), 95 %", "CPU seconds of training", "% certified")  # fmt: skip
        dress(attacks, "Between proof and attack", "certified (full), withstanding PGD (dashed)",
              "radius in pixels between 0 and 1", "% of the attacked images")  # fmt: skip
    return figure
