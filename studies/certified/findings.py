"""Findings: accuracies with intervals, paired differences, times."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from studies.display import text_table
from studies.estimates import estimate, shown
from studies.study import Row

TUNED = ("rate", "momentum", "offset", "temperature")
PARTS = {"epochs": "equal epochs", "time": "equal CPU time"}


def summary(rows: Sequence[Row], networks: Sequence[str], methods: Sequence[str]) -> dict[str, Any]:
    """Summarise by network and method, with differences from the first network and method."""

    def of(network: str, method: str) -> list[Row]:
        return [row for row in rows if (row["network"], row["method"]) == (network, method)]

    return {
        network: {
            method: _found(of(network, method), of(network, methods[0]), of(networks[0], method))
            for method in methods
        }
        for network in networks
    }


def _found(rows: Sequence[Row], first: Sequence[Row], other: Sequence[Row]) -> dict[str, Any]:
    found: dict[str, Any] = {name: rows[0][name] for name in TUNED} | {
        "broken": sum(row["epochs"]["broken"] for row in rows),
        "proved": _estimates([row["epochs"]["proved"] for row in rows]),
        "robust": _estimates([row["epochs"]["robust"] for row in rows]),
    }
    if "relative_time" in rows[0]:
        found["relative_time"] = rows[0]["relative_time"]["quartiles"]
    for part in filter(rows[0].get, PARTS):
        values, others, networks = (
            np.array([row[part]["accuracies"] for row in group]) for group in (rows, first, other)
        )
        found[part] = {
            "steps": float(np.mean([row[part]["steps"] for row in rows])),
            "seconds": rows[0][part].get("seconds"),
            "lipschitz": float(np.max([row[part]["lipschitz"] for row in rows])),
            "accuracies": _estimates(values),
            "over_first_method": _estimates(values - others),
            "over_first_network": _estimates(values - networks),
            "curve": np.mean([row[part]["curve"] for row in rows], axis=0).tolist(),
        }
    return found


def _estimates(values: Any) -> list[dict[str, Any]]:
    """Estimate each column over its rows."""
    return [estimate(column) for column in np.asarray(values, np.float64).T]


def percent(found: Mapping[str, Any], form: str = ".1f") -> str:
    """Format the estimate of a share, in percent."""
    interval = found["interval"]
    scaled = {
        "mean": 100 * found["mean"],
        "interval": None if interval is None else [100 * end for end in interval],
    }
    return shown(scaled, form)


def table(summary: Mapping[str, Any], radii: Sequence[float]) -> str:
    """Format the findings: percent, with Student's 95 % interval over seeds."""
    sections = []
    first_network = next(iter(summary))
    names = ["clean", *(f"at {radius:.3g}" for radius in radii)]
    for network, methods in summary.items():
        first_method = next(iter(methods))
        for part in filter(methods[first_method].get, PARTS):
            lines = []
            for method, found in methods.items():
                mine = found[part]
                times, seconds = found.get("relative_time"), mine["seconds"]
                lines.append([
                    method, *(f"{found[name]:.3g}" for name in TUNED), f"{mine['steps']:.0f}",
                    f"{times[1]:.2f}" if times else "", f"{seconds:.0f}" if seconds else "",
                    *map(percent, mine["accuracies"]),
                    percent(mine["over_first_method"][-1], "+.1f"),
                    percent(mine["over_first_network"][-1], "+.1f"),
                ])  # fmt: skip
            sections.append(f"{network}, {PARTS[part]}: test accuracy in %, certified at radii")
            header = ["", *TUNED, "steps", "a step's time", "CPU s", *names,
                      f"beyond {first_method}",
                      f"beyond {first_network}"]  # fmt: skip
            sections.append(text_table(header, lines) + "\n")
        lines = [
            [method, *(f"{percent(a)} / {percent(b)}" for a, b in
                       zip(found["proved"], found["robust"], strict=True)), str(found["broken"])]
            for method, found in methods.items()
        ]  # fmt: skip
        sections.append(f"{network}: attacked images, certified / withstanding the attack, in %")
        sections.append(text_table(["", *names[1:], "certified and broken"], lines) + "\n")
    return "\n".join(sections)
