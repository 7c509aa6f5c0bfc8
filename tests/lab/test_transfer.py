"""Learning-rate transfer: intervals against SciPy, known drifts, parametrisations in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats

from manifoldmuon.lab import BestRate, best_rate, feature_changes, rate_drift
from manifoldmuon.lab._intervals import difference, mean, mean_and_error, slope, student
from manifoldmuon.lab._rates import excess, late, lowest
from manifoldmuon.lab.studies import LearningRateTransfer
from manifoldmuon.lab.studies._architectures import (
    Perceptron,
    Residual,
    Transformer,
    gaussian_weights,
)
from manifoldmuon.lab.studies._descent import Descent
from manifoldmuon.lab.studies._methods import METHODS
from manifoldmuon.lab.studies._tasks import Characters, Pictures
from manifoldmuon.modules import MLP, Linear

EXPONENTS = list(range(-6, 3))


def known(value):
    """What is there."""
    assert value is not None
    return value


def curve(best, depth=1.0):
    """A loss whose logarithm is a parabola in log2 of the rate."""
    return np.exp(0.3 * (np.array(EXPONENTS) - best) ** 2 - depth).tolist()


def test_quantiles_are_students():
    for degrees in (1, 2, 3, 10, 100):
        np.testing.assert_allclose(student(degrees), scipy.stats.t.ppf(0.975, degrees), rtol=1e-4)


def test_intervals_are_those_of_scipy():
    rng = np.random.default_rng(0)
    a, b, x = rng.normal(size=(3, 6))
    for ours, theirs in (
        (mean(a), scipy.stats.ttest_1samp(a, 0).confidence_interval()),
        (difference(a, b), scipy.stats.ttest_ind(a, b).confidence_interval()),
    ):
        np.testing.assert_allclose(known(ours.interval), theirs, rtol=1e-4)
    line = np.asarray(scipy.stats.linregress(x, a))
    reach = scipy.stats.t.ppf(0.975, 4) * line[4]
    np.testing.assert_allclose(slope(x, a).value, line[0])
    np.testing.assert_allclose(
        known(slope(x, a).interval), [line[0] - reach, line[0] + reach], rtol=1e-4
    )
    middle, error = mean_and_error(a)
    np.testing.assert_allclose([middle, known(error)], [a.mean(), scipy.stats.sem(a)])
    assert mean([1.0]).interval is None
    assert mean_and_error([1.0]) == (1.0, None)


@pytest.mark.parametrize("best", [-4.9, -2.0, 0.37])
def test_the_lowest_point_of_a_parabola(best):
    assert lowest(EXPONENTS, curve(best)).edge == ""
    np.testing.assert_allclose(known(lowest(EXPONENTS, curve(best)).exponent), best)


def test_an_edge_is_no_number():
    for best, edge in ((-7.0, "below"), (4.0, "above")):
        assert lowest(EXPONENTS, curve(best)) == (None, edge)
    found = best_rate(EXPONENTS, [curve(0.0), curve(4.0)])
    assert found.log2_rate is None
    assert found.edge == "above"
    assert found.by_seed[1] is None
    assert lowest(EXPONENTS, [None] * len(EXPONENTS)).edge


def test_a_breakdown_is_no_better_than_the_worst():
    """The parabola sees the largest finite loss in its place, and stays within half a step."""
    losses = curve(-1.0)
    point = lowest(EXPONENTS, [*losses[:6], None, float("inf"), float("nan")])
    assert point.edge == ""
    assert -1.5 <= known(point.exponent) < -1


def test_identical_curves_do_not_drift():
    curves = [curve(-2.1), curve(-1.9), curve(-2.3)]
    found = rate_drift({size: best_rate(EXPONENTS, curves) for size in (32, 64, 128)})
    assert abs(known(found.octaves_per_doubling)) < 1e-12
    assert abs(known(found.span)) < 1e-12
    low, high = known(found.interval)
    assert low < 0 < high
    same = rate_drift({size: best_rate(EXPONENTS, [curve(-2.0)] * 3) for size in (32, 64)})
    np.testing.assert_allclose(known(same.span_interval), 0, atol=1e-9)
    assert same.steady == "yes"


def test_a_known_drift_is_recovered_and_covered():
    """In 95 of 100 experiments the interval holds the truth."""
    rng = np.random.default_rng(1)
    sizes, per_doubling, covered = (32, 64, 128, 256), -0.4, 0
    for _ in range(400):
        best = {}
        for size in sizes:
            middles = per_doubling * np.log2(size / 32) + 0.2 * rng.normal(size=4)
            best[size] = BestRate(None, None, "", middles.tolist())
        low, high = known(rate_drift(best).interval)
        covered += low <= per_doubling <= high
    assert 0.92 < covered / 400 < 0.98
    exact = rate_drift(
        {s: best_rate(EXPONENTS, [curve(-0.4 * np.log2(s / 32))] * 2) for s in sizes}
    )
    np.testing.assert_allclose(known(exact.octaves_per_doubling), -0.4)
    np.testing.assert_allclose(known(exact.span), -1.2)
    assert exact.steady == "no"


def test_sizes_at_an_edge_do_not_count():
    best = {size: best_rate(EXPONENTS, [curve(at)] * 2)
            for size, at in ((1, 0.0), (2, 0.5), (4, 1.0), (8, 4.0))}  # fmt: skip
    found = rate_drift(best)
    np.testing.assert_allclose(known(found.octaves_per_doubling), 0.5)
    assert found.span is None
    assert found.steady == "open"


@pytest.mark.parametrize("at", [-6.0, -2.2, -1.0, 1.9])
def test_the_price_of_a_rate(at):
    """The logarithm of the loss is a parabola: its height at every rate is known."""
    np.testing.assert_allclose(known(excess(EXPONENTS, curve(-1.3), at)), 0.3 * (at + 1.3) ** 2)
    assert excess(EXPONENTS, curve(-9.0), at) is None


def test_the_smoothed_loss():
    losses = np.arange(20.0).reshape(2, 10)
    np.testing.assert_allclose(late(losses), [8.5, 18.5])


def synthetic(study, shift):
    """Rows as if training had found parabolas; `shift(method)` is the drift per doubling."""
    rows = []
    for cell in study.cells():
        smallest = 2 if cell["sweep"] == "resmlp-depth" else 32
        best = -2 + 0.01 * cell["seed"]
        best += shift(cell["method"]) * np.log2(cell["size"] / smallest)
        row = cell | {"log2_rates": EXPONENTS, "first_loss": 2.3, "losses": curve(best)}
        if cell["part"] == "rates" and cell["sweep"].endswith("width"):
            change = cell["size"] ** (0.5 if cell["method"] == "Adam" else 0.0)
            row |= {"changes": {str(k): [change] * len(EXPONENTS) for k in (1, 2)}}
        rows.append(row)
    return rows


def test_the_summary_and_the_picture():
    study = LearningRateTransfer(
        sweeps=("mlp-width", "resmlp-depth"), methods=("modular", "Adam"), seeds=(0, 1)
    )
    rows = synthetic(study, lambda method: -0.5 if method == "Adam" else 0.0)
    summary = study.summarise(rows)
    ours, adam = (summary["transfer"]["mlp-width"][name] for name in ("modular", "Adam"))
    assert ours["steady"] == "yes"
    assert abs(ours["octaves_per_doubling"]) < 1e-9
    assert adam["steady"] == "no"
    assert adam["span"] == pytest.approx(-1.5)
    assert ours["coordinates"]["layers"]["1"]["slope"] == pytest.approx(0, abs=1e-9)
    assert adam["coordinates"]["layers"]["2"]["slope"] == pytest.approx(0.5)
    # A parabola of curvature 0.3; seeds differ from their mean by 0.005 octaves.
    assert ours["price"]["value"] == pytest.approx(0.3 * 0.005**2)
    assert adam["price"]["value"] == pytest.approx(0.3 * (1.5**2 + 0.005**2))
    masses = summary["masses"]["resmlp-depth"]
    assert set(masses) == {"2", "8"}
    assert masses["2"]["log2_rates"][0]["log2_rate"] == pytest.approx(-2 + 0.005)
    assert masses["8"]["losses"][0]["value"] == pytest.approx(min(curve(-2.0)), rel=1e-3)
    record = {"settings": study.settings(), "summary": summary, "rows": rows}
    assert "-1.50 ± 0.0" in study.table(record)
    assert len(study.plot(record).axes) == 8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "at least 1"),
        ({"early": 200}, "early at most steps"),
        ({"methods": ()}, "at least one sweep"),
        ({"seeds": (1, 1)}, "seeds must differ"),
        ({"masses": (0.0,)}, "masses must be positive"),
        ({"sizes": (32,)}, "two or more, ascending"),
        ({"sizes": (64, 32)}, "two or more, ascending"),
        ({"sweeps": ("gpt-width",), "sizes": (18, 32)}, "gpt-width must be a multiple of 4"),
        ({"sweeps": ("mlp-depth",), "sizes": (1, 2)}, "mlp-depth must be at least 2"),
    ],
)
def test_refusals(settings, message):
    with pytest.raises(ValueError, match=message):
        LearningRateTransfer(**settings)


def rms_divide(x):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True))


def test_the_standard_residual_network():
    """`x + f(x) / sqrt(L)`, with Gaussian weights of deviation 1/sqrt(fan_in)."""
    network = Residual(width=32, depth=3).standard(12, 5)
    weights = gaussian_weights(network, jax.random.key(0))
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(weights)]
    first, *blocks, last = leaves
    x = np.random.default_rng(0).normal(size=(4, 12))
    h = x @ first.T
    for k in range(3):
        branch = h
        for layer in range(2):
            inner = blocks[0][k, layer] if blocks[0].ndim == 4 else blocks[layer][k]
            branch = np.abs(rms_divide(branch) @ inner.T)
            branch = branch - branch.mean(axis=-1, keepdims=True)
        h = h + branch / np.sqrt(3)
    found = jax.jit(network.apply)(weights, jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(found, h @ last.T, atol=1e-4)
    for leaf in leaves:
        assert leaf.std() * np.sqrt(leaf.shape[-1]) == pytest.approx(1, rel=0.2)


def test_the_standard_attention_divides_by_the_root():
    """One block with an MLP of zeros; two tokens, two heads of two entries, in NumPy."""
    network = Transformer(width=4, depth=1).standard(7, 7)
    weights = gaussian_weights(network, jax.random.key(1))
    leaves, structure = jax.tree.flatten(weights)
    shapes = [leaf.shape for leaf in leaves]
    up = shapes.index((1, 16, 4))
    leaves[up] = jnp.zeros((1, 16, 4))
    table, *attention = (np.asarray(leaf, np.float64) for leaf in leaves[:5])
    query, key, value, merge = (leaf[0] for leaf in attention)
    tokens = np.array([3, 5])
    h = table[tokens]
    x = rms_divide(h)
    turn = [np.array([[np.cos(t), -np.sin(t)], [np.sin(t), np.cos(t)]]) for t in range(2)]
    heads = []
    for j in (0, 2):
        q, k, v = ((x @ w.T)[:, j : j + 2] for w in (query, key, value))
        q, k = (np.stack([turn[t] @ a[t] for t in range(2)]) for a in (q, k))
        scores = np.exp(q @ k.T / np.sqrt(2)) * np.tri(2)
        heads.append(scores / scores.sum(axis=1, keepdims=True) @ v)
    h = h + np.concatenate(heads, axis=1) @ merge.T / np.sqrt(2)
    expected = rms_divide(h) @ np.asarray(leaves[-1], np.float64).T
    found = jax.jit(network.apply)(structure.unflatten(leaves), jnp.asarray(tokens))
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert table.std() == pytest.approx(1, rel=0.4)


def test_features_move_as_far_as_the_weights_say():
    network = MLP(3, 4, 5, 2)
    before = network.init(jax.random.key(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(6, 4)), jnp.float32)
    still = feature_changes(network, before, before, x)
    assert all(float(change) == 0 for change in still.values())
    assert list(still) == ["1", "2"]
    after = (2 * before[0], before[1], before[2])
    moved = feature_changes(network, before, after, x)
    hidden = np.asarray(x) @ np.asarray(before[0]).T
    np.testing.assert_allclose(moved["1"], np.sqrt(np.mean(hidden**2)), rtol=1e-5)
    out = np.maximum(hidden, 0) @ np.asarray(before[2]).T
    np.testing.assert_allclose(moved["2"], np.sqrt(np.mean(out**2)), rtol=1e-5)
    assert list(feature_changes(Linear(2, 4), jnp.eye(2, 4), jnp.eye(2, 4), x)) == ["1"]


def test_training_is_a_plain_loop():
    """Adam over three steps by hand; a rate of zero moves nothing."""
    task, method = Pictures(batch=8), METHODS["Adam"]
    network = method.network(Perceptron(width=6, depth=2), task.inputs, task.classes)
    descent = Descent(method, network, task, steps=3, early=2, multiplier=1.5)
    trained = descent.train([0.0, 0.25], seed=3)
    still, moved = (np.asarray(descent.changes(trained, 3)["2"])[k] for k in (0, 1))
    assert still == 0 < moved
    images, labels = task.parts().train
    tx = optax.inject_hyperparams(optax.adam)(0.25)

    @jax.jit
    def step(weights, state, x, y, k):
        def loss(weights):
            scores = jax.nn.log_softmax(1.5 * network.apply(weights, x))
            return -jnp.mean(jnp.take_along_axis(scores, y[:, None], axis=1))

        value, grads = jax.value_and_grad(loss)(weights)
        state.hyperparams["learning_rate"] = 0.25 * (1 - k / 3)
        updates, state = tx.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state, value

    weights = descent.start(3)
    state = tx.init(weights)
    for k, chosen in enumerate(task.order(3, 3)):
        weights, state, value = step(weights, state, images[chosen], labels[chosen], k)
        np.testing.assert_allclose(trained.loss[1, k], value, rtol=2e-3)
    for ours, theirs in zip(jax.tree.leaves(trained.final), jax.tree.leaves(weights), strict=True):
        np.testing.assert_allclose(ours[1], theirs, atol=2e-3)
    loss, error = descent.judge(trained)
    assert loss.shape == (2,)
    assert np.all((error >= 0) & (error <= 1))


def test_labels_are_the_next_characters():
    task = Characters(batch=4, context=9)
    tokens = jnp.asarray(task.parts().train)
    order = task.order(2, 0)
    x, y = task.batch_of(tokens, jnp.asarray(order[0]))
    np.testing.assert_array_equal(np.asarray(x)[:, 1:], np.asarray(y)[:, :-1])
    np.testing.assert_array_equal(x[:, 0], tokens[order[0]])
    assert tokens.max() < task.classes
    assert len(np.unique(order)) == 8
