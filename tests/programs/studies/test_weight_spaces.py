"""Weight spaces: same initial weights for all sets, known effects, and training inside its set."""

import dataclasses

import jax
import numpy as np
import pytest

from manifoldmuon.linalg import TRAINING_MSIGN
from manifoldmuon.manifolds import Euclidean, Stiefel
from manifoldmuon.norms import FanRatio, RMSToRMS
from studies import WeightSpaces
from studies.networks.architectures import Funnel, Transformer
from studies.spaces.sets import MUON, SETS, STIEFEL, Hidden, sets_of
from studies.spaces.study import _singular_values

TINY = WeightSpaces(
    networks=("images",), sets=(MUON, "band 1.1"), hidden=(8,), steps=12, fewer=1, rounds=1
)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_initial_weights_are_in_every_set(scale):
    study = dataclasses.replace(TINY, scale=scale)
    start = study._descent("base", "images", MUON).start(0)
    for name in SETS:
        descent = study._descent("base", "images", name)
        same = jax.tree.map(np.array_equal, descent.start(0), start)
        assert jax.tree.all(same), name
        distances = jax.tree.map(lambda m, w: m.distance(w), descent.network.geometry(), start)
        assert max(jax.tree.leaves(distances)) < 1e-5, name
    hidden = Stiefel(FanRatio(scale))
    assert max(map(hidden.distance, jax.tree.leaves(start)[:-1])) < 1e-5


@pytest.mark.parametrize("architecture", [Transformer(16, 1), Funnel((8, 6))])
def test_only_hidden_matrices_differ(architecture):
    def spaces(name):
        network = Hidden(sets_of(1.0)[name], (-1, 0)).network(architecture, 11, 11)
        return jax.tree.leaves(network.geometry()), network.budgets()

    (free, budgets), (rigid, others) = spaces(MUON), spaces(STIEFEL)
    assert jax.tree.all(jax.tree.map(np.array_equal, budgets, others))
    hidden = [b == sets_of(1.0)[STIEFEL] for b in rigid]
    assert [a == b for a, b in zip(free, rigid, strict=True)] == [not h for h in hidden]
    assert hidden.count(True) == (6 if isinstance(architecture, Transformer) else 2)
    assert rigid[-1] == Euclidean(RMSToRMS(TRAINING_MSIGN))


def test_hidden_layer_as_wide_as_head_raises():
    with pytest.raises(ValueError, match="the width of a hidden layer"):
        Hidden(sets_of(1.0)[MUON], (-1, 0)).network(Funnel((10,)), 7, 10)


def test_training_stays_in_band_for_every_rate():
    row = TINY.run({"part": "base", "network": "images", "set": "band 1.1", "seed": 0})
    rates = len(row["log2_rates"])
    assert {len(row[key]) for key in ("losses", "held_out_losses", "held_out_errors")} == {rates}
    spectra = {key: np.array(values) for key, values in row["spectra"].items()}
    np.testing.assert_array_less(1 / 1.1 - 0.01, spectra["smallest"])
    np.testing.assert_array_less(spectra["largest"], 1.1 + 0.01)
    assert spectra["largest"].max() > 1.09  # the constraint is active


def test_cost_times_every_set_and_gradient():
    seconds = TINY.run({"part": "cost", "network": "images"})["seconds"]
    assert seconds.keys() == {"gradient", *TINY.sets}
    assert min(seconds.values()) > 0


def test_singular_values_of_nan_are_nan():
    matrices = np.stack([np.diag([3.0, 1.0]), np.full((2, 2), np.nan)])
    np.testing.assert_allclose(_singular_values(matrices), [[3.0, 1.0], [np.nan, np.nan]])


def test_summary_and_plot_show_known_effects():
    """The curves are parabolas with known differences from Muon, rates and prices."""
    study = WeightSpaces(networks=("images",), sets=SETS[:3], wide_seeds=(0, 1))
    exponents = [-6, -5, -4, -3, -2]
    rows = []
    for cell in study.cells():
        if cell["part"] == "cost":
            times = dict(zip(("gradient", *study.sets), (1.0, 1.0, 2.0, 3.0), strict=True))
            rows.append({**cell, "seconds": times})
            continue
        behind = 0.25 * study.sets.index(cell["set"]) - 0.125 * (cell["part"] == "fewer")
        best = -3.0 if cell["part"] == "wide" else -4.0
        losses = np.exp((np.array(exponents) - best) ** 2 / 10) + behind * (best != -3)
        losses = (losses + 0.01 * cell["seed"] * (best != -3)).tolist()
        metrics = dict.fromkeys(("losses", "held_out_losses", "held_out_errors"), losses)
        spectra = dict.fromkeys(("smallest", "median", "largest", "condition"), [1.0] * 5)
        rows.append({**cell, "log2_rates": exponents, **metrics, "spectra": spectra})
    summary = study.summarise(rows)
    found = summary["images"]["sets"]["spectral sphere"]
    assert found["held_out_losses"]["over_muon"]["mean"] == pytest.approx(0.5)
    assert found["held_out_losses"]["over_muon"]["interval"] == pytest.approx((0.5, 0.5))
    assert (found["log2_rate"], found["edge"], found["step"], found["update"]) == (-4, "", 2, 3)
    assert found["half"]["mean"] == pytest.approx(np.exp(0.1) - 1)
    assert found["wide"]["octaves"]["mean"] == pytest.approx(1, abs=1e-6)
    assert found["wide"]["price"]["mean"] == pytest.approx(0.1)
    frobenius = summary["images"]["sets"]["Frobenius"]["held_out_losses"]
    assert frobenius["fewer_over_muon"]["mean"] == pytest.approx(0.125)
    record = {"settings": study.settings(), "summary": summary, "rows": rows}
    assert "+0.5000 ± 0.0000" in study.table(record)
    assert len(study.plot(record).axes) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": 30}, "width a multiple of 4"),
        ({"hidden": ()}, "hidden widths"),
        ({"fewer": 200}, "fewer must be"),
        ({"sets": ("Frobenius",)}, "Muon among the sets"),
        ({"networks": ()}, "there must be a network"),
        ({"seeds": (1, 1)}, "seeds must differ"),
        ({"wide_seeds": (9,)}, "wide_seeds must be among"),
        ({"scale": 0.0}, "multiplier and scale positive"),
        ({"multiplier": 0.0}, "multiplier and scale positive"),
    ],
)
def test_invalid_settings_raise(settings, message):
    with pytest.raises(ValueError, match=message):
        WeightSpaces(**settings)
