"""Thumbnails of the gallery, docs/examples.md: one message each, readable at 200 pixels.

A thumbnail is the last picture of a tutorial, or drawn here from a record; names are
`tutorial-name` and the keys of `DRAWN`.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from studies.display import BLUE, GREY, ORANGE, PURPLE

_DOCS = Path(__file__).parent
_STYLE: Any = {
    "font.size": 13, "axes.spines.top": False, "axes.spines.right": False,
    "svg.hashsalt": "thumbnails",  # equal files from equal records
}  # fmt: skip


def write(to: Path) -> None:
    """Empty the folder, then write the thumbnails that the gallery shows."""
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir()
    for name in shown():
        if tutorial := name.removeprefix("tutorial-") if name not in DRAWN else "":
            pictures = (_DOCS / "tutorials").glob(f"{tutorial}-*.svg")
            last = max(pictures, key=lambda path: int(path.stem.rsplit("-", 1)[1]))
            shutil.copy(last, to / f"{name}.svg")
            continue
        with mpl.rc_context(_STYLE):
            figure = Figure(figsize=(4, 2.6), layout="constrained")
            DRAWN[name](figure.subplots())
            figure.savefig(to / f"{name}.svg", metadata={"Date": None})


def shown() -> list[str]:
    """Return the names of the thumbnails in the gallery."""
    page = (_DOCS / "examples.md").read_text(encoding="utf-8")
    return re.findall(r"\(thumbnails/([\w-]+)\.svg\)", page)


def _certified(panel: Axes) -> None:
    methods = _record("certified-mnist")["summary"]["fc-256"]
    lines = {
        "manifold Muon": (BLUE, (1.25, 82)), "Björck + Adam": (PURPLE, (0.72, 33)),
        "AdamW, free": (GREY, (1.0, 8)),
    }  # fmt: skip
    for name, (colour, place) in lines.items():
        curve = 100 * np.array(methods[name]["time"]["curve"])
        radii = np.linspace(0, 1.5 * 1.58, len(curve))
        panel.plot(radii, curve, color=colour, linewidth=3)
        panel.text(*place, name, color=colour, fontweight="bold")
    panel.set(xlim=(0, 2.37), ylim=(0, 100), xlabel="size of the change", ylabel="proved (%)")


def _plasticity(panel: Axes) -> None:
    methods = _record("plasticity")["summary"]
    lines = {
        "Adam": (GREY, (52, 1.5)), "Muon": (ORANGE, (22, 1.72)), "MuonH": (BLUE, (52, 0.68)),
        "Muon, decay 1": (PURPLE, (25, 0.28)),
    }  # fmt: skip
    for name, (colour, place) in lines.items():
        curve = methods[name]["by_part"]
        tasks = np.linspace(80 / len(curve), 80, len(curve))
        panel.plot(tasks, curve, color=colour, linewidth=3)
        panel.text(*place, name, color=colour, fontweight="bold")
    panel.set(xlabel="tasks so far", ylabel="loss", ylim=(0, 2))


def _critics(panel: Axes) -> None:
    summary = _record("critics")["summary"]
    lines = {
        "manifold Muon": (BLUE, (0.0, 1.03)), "spectral norm, MaxMin": (ORANGE, (0.0, 0.59)),
        "spectral norm": (GREY, (0.0, 0.35)),
    }  # fmt: skip
    for name, (colour, place) in lines.items():
        curve = [summary[f"scale-{dim}"][name]["fraction"]["mean"] for dim in (2, 8, 64)]
        panel.plot(["2", "8", "64"], curve, "o-", color=colour, linewidth=3)
        panel.text(*place, name, color=colour, fontweight="bold")
    panel.set(xlabel="dimension", ylabel="distance proved", ylim=(0, 1.15))


def _recurrent(panel: Axes) -> None:
    own = _record("recurrent")["summary"]["rule"]["digits"]
    best = {int(uses): value["mean"] for uses, value in own["log2_rates"].items()}
    uses = np.array([key for key, value in best.items() if value is not None])
    panel.loglog(uses, [2 ** best[key] for key in uses], "o", color=BLUE, markersize=9, base=2)
    panel.loglog(uses, 2 ** own["log2_product"]["mean"] / uses, "--", color=GREY, base=2)
    panel.text(100, 2**-5.5, "1 / T", color=GREY, fontweight="bold")
    panel.set(xlabel="uses of the matrix, T", ylabel="best learning rate")


def _flows(panel: Axes) -> None:
    summary = _record("flows")["summary"]
    names = {
        "SpectralBall, Muon": "spectral ball", "spectral norm, Adam": "spectral norm",
        "Björck, Adam": "Björck",
    }  # fmt: skip
    _dots(
        panel, {label: summary[name]["bits"] for name, label in names.items()}, [BLUE, GREY, GREY]
    )
    panel.set_xlabel("bits per pixel")


def _momentum_bits(panel: Axes) -> None:
    muon = _record("momentum-bits")["summary"]["Muon"]
    names = [name for name in muon if name != "float32"]
    means = [muon[name]["beyond"]["mean"] for name in names]
    low, high = np.transpose([muon[name]["beyond"]["interval"] for name in names])
    panel.errorbar(names, means, (means - low, high - means), fmt="o", color=BLUE, capsize=6,
                   linewidth=3, markersize=9)  # fmt: skip
    panel.axhline(0, color=GREY)
    panel.text(1.35, -0.0005, "float32", color=GREY, fontweight="bold", va="top")
    panel.set(xlim=(-0.4, 2.4), xlabel="momentum of Muon", ylabel="loss, nats", yticks=(0, 0.01))


def _gpt(panel: Axes) -> None:
    record = json.loads((_DOCS.parent / "studies/results/hello_gpt.json").read_text("utf-8"))
    for row in record["rows"]:
        panel.plot(row["step"], row["validation_curve"], color=BLUE, linewidth=2)
    panel.axhline(1.8968, color=GREY, linewidth=3, linestyle="--")
    panel.text(700, 2.42, "three seeds", color=BLUE, fontweight="bold")
    panel.text(100, 1.76, "published", color=GREY, fontweight="bold")
    panel.set(xlabel="step", ylabel="validation loss", ylim=(1.7, 2.6))


def _cheaper_muon(panel: Axes) -> None:
    table = (_DOCS / "benchmarks/results/scale.overheads.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")] for line in table.splitlines()]
    (row,) = (row for row in rows if row[1:3] == ["1.2 B, v5e 2x4", "float32"])
    cells = {name: cell.split(" (")[0] for name, cell in zip(rows[0], row, strict=True)}
    names = {
        "Optax's Muon": "optax.contrib.muon", "manifold_muon": "manifold_muon, ProjectedPolar()",
        "muon": "muon",
    }  # fmt: skip
    values = [float(cells[name].removesuffix(" %")) for name in names.values()]
    bars = panel.barh(list(names), values, color=[GREY, ORANGE, BLUE])
    panel.bar_label(bars, fmt="{:g} %", padding=3)
    panel.set(xlim=(0, 24), xlabel="added to a step")
    panel.invert_yaxis()


def _fine_tuning(panel: Axes) -> None:
    methods = _record("fine-tuning")["summary"]["target"]
    names = ["LoRA, Muon", "LoRA, Adam", "StelLA", "LoRA, A orthonormal"]
    labels = [*names[:3], "A orthonormal"]
    own = {label: methods[name] for label, name in zip(labels, names, strict=True)}
    _dots(panel, own, [GREY, GREY, BLUE, BLUE])
    panel.set(xlim=(-5, -2.5), xlabel="log10 of the error")


def _quantization(panel: Axes) -> None:
    methods = _record("quantization")["summary"]["4 bits, equal steps"]
    names = {
        "none": "not rotated", "Hadamard": "Hadamard", "Cayley SGD, rate 1.5": "SpinQuant",
        "riemannian_sgd, step": "learned here",
    }  # fmt: skip
    rows = {label: methods[name]["cost"] for name, label in names.items()}
    _dots(panel, rows, [GREY, GREY, ORANGE, BLUE])
    panel.set(xlim=(0, None), xlabel="cost of 4 bits, nats")


def _dots(panel: Axes, rows: dict[str, Any], colours: list[str]) -> None:
    """Draw means with intervals, a row for each label."""
    for at, (own, colour) in enumerate(zip(rows.values(), colours, strict=True)):
        bar = [[abs(own["mean"] - end)] for end in own["interval"]]
        panel.errorbar([own["mean"]], [at], xerr=bar, fmt="o", color=colour, capsize=5, linewidth=3,
                       markersize=9)  # fmt: skip
    panel.set_yticks(range(len(rows)), list(rows))
    panel.set_ylim(-0.5, len(rows) - 0.5)


def _record(name: str) -> Any:
    return json.loads((_DOCS / "lab" / "results" / f"{name}.json").read_text(encoding="utf-8"))


DRAWN = {
    "certified": _certified, "cheaper-muon": _cheaper_muon, "critics": _critics,
    "fine-tuning": _fine_tuning, "flows": _flows, "gpt": _gpt, "momentum-bits": _momentum_bits,
    "plasticity": _plasticity, "quantization": _quantization, "recurrent": _recurrent,
}  # fmt: skip
