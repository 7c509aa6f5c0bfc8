"""The picture of certified networks, from the record alone."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from studies.certified.findings import PARTS
from studies.display import COLOURS, dress, legend_above, panels
from studies.estimates import half_width
from studies.study import Record


def picture(record: Record, radii: Sequence[float]) -> Any:
    """Plot accuracy against radius, against CPU time, and between proof and attack."""
    summary, settings = record["summary"], record["settings"]
    timing = settings["timing"]
    width = 3.2 if timing else 4.6  # of a panel: the legend needs the width of both
    figure, (axes,) = panels(1, 2 + timing, width=width, height=3.4)
    curves, attacks = axes[0], axes[-1]
    pairs = itertools.product(summary, next(iter(summary.values())))
    # Reuse the colours, dotted and hollow, if there are more methods than colours.
    looks = itertools.product((("-", "full"), (":", "none")), COLOURS)
    for (network, method), ((line, fill), colour) in zip(pairs, looks, strict=False):
        found = summary[network][method]
        names = [network] * (len(summary) > 1) + [method] * (len(summary[network]) > 1)
        curve = 100 * np.array(found["epochs"]["curve"])
        x = np.linspace(0, 1.5 * max(radii), len(curve))
        curves.plot(x, curve, line, color=colour, label=", ".join(names))
        for part, marker in zip(PARTS, "os", strict=True) if timing else ():
            mine, last = found[part]["seconds"], found[part]["accuracies"][-1]
            axes[1].errorbar([mine], [100 * last["mean"]], yerr=_percent(last), fmt=marker,
                           capsize=3, color=colour, markersize=5, fillstyle=fill)  # fmt: skip
        for key, style in (("robust", "v--"), ("proved", "o-")):
            level = [100 * estimate["mean"] for estimate in found[key]]
            attacks.plot(
                radii, level, style, color=colour, linewidth=1, markersize=4, fillstyle=fill
            )
    for radius in radii:
        curves.axvline(radius, color="#bbbbbb", linewidth=0.8, zorder=0)
    if len(summary) > 1 or len(summary[next(iter(summary))]) > 1:
        legend_above(figure, curves)
    what = ", ".join(summary) if len(summary) <= 2 else f"{len(summary)} networks"
    title = f"{what}: {settings['images']}"
    dress(curves, title, "certified after equal epochs, means",
          "radius in pixels between 0 and 1", "% of the test images")  # fmt: skip
    if timing:
        dress(axes[1], f"At radius {max(radii):.3g}", "equal epochs (circles), time (squares)",
              "CPU seconds of training", "% certified, 95 % intervals")  # fmt: skip
    dress(attacks, "Between proof and attack", "certified (full), under PGD (dashed)",
          "radius in pixels between 0 and 1", "% of the attacked images")  # fmt: skip
    return figure


def _percent(estimate: dict[str, Any]) -> float | None:
    """Return half the width of an interval, in percent."""
    error = half_width(estimate["interval"])
    return None if error is None else 100 * error
