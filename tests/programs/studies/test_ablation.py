"""The ablation: known effects, choice of the rate, and step sizes of the arms."""

import jax
import numpy as np
import optax
import pytest
import scipy.stats

from studies import Ablation
from studies.estimates import at_best_rate, gain
from studies.networks.architectures import Funnel
from studies.networks.methods import ARMS, Gradient, Uniform

SEEDS = 5


def test_identical_arms_have_zero_gain():
    loss = np.random.default_rng(0).normal(size=SEEDS)
    found = gain(dict.fromkeys(ARMS, loss), 0, "manifold", "flat")
    assert found["mean"] == 0
    assert found["interval"] == (0, 0)
    assert len(found["by_arm"]) == 6


def test_known_gains_have_paired_intervals():
    """The part of a seed shared by all arms cancels; the noise of single arms does not."""
    rng = np.random.default_rng(1)
    easy, noise = 5 * rng.normal(size=SEEDS), 0.1 * rng.normal(size=(len(ARMS), SEEDS))
    values = {
        arm: easy - 0.25 * (arm[0] == "manifold") - 0.5 * (arm[1] == "steepest") + own
        for arm, own in zip(ARMS, noise, strict=True)
    }
    with_it = np.mean([v for arm, v in values.items() if arm[0] == "manifold"], axis=0)
    without = np.mean([v for arm, v in values.items() if arm[0] == "flat"], axis=0)
    found = gain(values, 0, "manifold", "flat")
    theirs = scipy.stats.ttest_rel(without, with_it)
    assert found["mean"] == pytest.approx(np.mean(without - with_it))
    np.testing.assert_allclose(found["interval"], theirs.confidence_interval(), rtol=1e-3)
    assert abs(found["mean"] - 0.25) < 0.15
    assert abs(gain(values, 1, "steepest", "Adam")["mean"] - 0.5) < 0.15
    assert abs(gain(values, 2, "modular", "uniform")["mean"]) < 0.15


def test_rate_is_chosen_by_other_seeds():
    rng = np.random.default_rng(2)
    losses = rng.normal(size=(4, 7))
    found, _ = at_best_rate(losses)
    for seed in range(4):
        others = np.delete(losses, seed, axis=0).mean(axis=0)
        assert found[seed] == losses[seed, others.argmin()]


def test_seed_does_not_choose_its_rate():
    losses = np.array([[1.0, -9.0], [1.0, 2.0], [1.0, 2.0]])
    found, _ = at_best_rate(losses)
    np.testing.assert_array_equal(found[0], 1.0)


def test_diverged_rate_is_never_chosen():
    losses = np.array([[np.nan, 3.0, 2.0], [0.1, 3.0, 2.0], [0.1, 3.0, 2.0]])
    found, at = at_best_rate(losses)
    assert at == 2
    assert np.isfinite(found).all()


def test_arms_cover_all_combinations():
    assert len(set(ARMS.values())) == 12


def test_uniform_budgets_give_equal_step_norms():
    """For every leaf, sqrt(fan_in / fan_out) ||step||_2 = rate / leaves, by singular values."""
    network = Funnel((6, 4)).modular(8, 3)
    weights = network.init(jax.random.key(0))
    tx = Gradient().optimizer(0.5, Uniform(network))

    @jax.jit
    def step(weights):
        return tx.update(weights, tx.init(weights), weights)[0]

    sizes = [
        np.sqrt(leaf.shape[1] / leaf.shape[0]) * np.linalg.norm(leaf, 2)
        for leaf in map(np.asarray, jax.tree.leaves(step(weights)))
    ]
    np.testing.assert_allclose(sizes, 0.5 / 3, rtol=1e-2)
    assert isinstance(tx, optax.GradientTransformation)
    # The published sensitivity of ReLU gives each layer sqrt(2) times the budget of the next.
    budgets = jax.tree.leaves(network.budgets())
    np.testing.assert_allclose(budgets, [2 / 3, np.sqrt(2) / 3, 1 / 3])


def test_summary_and_plot_show_known_gains():
    study = Ablation(networks=("images",), seeds=(0, 1, 2))
    rows = []
    for cell in study.cells():
        better = 0.3 * (cell["direction"] == "steepest") + 0.01 * cell["seed"]
        losses = (2 - better + np.linspace(-1, 1, 9) ** 2).tolist()
        found = dict.fromkeys(("losses", "held_out_losses", "held_out_errors"), losses)
        rows.append({**cell, "log2_rates": list(range(9)), **found})
    summary = study.summarise(rows)
    gains = summary["images"]["held_out_errors"]["gains"]
    assert gains["constraint"]["mean"] == pytest.approx(0)
    assert gains["direction, steepest or Adam"]["mean"] == pytest.approx(0.3)
    assert gains["all three, over plain Adam"]["mean"] == pytest.approx(0.3)
    record = {"settings": study.settings(), "summary": summary, "rows": rows}
    assert "+0.3000 ± 0.0000" in study.table(record)
    assert len(study.plot(record).axes) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": 30}, "width a multiple of 4"),
        ({"hidden": ()}, "hidden widths"),
        ({"seeds": (0,)}, "two or more different seeds"),
        ({"networks": ()}, "there must be a network"),
        ({"multiplier": 0.0}, "multiplier positive"),
    ],
)
def test_invalid_settings_raise(settings, message):
    with pytest.raises(ValueError, match=message):
        Ablation(**settings)
