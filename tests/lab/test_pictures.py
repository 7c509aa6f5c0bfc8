"""Plots show the given numbers."""

import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.lines import Line2D

from manifoldmuon.lab import plot_monitor, plot_singular_values


def points(line: Line2D) -> list[tuple[float, ...]]:
    return [tuple(x) for x in np.asarray(line.get_xydata()).round(5).tolist()]


def test_singular_value_plot_shows_each_layer():
    start = {"a": {"w": jnp.diag(jnp.array([1.0, 3.0]))}, "b": jnp.ones(2)}
    end = {"a": {"w": jnp.diag(jnp.array([2.0, 6.0]))}, "b": jnp.ones(2)}
    figure = plot_singular_values({0: start, 5: end})
    (panel,) = figure.axes
    assert panel.get_title() == "a/w"
    assert points(panel.lines[1]) == [(0, 2), (5, 4)]
    band = np.asarray(panel.collections[0].get_paths()[0].vertices)
    assert {tuple(x) for x in np.round(band, 5).tolist()} >= {(0, 1), (0, 3), (5, 2), (5, 6)}


def test_stack_has_a_single_panel():
    stack = jnp.stack([jnp.eye(2), 4 * jnp.eye(2)])
    (panel,) = plot_singular_values({0: {"w": stack}, 1: {"w": stack}}).axes
    assert points(panel.lines[1]) == [(0, 2.5), (1, 2.5)]


def test_log_has_a_panel_per_kind():
    history = {0: {"gap/a": 0.1, "gap/b": 0.2, "loss": 0.0}, 2: {"gap/a": 0.01, "loss": 3.0}}
    gap, loss = plot_monitor(history).axes
    assert [line.get_label() for line in gap.lines] == ["a", "b"]
    assert points(gap.lines[0]) == [(0, 0.1), (2, 0.01)]
    assert (gap.get_yscale(), loss.get_yscale()) == ("log", "linear")  # a loss of zero


def test_panels_fill_rows():
    figure = plot_monitor({0: {f"kind{k}": 1.0 for k in range(5)}}, columns=2)
    assert len(figure.axes) == 5
    corners = np.array([panel.get_position().p0 for panel in figure.axes])
    assert [len(set(side)) for side in corners.round(3).T.tolist()] == [2, 3]


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: plot_singular_values({0: {"b": jnp.ones(3)}}), "holds no matrix"),
        (lambda: plot_monitor({0: {}}), "holds no number"),
    ],
)
def test_plots_without_data_raise(call, match):
    with pytest.raises(ValueError, match=match):
        call()
