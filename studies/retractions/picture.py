"""The picture of the retraction laboratory, for its first manifold."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from studies.display import COLOURS, dress, legend_above, panels
from studies.retractions.spaces import MATRIX, SPHERE
from studies.study import Record, Row

# A retraction and its counterpart on the sphere share a colour.
_COLOUR = dict(zip(dict.fromkeys((*MATRIX, *SPHERE)), COLOURS, strict=False))
_COLOUR |= {"normalize": _COLOUR["polar"], "geodesic": _COLOUR["exponential"]}
_LABEL = {name: f"{type(found).__name__}()" for name, found in {**SPHERE, **MATRIX}.items()}


def picture(record: Record) -> Any:
    """Plot order, drift, cost and training of the first manifold, as far as they are recorded."""
    settings, summary = record["settings"], record["summary"]
    parts, space = settings["parts"], next(iter(summary))
    figure, grid = panels(-(-len(parts) // 2), 2, width=4.6, height=3.5)
    for panel in grid.flat[len(parts) :]:
        panel.set_visible(False)
    for part, panel in zip(parts, grid.flat, strict=False):
        rows = [r for r in record["rows"] if (r["manifold"], r["part"]) == (space, part)]
        _DRAW[part](panel, rows, summary[space], settings)
        panel.set_title(f"{space}: {panel.get_title(loc='left')}", loc="left", fontsize=11,
                        fontweight="bold")  # fmt: skip
    legend_above(
        figure, max(grid.flat, key=lambda panel: len(panel.get_legend_handles_labels()[0]))
    )
    return figure


def middle(rates: Sequence[float]) -> float:
    """Return the rate for panels with a single rate."""
    return sorted(rates)[len(rates) // 2]


def _orders(panel: Any, rows: Sequence[Row], entries: Any, settings: Any) -> None:
    del entries, settings
    for row in rows:
        panel.plot(row["times"], np.maximum(_numbers(row["errors"]), 1e-17), **_style(row))
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_ylim(1e-8, 0.1)
    dress(panel, "order of accuracy", "in float64; below: exact",
          "step", "distance from the geodesic")  # fmt: skip


def _drifts(panel: Any, rows: Sequence[Row], entries: Any, settings: Any) -> None:
    del entries
    rate = middle(settings["rates"])
    for row in rows:
        curve = row["distances"][settings["rates"].index(rate)]
        style = _style(row, row["dtype"] == settings["dtypes"][0])
        panel.plot(row["at"], np.maximum(_numbers(curve), 1e-8), **style)
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_ylim(1e-8, 10)
    dress(panel, "drift", f"rate {rate:g}, {_dashes(settings)}", "steps",
          "distance from the set")  # fmt: skip


def _costs(panel: Any, rows: Sequence[Row], entries: Any, settings: Any) -> None:
    del entries, settings
    costs = {row["retraction"]: row["cost"] for row in reversed(rows)}
    bars = panel.barh([_LABEL[name] for name in costs], list(costs.values()),
                      color=[_COLOUR[name] for name in costs])  # fmt: skip
    panel.bar_label(bars, fmt="{:.1f}", padding=3, fontsize=8)
    dress(panel, "cost", "of a step at the rate 0.1", "time in products of the same size", "")
    panel.grid(axis="y", visible=False)
    panel.set_xscale("log")
    panel.set_xlim(0.1, 200)


def _losses(panel: Any, rows: Sequence[Row], entries: Any, settings: Any) -> None:
    del rows
    for name, entry in entries.items():
        for dtype in settings["dtypes"]:
            found = {float(rate): e["loss"] for rate, e in entry["training"][dtype].items()}
            values = _numbers([e and e["value"] for e in found.values()])
            ends = [(e and e["interval"]) or (np.nan, np.nan) for e in found.values()]
            style = _style({"retraction": name}, dtype == settings["dtypes"][0])
            panel.errorbar(_shifted(list(found), name, entries), values,
                           np.abs(np.array(ends).T - values), elinewidth=0.8, **style)  # fmt: skip
    panel.set_xscale("log")
    panel.set_yscale("log")
    dress(panel, "training", f"{_dashes(settings)}; back on the set",
          "learning rate", "final training loss")  # fmt: skip


def _style(row: Row, full: bool = True) -> dict[str, Any]:
    name = row["retraction"]
    return {"color": _COLOUR[name], "linestyle": "-" if full else (0, (3, 2)), "marker": "o",
            "markersize": 3, "linewidth": 1.6, "label": _LABEL[name] if full else None}  # fmt: skip


def _shifted(rates: Sequence[float], name: str, entries: Mapping[str, Any]) -> np.ndarray:
    """Shift the points of each retraction sideways, so that equal results do not overlap."""
    return np.asarray(rates) * 1.05 ** (list(entries).index(name) - len(entries) / 2)


def _dashes(settings: Mapping[str, Any]) -> str:
    first, *others = settings["dtypes"]
    return first + "".join(f", dashed: {dtype}" for dtype in others)


def _numbers(values: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values])


_DRAW = {"order": _orders, "walk": _drifts, "cost": _costs, "training": _losses}
