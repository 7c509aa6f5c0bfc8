"""Plots of a training run: singular values by layer, and logged numbers, over the steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_NAMED = 10  # lines in a legend: matplotlib cycles through as many colours


def plot_singular_values(history: Mapping[int, Any], columns: int = 3) -> Figure:
    """Draw the singular values of every matrix over the steps, one panel for each parameter.

    The band reaches from the smallest to the largest value, the lines are quartiles. Matrices of a
    stack are pooled. Drawn by matplotlib (extra `studies`); nothing is shown or saved.

    Args:
      history: parameters by step, any tree of arrays. Vectors are left out.
      columns: largest number of panels in a row.

    Returns:
      The figure; save it with `figure.savefig("values.png")`, or end a notebook cell with it.

    Raises:
      ValueError: there is no step, or no matrix.

    Examples:
      >>> history = {0: {"w": jnp.eye(3, 2), "b": jnp.ones(3)}, 10: {"w": 2 * jnp.eye(3, 2)}}
      >>> [panel.get_title() for panel in plot_singular_values(history).axes]
      ['w']
    """
    values: dict[str, dict[int, np.ndarray]] = {}
    for step, params in history.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            if np.ndim(leaf) >= 2:
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                found = np.linalg.svd(np.asarray(leaf, np.float32), compute_uv=False)
                values.setdefault(name, {})[step] = found.ravel()
    if not values:
        raise ValueError("plot_singular_values(history) holds no matrix: {step: params, ...}")
    figure, panels = _panels(len(values), columns)
    for panel, (name, at) in zip(panels, values.items(), strict=True):
        steps = sorted(at)
        low, *quartiles, high = np.transpose(
            [np.quantile(at[step], (0, 0.25, 0.5, 0.75, 1)) for step in steps]
        )
        panel.fill_between(steps, low, high, color="C0", alpha=0.25, linewidth=1)
        for line in quartiles:
            panel.plot(steps, line, color="C0", linewidth=1)
        panel.set(title=name, xlabel="step", ylabel="singular values", ylim=(0, None))
    return figure


def plot_monitor(history: Mapping[int, Mapping[str, float]], columns: int = 3) -> Figure:
    """Draw logged numbers over the steps: a panel for each kind, a line for each parameter.

    The kind precedes the first `/`, as in `optim.monitor_scalars`; add other kinds, such as
    `{"erasure/w": erasure_auc(w, mask)}` or `{"loss": ...}`. An axis is logarithmic if all its
    numbers are positive. Drawn by matplotlib (extra `studies`).

    Args:
      history: numbers by step, then by name.
      columns: largest number of panels in a row.

    Returns:
      The figure.

    Raises:
      ValueError: there is no number.

    Examples:
      >>> history = {0: {"gap/w": 0.1, "loss": 2.0}, 10: {"gap/w": 0.01, "loss": 1.0}}
      >>> [panel.get_title() for panel in plot_monitor(history).axes]
      ['gap', 'loss']
    """
    kinds: dict[str, dict[str, dict[int, float]]] = {}
    for step, numbers in history.items():
        for name, number in numbers.items():
            kind, _, path = name.partition("/")
            kinds.setdefault(kind, {}).setdefault(path, {})[step] = float(number)
    if not kinds:
        raise ValueError("plot_monitor(history) holds no number: {step: {'gap/w': 0.1}, ...}")
    figure, panels = _panels(len(kinds), columns)
    for panel, (kind, lines) in zip(panels, kinds.items(), strict=True):
        for path, at in lines.items():
            panel.plot(list(at), list(at.values()), label=path, linewidth=1.5)
        if min(min(at.values()) for at in lines.values()) > 0:
            panel.set_yscale("log")
        panel.set(title=kind, xlabel="step")
        if 1 < len(lines) <= _MOST_NAMED:
            panel.legend(frameon=False, fontsize=7)
    return figure


def _panels(count: int, columns: int) -> tuple[Figure, list[Any]]:
    """Return a figure with this many panels of equal size."""
    from matplotlib.figure import Figure

    across = min(count, max(columns, 1))
    down = -(-count // across)
    figure = Figure(figsize=(3.4 * across, 2.6 * down), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).ravel()
    for panel in panels[:count]:
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[count:]:
        figure.delaxes(panel)
    return figure, list(panels[:count])
