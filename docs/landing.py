"""The two pictures of README and the landing page, from the records of digits and of proofs."""

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, StrMethodFormatter

from studies.display import BLUE, GREY, ORANGE, PURPLE

_ROOT = Path(__file__).parents[1]
_DIGITS = _ROOT / "studies" / "results" / "digits-40-seeds.json"
_PROOFS = _ROOT / "docs" / "lab" / "results" / "certified-mnist.json"


def draw(to: Path, digits: Path = _DIGITS, proofs: Path = _PROOFS) -> None:
    """Write two pictures: singular values by training step, certified accuracy by radius."""
    for name, panel, record in (
        ("singular-values", _singular_values, digits),
        ("proofs", _proofs, proofs),
    ):
        figure = Figure(figsize=(3.9, 3.1), layout="constrained")
        axes = figure.subplots()
        panel(axes, json.loads(record.read_text(encoding="utf-8")))
        axes.spines[["top", "right"]].set_visible(False)
        with mpl.rc_context({"svg.hashsalt": "landing"}):  # equal files from equal records
            figure.savefig(to / f"landing-{name}.svg", format="svg", metadata={"Date": None})


def _singular_values(panel: Axes, record: dict[str, Any]) -> None:
    end = record["settings"]["steps"]
    for name, colour in {"adamw": GREY, "muon": ORANGE}.items():
        steps, low, high = _range(record, name)
        ends = high if name == "muon" else low
        panel.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
        panel.plot(steps, low, color=colour, linewidth=2)
        panel.plot(steps, high, color=colour, linewidth=2)
        _label(panel, record["summary"][name]["label"], end, ends[-1], colour)
    steps, low, high = _range(record, "stiefel")
    panel.plot(steps, (low + high) / 2, color=BLUE, linewidth=3)  # one line: they differ by 1e-6
    _label(panel, "manifold\nMuon", end, high[-1], BLUE)
    panel.set_yscale("log", base=2)
    panel.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    panel.yaxis.set_minor_locator(NullLocator())
    panel.set(xlim=(0, end), xlabel="training step", ylabel="singular value")
    panel.set_title("Smallest and largest singular value", fontsize=10)


def _range(record: dict[str, Any], name: str) -> tuple[Any, Any, Any]:
    """Return the steps, and the smallest and largest singular values of all seeds and layers."""
    runs = [row for row in record["rows"] if row["optimizer"] == name]
    low = np.min([run["smallest"] for run in runs], axis=0)
    return runs[0]["step"], low, np.max([run["largest"] for run in runs], axis=0)


def _proofs(panel: Axes, record: dict[str, Any]) -> None:
    lines = {  # colour, position of the label
        "manifold Muon": (BLUE, (1.25, 82)),
        "Björck + Adam": (PURPLE, (0.75, 32)),
        "AdamW, free": (GREY, (0.85, 10)),
    }
    for name, (colour, place) in lines.items():
        curve = 100 * np.array(record["summary"]["fc-256"][name]["time"]["curve"])
        radii = np.linspace(0, 1.5 * 1.58, len(curve))  # as in the picture of the study
        panel.plot(radii, curve, color=colour, linewidth=3)
        _label(panel, name, *place, colour)
    panel.set(xlim=(0, 2.37), ylim=(0, 100), xlabel="length of the change, pixels from 0 to 1")
    panel.set_title("Test images (%) with a proof", fontsize=10)


def _label(panel: Axes, text: str, x: float, y: float, colour: str) -> None:
    panel.annotate(
        text, (x, y), (4, 0), textcoords="offset points", va="center", color=colour,
        fontsize=9, fontweight="bold",
    )  # fmt: skip
