"""Drift of weights from the Stiefel manifold under each retraction.

python -m examples.retractions    # writes runs/retractions.png
"""

from pathlib import Path

import jax
import numpy as np
from matplotlib.figure import Figure

from manifoldmuon.lab import random_walk, retraction_order
from manifoldmuon.manifolds import Stiefel
from manifoldmuon.manifolds.retractions import QR, Cayley, Exponential, Polar
from studies.display import COLOURS

SHAPE = (48, 24)


def main(steps: int = 1000, out: Path = Path("runs/retractions.png")) -> dict[str, float]:
    """Walk along random steepest directions; return the last distance of each retraction."""
    key, exact = jax.random.key(0), Stiefel(retraction=Exponential())
    figure, last = Figure(figsize=(6, 3.5), layout="constrained"), {}
    panel = figure.subplots()
    print("retraction  exponent of the error  distance at the end")
    retractions = (Polar(), QR(), Cayley(), Exponential())
    for retraction, colour in zip(retractions, COLOURS, strict=False):
        name, manifold = type(retraction).__name__, Stiefel(retraction=retraction)
        slope = retraction_order(manifold, exact, SHAPE, key).slope
        walk = random_walk(manifold, SHAPE, (0.1,), steps, key)
        points = np.asarray(walk.points[:, 0], np.float64)
        values = np.linalg.svd(points, compute_uv=False)
        distance = np.abs(values - 1).max(axis=-1)
        last[name] = float(distance[-1])
        shown = "exact" if slope is None else f"{slope:.2f}"
        print(f"{name:10}  {shown:>21}  {last[name]:19.1e}")
        panel.loglog(walk.at, distance, color=colour, marker="o", label=name)
    panel.set(xlabel="steps of length 0.1", ylabel="largest |singular value - 1|")
    panel.legend()
    out.parent.mkdir(exist_ok=True)
    figure.savefig(out)
    return last


if __name__ == "__main__":
    main()
