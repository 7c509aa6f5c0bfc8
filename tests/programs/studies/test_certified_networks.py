"""Certified networks: equal initial functions, constraints, and known findings."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.linalg

from manifoldmuon.manifolds import Stiefel
from manifoldmuon.manifolds.solvers import ProjectedPolar
from manifoldmuon.robustness import certify, export
from manifoldmuon_verify import verify
from studies.certified import methods
from studies.certified.networks import NETWORKS, Local, Perceptron, Pyramid
from studies.certified.study import ROUNDS, CertifiedNetworks, search
from studies.certified.training import CHUNK, Trial, program_of
from tests.compiled import ask, point_of

pytestmark = pytest.mark.slow

TINY = CertifiedNetworks(methods=("manifold Muon",), batch=20, epochs=0.5, trials=1, seeds=(0,))
NETS = [
    Perceptron((16, 16)),
    Local(4, (16,)),
    Pyramid((24,), 1, patch=4, widths=(16,)),
    Pyramid((6, 12), 1, widths=(16,), circular=True),
    Pyramid((6, 12), 2, widths=(16,), unit_rows=True),
]
SHAPES = ((7, 4), (4, 7), (5, 5), (2, 6, 3))


def frame(shape):
    return point_of(Stiefel(), shape, 1)


def singular_values(matrix):
    return np.linalg.svd(np.asarray(matrix, np.float64), compute_uv=False)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", methods.METHODS)
def test_methods_start_at_given_weights(name, shape):
    method, weight = methods.METHODS[name], frame(shape)

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
def test_cayley_bjorck_and_exponential_are_orthonormal(shape):
    move = 0.3 * np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    for method in (methods.Cayley(0), methods.Bjorck(0), methods.SkewExponential(0)):
        free, carry = ask(lambda x, method=method: stood_still(method, x, move, 20), frame(shape))
        found = ask(method.weight, free, carry)
        np.testing.assert_allclose(singular_values(found), 1, atol=2e-4)


def test_gram_bjorck_matches_bjorck():
    rng = np.random.default_rng(0)
    free = rng.standard_normal((3, 6))
    expected = free / np.linalg.svd(free, compute_uv=False)[0]
    for _ in range(methods.BJORCK_STEPS):
        expected = 1.5 * expected - 0.5 * expected @ expected.T @ expected
    method = methods.Bjorck(0)
    found = ask(lambda free: method.weight(*stood_still(method, free, 0.0, 30)), np.float32(free))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_exponential_matches_scipy():
    first = np.linalg.qr(np.random.default_rng(4).standard_normal((6, 3)))[0]
    free = 0.2 * np.random.default_rng(5).standard_normal((6, 3))
    expected = scipy.linalg.expm(free @ first.T - first @ free.T) @ first
    found = ask(methods.SkewExponential(0).weight, np.float32(free), np.float32(first))
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_almost_orthogonal_has_norm_at_most_one(shape):
    def norm(free):
        found = ask(lambda free: methods.AlmostOrthogonal(0).weight(free, ()), np.float32(free))
        return np.max(singular_values(found))

    assert norm(np.random.default_rng(6).standard_normal(shape)) <= 1 + 1e-6
    # Columns of one sign meet the bound with equality (Perron's vector is theirs).
    np.testing.assert_allclose(norm(np.ones(shape)), 1, atol=1e-6)


def test_spectral_norm_tracks_largest_singular_value():
    free = np.float32(np.diag([3.0, 2.0, 0.5])[:, :2] + 0.1)
    method = methods.SpectralNorm(0)

    def followed(free):
        free, carry = stood_still(method, free, 0.0, 20)
        slope = jax.grad(lambda free: jnp.sum(method.weight(free, carry) ** 3))(free)
        return method.weight(free, carry), slope

    found, gradient = ask(followed, free)
    np.testing.assert_allclose(found, free / singular_values(free)[0], rtol=1e-5)
    # The gradient passes through the norm, so it has no part along the array.
    assert abs(np.sum(gradient * free)) < 1e-5


@pytest.mark.parametrize("architecture", NETS)
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
    if isinstance(architecture, Pyramid):  # except a frame with more channels than pixels
        assert np.all(lengths <= 1 + 1e-5)
    else:
        np.testing.assert_allclose(lengths, 1, atol=1e-5)


@pytest.mark.parametrize("architecture", NETS)
def test_radii_of_networks_are_verified(architecture, tmp_path):
    net = architecture.network((8, 8, 1), 10, ProjectedPolar())
    rng = np.random.default_rng(7)
    x, labels = rng.random((20, 8, 8, 1)).astype(np.float32), rng.integers(10, size=20)
    found = certify(net, net.init(jax.random.key(1)), x, labels)
    assert found.bounds.lipschitz_inputs == pytest.approx(1, abs=1e-5)
    export(tmp_path / "proof", found)
    radii = verify(tmp_path / "proof").radii
    np.testing.assert_allclose(radii, found.radii, atol=1e-5)  # logits in float64, here in float32


def test_training_learns_and_certificates_hold(monkeypatch):
    monkeypatch.setitem(NETWORKS, "fc-256", Perceptron((16,)))
    monkeypatch.setattr("studies.certified.training.PAIRS", 1)
    study = dataclasses.replace(TINY, epochs=3.0, attacked=100)
    row = study.run(study.cells()[0])
    assert len(row["tuning"]) == len(row["trials"]) == ROUNDS
    assert [row[name] for name in ("rate", "momentum", "offset", "temperature")] in row["trials"]
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


@pytest.mark.parametrize("name", methods.METHODS)
def test_trials_in_one_program_match_trials_alone(name):
    """What an accelerator does in one program, on two pictures of a seed each."""
    study = dataclasses.replace(TINY, networks=("fc-256",), batch=5)
    training = study._training("fc-256", name)._replace(architecture=NETS[4], image=(8, 8, 1))
    trials = [Trial(2.0**-6, 0.9, 1.0, 0.3, seed) for seed in (3, 4)]
    program, data = program_of(training), study._data()
    keys = jax.vmap(jax.random.key)(jnp.array([3, 4]))
    numbers = jnp.array([trial[:-1] for trial in trials], jnp.float32)
    order = np.arange(2 * CHUNK * 5).reshape(2, CHUNK, 5) % 7
    rest = jnp.asarray(data.train_x), jnp.asarray(data.train_y), np.int32(0), np.int32(CHUNK)

    def begin(keys):
        carry = program.begin(keys)
        if not training.method.on_manifolds:  # off the kink of AOL, where rounding chooses signs
            off = [0.1 * jnp.cos(jnp.arange(x[0].size)).reshape(x.shape[1:]) for x in carry.free]
            carry = carry._replace(free=[x + y for x, y in zip(carry.free, off, strict=True)])
        return carry

    def trained(which):
        given = numbers[which], keys[which], order[which]
        return program.weights(program.chunk(begin(keys[which]), *given, *rest))

    both = jax.tree.leaves(trained(slice(0, 2)))
    for k in range(2):
        alone = jax.tree.leaves(trained(slice(k, k + 1)))
        for found, expected in zip(both, alone, strict=True):
            np.testing.assert_allclose(found[k], expected[0], atol=2e-3)


def test_augmented_images_are_shifted_and_mirrored():
    image = np.random.default_rng(8).random((4, 4, 1)).astype(np.float32)
    training = TINY._training("fc-256", "manifold Muon")._replace(crop=1, flip=True)
    padded = np.pad(image, ((1, 1), (1, 1), (0, 0)))
    crops = [padded[i : i + 4, j : j + 4] for i in range(3) for j in range(3)]
    wanted = {x.tobytes() for crop in crops for x in (crop, np.ascontiguousarray(crop[:, ::-1]))}
    copies = image[None].repeat(400, 0)
    found = ask(program_of(training)._augmented, jax.random.key(9), copies)
    assert {np.asarray(x).tobytes() for x in found} == wanted


@pytest.mark.parametrize("peak", [(0.5, 0.5), (-1.5, -1.0)])
def test_search_finds_the_peak_of_a_smooth_score(peak):
    def score(trial):
        away = np.log2(trial.rate) - peak[0], np.log2(1 - trial.momentum) + 3 - peak[1]
        return [0.0, 1 - np.hypot(*away) / 8]

    start = Trial(1.0, 1 - 2.0**-3, 1.0, 1.0, 0)
    found = search(lambda trials: list(map(score, trials)), start, 1, 16)
    assert found.trials[0] == list(start[:-1])
    assert len(found.trials) == len(found.tuning) == 16 * ROUNDS
    chosen = [found.rate, found.momentum, found.offset, found.temperature]
    assert found.tuning[found.trials.index(chosen)] == max(found.tuning)
    assert max(found.tuning)[1] > 0.95


def test_muon_with_retraction_projects_muon_step():
    """Against Optax's Muon and an SVD; the direction is not projected to the tangent space."""
    method, weight = methods.METHODS["Muon + retraction"], frame((7, 4))
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
