"""The picture of the landing page, from the records of `make train` and certified networks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, StrMethodFormatter

_ROOT = Path(__file__).parents[1]
_DIGITS = _ROOT / "studies" / "results" / "digits-40-seeds.json"
_PROOFS = _ROOT / "docs" / "lab" / "results" / "certified-mnist.json"
# Okabe and Ito's colours, as in the picture of the example.
_VALUES = {
    "muon": ("Muon", "#E69F00"),
    "adamw": ("AdamW", "#767676"),
    "stiefel": ("on the manifold", "#0072B2"),
}
_METHODS = {
    "manifold Muon": ("on the manifold", "#0072B2"),
    "Björck + Adam": ("parametrised (Björck, Adam)", "#009E73"),
    "AdamW, free": ("AdamW, no constraint", "#767676"),
}


def draw(to: Path, digits: Path = _DIGITS, proofs: Path = _PROOFS) -> None:
    """Write the picture: singular values by training step, certified accuracy by radius."""
    figure = Figure(figsize=(8.4, 2.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    _singular_values(left, json.loads(digits.read_text(encoding="utf-8")))
    _proofs(right, json.loads(proofs.read_text(encoding="utf-8")))
    for panel in (left, right):
        panel.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False, fontsize=8, loc="lower left")
    right.legend(frameon=False, fontsize=8, loc="upper right")
    figure.savefig(to, format="svg", metadata={"Date": None})


def _singular_values(panel: Axes, record: dict[str, Any]) -> None:
    for name, (label, colour) in _VALUES.items():
        runs = [row for row in record["rows"] if row["optimizer"] == name]
        low = np.min([run["smallest"] for run in runs], axis=0)
        high = np.max([run["largest"] for run in runs], axis=0)
        panel.fill_between(
            runs[0]["step"], low, high,
            facecolor=colour, alpha=0.35, edgecolor=colour, linewidth=2, label=label,
        )  # fmt: skip
    panel.set_yscale("log", base=2)
    panel.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    panel.yaxis.set_minor_locator(NullLocator())
    panel.set_xlim(0, record["settings"]["steps"])
    panel.set(xlabel="training step", ylabel="singular value")
    panel.set_title("Smallest to largest singular value of all weights", fontsize=10)


def _proofs(panel: Axes, record: dict[str, Any]) -> None:
    for name, (label, colour) in _METHODS.items():
        curve = 100 * np.array(record["summary"]["fc-256"][name]["epochs"]["curve"])
        radii = np.linspace(0, 1.5 * 1.58, len(curve))  # as in the picture of the study
        panel.plot(radii, curve, color=colour, linewidth=2, label=label)
    panel.set(xlim=(0, 2.37), ylim=(0, 112), xlabel="length of the change, pixels from 0 to 1")
    panel.set_title("Test images (%) that no such change can fool", fontsize=10)
