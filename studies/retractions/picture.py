"""The picture of the retraction laboratory, with a column for each manifold."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from studies.display import COLOURS, dress, panels
from studies.retractions.spaces import MATRIX, SPHERE
from studies.study import Record, Row

# A retraction and its counterpart on the sphere share a colour.
_COLOUR = dict(zip(dict.fromkeys((*MATRIX, *SPHERE)), COLOURS, strict=False))
_COLOUR |= {"normalize": _COLOUR["polar"], "geodesic": _COLOUR["exponential"]}
_DASHES = (0, (3, 2))

TOP = 8
"""The largest ratio in the picture."""


def picture(record: Record) -> Any:
    """Plot order, drift, cost and training, if recorded."""
    settings, summary = record["settings"], record["summary"]
    lines = [draw for part in settings["parts"] for draw in _DRAW[part]]
    figure, grid = panels(len(lines), len(summary), width=4.2, height=3.2)
    for space, column in zip(summary, grid.T, strict=True):
        for (part, draw), panel in zip(lines, column, strict=True):
            rows = [r for r in record["rows"] if (r["manifold"], r["part"]) == (space, part)]
            draw(panel, rows, summary[space], settings)
            panel.set_title(f"{space}: {panel.get_title(loc='left')}", loc="left", fontsize=11,
                            fontweight="bold")  # fmt: skip
    return figure


def middle(rates: Sequence[float]) -> float:
    """Return the rate for panels with a single rate."""
    return sorted(rates)[len(rates) // 2]


def _orders(panel: Any, rows: Sequence[Row], entries: Any, settings: Any) -> None:
    del entries, settings
    for row in rows:
        slope = "exact" if row["slope"] is None else f"{row['slope']:.1f}"
        panel.plot(row["times"], np.maximum(_numbers(row["errors"]), 1e-17),
                   color=_COLOUR[row["retraction"]], marker="o", markersize=3.5,
                   label=f"{row['retraction']}, {slope}", linewidth=1.6)  # fmt: skip
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_ylim(1e-10, 1)
    _legend(panel, 2)
    dress(panel, "order of accuracy", "with the slope, in float64",
          "step", "distance from the geodesic")  # fmt: skip


def _drifts(panel: Any, rows: Sequence[Row], entries: Any, settings: Any) -> None:
    del entries
    rate = middle(settings["rates"])
    for row in rows:
        curve = row["distances"][settings["rates"].index(rate)]
        _line(panel, row["at"], np.maximum(_numbers(curve), 1e-8), row, settings)
    _distances(panel)
    panel.set_xlabel("steps")
    dress(panel, "drift", f"rate {rate:g}, {_dashes(settings)}", "steps",
          "distance from the set")  # fmt: skip


def _drifts_by_rate(panel: Any, rows: Sequence[Row], entries: Any, settings: Any) -> None:
    del entries
    for row in rows:
        last = _numbers([curve[-1] for curve in row["distances"]])
        _line(panel, settings["rates"], np.maximum(last, 1e-8), row, settings)
    _distances(panel)
    dress(panel, "drift and rate", f"after {settings['walk_steps']} steps, {_dashes(settings)}",
          "learning rate", "distance from the set")  # fmt: skip


def _line(panel: Any, x: Any, y: Any, row: Row, settings: Any) -> None:
    first = row["dtype"] == settings["dtypes"][0]
    panel.plot(x, y, color=_COLOUR[row["retraction"]], linestyle="-" if first else _DASHES,
               marker="o", markersize=3, linewidth=1.6,
               label=row["retraction"] if first else None)  # fmt: skip


def _distances(panel: Any) -> None:
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_ylim(1e-8, 1e4)
    _legend(panel, 3)


def _costs(panel: Any, rows: Sequence[Row], entries: Any, settings: Any) -> None:
    del entries, settings
    costs = {row["retraction"]: row for row in rows}
    names = list(costs)[::-1]
    panel.barh(names, [costs[name]["cost"] for name in names], color=[_COLOUR[n] for n in names])
    for k, name in enumerate(names):
        panel.annotate(f"{costs[name]['cost']:.1f}", (costs[name]["cost"], k), xytext=(3, 0),
                       textcoords="offset points", va="center", fontsize=8)  # fmt: skip
    dress(panel, "cost", "of a step at the rate 0.1", "time in products of the same size", "")
    panel.grid(axis="y", visible=False)
    panel.set_xscale("log")
    panel.set_xlim(0.01, 1000)


def _losses(panel: Any, rows: Sequence[Row], entries: Any, settings: Any) -> None:
    del rows
    _trained(panel, entries, settings, "loss")
    panel.set_yscale("log")
    low, high = panel.get_ylim()
    panel.set_ylim(low, 30 * high)  # room for the legend
    _legend(panel, 3)
    dress(panel, "training", f"{_dashes(settings)}; back on the set",
          "learning rate", "final training loss")  # fmt: skip


def _ratios(panel: Any, rows: Sequence[Row], entries: Any, settings: Any) -> None:
    """Plot loss ratios, with a cross at the top for ratios out of range and diverged trainings."""
    del rows
    _trained(panel, entries, settings, "ratio")
    panel.axhline(1, color="#555555", linewidth=0.8, zorder=0)
    panel.set_yscale("log", base=2)
    panel.set_ylim(0.5, TOP)
    for name, entry in entries.items():
        for dtype in settings["dtypes"]:
            found = entry["training"][dtype]
            lost = [float(rate) for rate, e in found.items() if _beyond(e["ratio"])]
            panel.plot(_shifted(lost, name, entries), [0.9 * TOP] * len(lost), linestyle="none",
                       color=_COLOUR[name], markersize=6,
                       marker="x" if dtype == settings["dtypes"][0] else "+")  # fmt: skip
    others = ", ".join(settings["dtypes"][1:])
    dress(panel, "training, relative",
          f"×: above {TOP} or diverged" + (f" ({others}: +)" if others else ""),
          "learning rate", "final loss over the default's")  # fmt: skip


def _beyond(ratio: Mapping[str, Any] | None) -> bool:
    return ratio is None or ratio["value"] > TOP


def _trained(panel: Any, entries: Mapping[str, Any], settings: Any, what: str) -> None:
    for name, entry in entries.items():
        for dtype in settings["dtypes"]:
            found = {float(rate): e[what] for rate, e in entry["training"][dtype].items()}
            values = _numbers([e and e["value"] for e in found.values()])
            ends = [(e and e["interval"]) or (np.nan, np.nan) for e in found.values()]
            bars = np.abs(np.array(ends).T - values)
            first = dtype == settings["dtypes"][0]
            panel.errorbar(_shifted(list(found), name, entries), values, bars,
                           color=_COLOUR[name], linestyle="-" if first else _DASHES, marker="o",
                           markersize=3, linewidth=1.4, elinewidth=0.8,
                           label=name if first else None)  # fmt: skip
    panel.set_xscale("log")


def _shifted(rates: Sequence[float], name: str, entries: Mapping[str, Any]) -> np.ndarray:
    """Shift the points of each retraction sideways, so that equal results do not overlap."""
    return np.asarray(rates) * 1.05 ** (list(entries).index(name) - len(entries) / 2)


def _legend(panel: Any, columns: int) -> None:
    panel.legend(frameon=False, fontsize=7.5, ncols=columns, loc="upper left")


def _dashes(settings: Mapping[str, Any]) -> str:
    first, *others = settings["dtypes"]
    return first + "".join(f", dashed: {dtype}" for dtype in others)


def _numbers(values: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values])


_Panel = Callable[[Any, Sequence[Row], Any, Any], None]
_DRAW: dict[str, list[tuple[str, _Panel]]] = {
    "order": [("order", _orders)],
    "walk": [("walk", _drifts), ("walk", _drifts_by_rate)],
    "cost": [("cost", _costs)],
    "training": [("training", _losses), ("training", _ratios)],
}
