"""Certified networks: equal initial functions, constraints, and known findings."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manifoldmuon.manifolds import Stiefel
from manifoldmuon.manifolds.solvers import ProjectedPolar
from studies.certified import study as module
from studies.certified.methods import BJORCK_STEPS, METHODS, Bjorck, Cayley, SpectralNorm
from studies.certified.networks import NETWORKS, Convolutional, Local, Perceptron, Shifting
from studies.certified.study import MOMENTA, CertifiedNetworks, Tuned, search
from studies.certified.training import CHUNK
from tests.compiled import ask, point_of

TINY = CertifiedNetworks(methods=("manifold Muon",), batch=20, epochs=0.5, seeds=(0,))
SHAPES = ((7, 4), (4, 7), (5, 5), (2, 6, 3))


def frame(shape):
    return point_of(Stiefel(), shape, 1)


def singular_values(matrix):
    return np.linalg.svd(np.asarray(matrix, np.float64), compute_uv=False)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", METHODS)
def test_methods_start_at_given_weights(name, shape):
    method, weight = METHODS[name], frame(shape)

    def begun(weight):
        free, carry = method.begin(weight)
        return free, method.weight(free, method.carried(free, carry))

    free, found = ask(begun, weight)
    assert free.shape == weight.shape
    np.testing.assert_allclose(found, weight, atol=2e-5)


def stood_still(method, weight, move, steps):
    """Move the free array once, then only update the carry, `steps` times; return both."""
    free, carry = method.begin(weight)
    free = free + move
    carry = jax.lax.fori_loop(0, steps, lambda _, carry: method.carried(free, carry), carry)
    return free, carry


@pytest.mark.parametrize("shape", SHAPES)
def test_cayley_and_bjorck_are_orthonormal(shape):
    move = 0.3 * np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    for method in (Cayley(0), Bjorck(0)):
        found = ask(
            lambda weight, method=method: method.weight(*stood_still(method, weight, move, 20)),
            frame(shape),
        )
        np.testing.assert_allclose(singular_values(found), 1, atol=2e-4)


def test_gram_bjorck_matches_bjorck():
    rng = np.random.default_rng(0)
    free = rng.standard_normal((3, 6))
    expected = free / np.linalg.svd(free, compute_uv=False)[0]
    for _ in range(BJORCK_STEPS):
        expected = 1.5 * expected - 0.5 * expected @ expected.T @ expected
    method = Bjorck(0)
    found = ask(lambda free: method.weight(*stood_still(method, free, 0.0, 30)), np.float32(free))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_spectral_norm_tracks_largest_singular_value():
    free = np.float32(np.diag([3.0, 2.0, 0.5])[:, :2] + 0.1)
    method = SpectralNorm(0)

    def followed(free):
        free, carry = stood_still(method, free, 0.0, 20)
        slope = jax.grad(lambda free: jnp.sum(method.weight(free, carry) ** 3))(free)
        return method.weight(free, carry), slope

    found, gradient = ask(followed, free)
    np.testing.assert_allclose(found, free / singular_values(free)[0], rtol=1e-5)
    # The gradient passes through the norm, so it has no part along the array.
    assert abs(np.sum(gradient * free)) < 1e-5


@pytest.mark.slow_except("architecture0")
@pytest.mark.parametrize(
    "architecture",
    [Perceptron((16, 16)), Convolutional(widths=(16,)), Local(4, (16,)), Shifting(4, 24, 1, (16,))],
)
def test_networks_preserve_gradient_norms(architecture):
    net = architecture.network((8, 8, 1), 10, ProjectedPolar())
    weights = net.init(jax.random.key(0))
    x = np.random.default_rng(1).standard_normal((2, 8, 8, 1)).astype(np.float32)

    def pull(x):  # rows and reflections preserve gradient norms
        logits, back = jax.vjp(lambda x: net.apply(weights, x), x)
        return logits, back(jnp.eye(10)[:2])[0]

    logits, pulled = ask(pull, x)
    assert logits.shape == (2, 10)
    lengths = np.linalg.norm(pulled.reshape(2, -1), axis=1)
    if isinstance(architecture, Shifting):  # except a frame with more channels than pixels
        assert np.all(lengths <= 1 + 1e-5)
    else:
        np.testing.assert_allclose(lengths, 1, atol=1e-5)


@pytest.mark.slow
def test_training_learns_and_certificates_hold(monkeypatch):
    monkeypatch.setitem(NETWORKS, "fc-256", Perceptron((16,)))
    monkeypatch.setattr("studies.certified.training.PAIRS", 1)
    once = lambda judge, start: Tuned([start], [0.9], [judge(start, 0.9)], start, 0.9)  # noqa: E731
    monkeypatch.setattr(module, "search", once)
    study = dataclasses.replace(TINY, epochs=3.0, attacked=100)
    row = study.run(study.cells()[0])
    assert row["log2_rate"] in row["log2_rates"]
    assert len(row["tuning"]) == len(row["log2_rates"])
    for part in (row["epochs"], row["time"]):
        assert part["steps"] % CHUNK == 0
        assert part["seconds"] > 0
        assert part["lipschitz"] == pytest.approx(1, abs=1e-5)
        accuracies = part["accuracies"]
        assert np.all(np.diff(accuracies) <= 0)
        np.testing.assert_allclose(part["curve"][0], accuracies[0])
    assert row["epochs"]["accuracies"][0] > 0.7
    assert row["epochs"]["broken"] == 0
    assert np.all(np.array(row["epochs"]["proved"]) <= row["epochs"]["robust"])


@pytest.mark.parametrize("peak", [(0, 0.9), (-9, 0.975), (7, 0.2)])
def test_search_tries_all_neighbours_of_best(peak):
    def judge(log2_rate, momentum):
        place = MOMENTA.index(momentum) - MOMENTA.index(peak[1])
        return [-abs(log2_rate - peak[0]), -abs(place)]

    found = search(judge, 0)
    tried = list(zip(found.log2_rates, found.momenta, strict=True))
    assert (found.log2_rate, found.momentum) == peak
    assert len(set(tried)) == len(tried) == len(found.tuning)
    place = MOMENTA.index(peak[1])
    for rate in (peak[0] - 1, peak[0], peak[0] + 1):
        for momentum in MOMENTA[max(0, place - 1) : place + 2]:
            assert (rate, momentum) in tried


def test_muon_with_retraction_projects_muon_step():
    """Against Optax's Muon and an SVD; the direction is not projected to the tangent space."""
    method, weight = METHODS["Muon + retraction"], frame((7, 4))
    gradient = np.random.default_rng(3).standard_normal((7, 4)).astype(np.float32)
    rate = 2.0**-3

    def stepped(weight):
        tx = method.optimizer(rate, 0.9, [Stiefel()])
        moves, _ = tx.update([gradient], tx.init([weight]), [weight])
        return weight + jax.tree.leaves(moves)[0]

    def muon(weight):
        tx = optax.contrib.scale_by_muon(beta=0.9)
        return tx.update(gradient, tx.init(weight), weight)[0]

    flat = np.asarray(weight - rate * ask(muon, weight), np.float64)
    left, _, right = np.linalg.svd(flat, full_matrices=False)
    np.testing.assert_allclose(ask(stepped, weight), left @ right, atol=1e-4)
