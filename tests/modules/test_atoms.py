"""Atoms: forward maps against loops, well-normedness by derivatives, manifolds, stacks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manifoldmuon.contrib import LocallyConnected
from manifoldmuon.manifolds import EmbeddingRows, Euclidean, Hypersphere, Orthogonal, Stiefel
from manifoldmuon.modules import (
    Atom,
    Compose,
    Conv2D,
    Embed,
    Linear,
    MeanSubtract,
    RMSDivide,
    Stack,
    Tied,
    Unembed,
)
from manifoldmuon.norms import FanRatio, Spectral
from tests.compiled import ask
from tests.modules import paper
from tests.modules.measure import (
    gaussian,
    largest,
    normalized,
    shapes_of,
    steepest_step,
    tokens,
    unit_tokens,
)

TOKENS = jnp.array([[2, 0, 5, 2], [1, 1, 6, 3]], jnp.int32)
IMAGE = unit_tokens(1, 2, 6, 5, 3)
SPHERE, ORTHOGONAL = Hypersphere(FanRatio(), ndim=2), LocallyConnected((4,), 3, 3, Orthogonal())

# atom, an input of norm at most 1, the norm of the output
ATOMS = {
    "Linear wide": (Linear(3, 7), unit_tokens(0, 4, 7), tokens),
    "Linear tall": (Linear(7, 3), unit_tokens(0, 4, 3), tokens),
    "Linear on Stiefel": (Linear(7, 3, Stiefel(FanRatio())), unit_tokens(0, 4, 3), tokens),
    "Linear on Orthogonal": (Linear(3, 3, Orthogonal()), unit_tokens(0, 4, 3), tokens),
    "Linear on a sphere": (Linear(7, 3, SPHERE), unit_tokens(0, 4, 3), tokens),
    "LocallyConnected": (LocallyConnected((2, 5), 7, 3), unit_tokens(0, 4, 2, 5, 3), tokens),
    "LocallyConnected on Orthogonal": (ORTHOGONAL, unit_tokens(0, 2, 4, 3), tokens),
    "Embed": (Embed(5, 7), TOKENS, tokens),
    "Embed on rows": (Embed(5, 7, EmbeddingRows()), TOKENS, tokens),
    "Unembed": (Unembed(7, 5), unit_tokens(0, 4, 5), largest),
    "Unembed on rows": (Unembed(7, 5, EmbeddingRows()), unit_tokens(0, 4, 5), largest),
    "Conv2D": (Conv2D(4, 3), IMAGE, tokens),
    "Conv2D on Stiefel": (Conv2D(4, 3).constrained(), IMAGE, tokens),
    "Conv2D with stride": (Conv2D(2, 3, kernel=2, stride=2, padding=0), IMAGE, tokens),
}


def probe(atom, x):
    """Return initial weights, output changes for unit steps in each argument, and norms."""
    w = atom.init(jax.random.key(0))
    # The steepest step for a random gradient is the longest step allowed.
    step = steepest_step(atom, gaussian(3, *atom.shape), w)
    by_weight = jax.jvp(lambda w: atom.apply(w, x), (w,), (step,))[1]
    by_input = jnp.zeros(1)
    if jnp.issubdtype(x.dtype, jnp.floating):
        by_input = jax.jvp(lambda x: atom.apply(w, x), (x,), (unit_tokens(4, *x.shape),))[1]
    return w, by_weight, by_input, atom.norm(w), atom.norm(step), atom.constraint().distance(w)


@pytest.mark.slow
def test_atoms_are_well_normed():
    # A single program saves compilation time.
    probes = ask(lambda: {name: probe(atom, x) for name, (atom, x, _) in ATOMS.items()})
    for name, (atom, _, size) in ATOMS.items():
        w, by_weight, by_input, norm, step_norm, distance = probes[name]
        assert w.shape == atom.shape, name
        assert norm == pytest.approx(1, rel=1e-5), name
        assert step_norm == pytest.approx(1, rel=1e-4), name
        assert max(size(by_weight), size(by_input)) <= 1 + 1e-5, name
        if type(atom.manifold) in (Euclidean, type(atom.constraint())):
            assert np.max(distance) < 1e-5, name


@pytest.mark.parametrize("name", ["Linear tall", "Embed", "Unembed"])
def test_well_normedness_is_attained(name):
    atom, x, size = ATOMS[name]

    def steepest(key):
        w = atom.init(key)
        y, pull = jax.vjp(lambda w: atom.apply(w, x), w)
        # The cotangent selects the first vector, or the largest score.
        first = jnp.zeros_like(y).at[0].set(y[0])
        seed = y * (y == y.max()) if isinstance(atom, Unembed) else first
        return atom.apply(steepest_step(atom, pull(seed)[0], w), x)

    assert size(ask(steepest, jax.random.key(0))) == pytest.approx(1, rel=1e-4)


def test_locally_connected_matches_matrix_per_position():
    atom = LocallyConnected((2, 3), 4, 5)
    w, x = gaussian(0, *atom.shape), gaussian(1, 6, 2, 3, 5)
    expected = np.einsum("rcij,brcj->brci", *map(np.float64, (w, x)))
    found = atom.apply(w, x)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(atom.apply(w, x[0]), found[0], rtol=1e-6, atol=1e-6)


def test_embed_returns_rows_and_nan_for_unknown_tokens():
    table = gaussian(0, 7, 5)
    np.testing.assert_array_equal(Embed(5, 7).apply(table, TOKENS), np.asarray(table)[TOKENS])
    for outside in (-1, 7, -8):
        assert np.all(np.isnan(Embed(5, 7).apply(table, jnp.array([outside]))))


def test_unembed_is_mean_product_with_rows():
    table, x = gaussian(0, 7, 5), gaussian(1, 2, 5)
    expected = [[np.mean(np.asarray(row) * np.asarray(v)) for row in table] for v in x]
    np.testing.assert_allclose(Unembed(7, 5).apply(table, x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding"), [(3, 1, None), (2, 1, None), (3, 2, 1), (2, 2, 0), (1, 1, 2)]
)
def test_conv_matches_loop(kernel, stride, padding):
    conv = Conv2D(4, 3, kernel, stride, padding)
    w, x = gaussian(0, *conv.shape), gaussian(1, 2, 6, 5, 3)
    before, after = (padding, padding) if padding is not None else ((kernel - 1) // 2, kernel // 2)
    image = np.pad(np.asarray(x, np.float64), [(0, 0), (before, after), (before, after), (0, 0)])
    rows = (image.shape[1] - kernel) // stride + 1
    columns = (image.shape[2] - kernel) // stride + 1
    expected = np.zeros((2, rows, columns, 4))
    for i, j, a, b in np.ndindex(rows, columns, kernel, kernel):
        pixel = image[:, i * stride + a, j * stride + b]
        expected[:, i, j] += pixel @ np.float64(w[a, b]).T
    found = conv.apply(w, x)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(conv.apply(w, x[0]), found[0])
    if padding is None:
        assert found.shape == (2, 6, 5, 4)


def test_atoms_keep_the_dtype():
    atom = Linear(3, 4)
    w = jnp.ones((3, 4), jnp.bfloat16)
    assert atom.apply(w, jnp.ones(4, jnp.bfloat16)).dtype == jnp.bfloat16
    shapes = jax.eval_shape(lambda: (atom @ Embed(4, 5)).init(jax.random.key(0), jnp.float16))
    assert [leaf.dtype for leaf in jax.tree.leaves(shapes)] == [jnp.float16] * 2


def test_atom_shows_custom_norm():
    atom: Atom = Linear(4, 4, Euclidean(Spectral()))
    assert atom.geometry() == Euclidean(Spectral())
    assert str(atom).splitlines()[1].startswith("Linear(4, 4) on Euclidean")


# Stacks ---------------------------------------------------------------------------------------

BLOCK = MeanSubtract() @ (1.5 * Linear(6, 6)) @ RMSDivide()
STACK = Stack(BLOCK, 2)


@pytest.mark.slow
def test_stack_matches_unrolled():
    """A scan over stacked weights matches a loop over the copies."""
    unrolled, x = paper.unrolled(STACK), gaussian(2, 4, 6)
    split = functools.partial(paper.unstacked, STACK)

    def both(key, other):
        w, grads = STACK.init(key), STACK.init(other)
        pieces, makers = split(w), (steepest_step, normalized)
        steps = [split(make(STACK, grads, w)) for make in makers]
        others = [make(unrolled, split(grads), pieces) for make in makers]
        inits = tuple(BLOCK.init(k) for k in jax.random.split(key, 2))
        return (
            (STACK.apply(w, x), STACK.norm(w), pieces, steps),
            (unrolled.apply(pieces, x), unrolled.norm(pieces), inits, others),
        )

    one, other = ask(both, jax.random.key(0), jax.random.key(1))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), one, other)
    assert STACK.sharpness == pytest.approx(unrolled.sharpness, rel=1e-12)


def test_convolution_stack_has_norm_per_copy():
    kernel = Conv2D(2, 2, kernel=2)
    stack = (2 * kernel) ** 2
    for module in (stack, stack.constrained()):
        w = gaussian(0, 2, *kernel.shape), ()
        taps = np.linalg.norm(np.asarray(w[0]), 2, axis=(-2, -1)).max(axis=(-2, -1))
        expected = np.max(4 * taps / np.ravel(module.budgets()[0]))
        assert float(jax.jit(module.norm)(w)) == pytest.approx(expected, rel=1e-5)


def test_stack_program_size_is_constant():
    def equations(copies):
        net = BLOCK**copies
        return str(jax.make_jaxpr(net.apply)(shapes_of(net), jnp.ones(6))).count("\n")

    assert equations(2) == equations(50)


# Weight sharing -------------------------------------------------------------------------------

TIED, UNEVEN = (
    Tied(Unembed(7, 6, mass=mass) @ (0.5 * Linear(6, 6)) @ Embed(6, 7), (0, 3))
    for mass in (2.0, 3.0)
)


def test_tied_leaf_gets_summed_shares():
    """Untied budgets are 1/4 / (1/2) for the embedding and 2/4 for the head: both 1/2."""
    assert TIED.mass == 4
    assert TIED.masses() == (3.0, 1.0, (), ())
    np.testing.assert_allclose([TIED.budgets()[0], TIED.budgets()[1]], [0.5, 0.5])
    assert TIED.geometry()[3] == ()
    # Shares 1/5 and 3/5, budgets 1/5 / (1/2) and 3/5; unit steps have the effects 1/2 and 1.
    assert UNEVEN.budgets()[0] == pytest.approx((1 / 5 + 3 / 5) / (1 / 2 + 1))


@pytest.mark.parametrize("uses", [2, 7, 30])
def test_recurrent_weight_gets_budget_divided_by_uses(uses):
    """A matrix used T times with the mass of a single use may move by 1/T of it."""

    def budget(recurrence):
        net = Linear(3, 6) @ recurrence.tare(2.0) @ Linear(6, 4)
        return jax.tree.leaves(net.budgets())

    tied = Tied(Compose((Linear(6, 6),) * uses), tuple(range(uses)))
    head, once, first = budget(Linear(6, 6))
    np.testing.assert_allclose(budget(tied), [head, once / uses, first])
    # Each use doubles what comes after: effects 1 + 2 + 4 + ...
    growing = Tied(Compose((2 * Linear(6, 6),) * uses), tuple((k, 0) for k in range(uses)))
    assert jax.tree.leaves(growing.budgets())[0] == pytest.approx(1 / (2 * (2**uses - 1)))


def test_tied_module_matches_untied_with_equal_weights():
    w = jax.jit(TIED.init)(jax.random.key(0))
    assert w[3] == ()

    def outputs_and_slopes(module, w):
        outputs, pull = jax.vjp(lambda w: module.apply(w, TOKENS), w)
        return outputs, pull(jnp.cos(outputs))[0]

    one, tied = ask(lambda w: outputs_and_slopes(TIED, w), w)
    other, both = ask(lambda w: outputs_and_slopes(TIED.module, w), (*w[:3], w[0]))
    np.testing.assert_array_equal(one, other)
    np.testing.assert_allclose(tied[0], both[0] + both[3], rtol=1e-5, atol=1e-6)


def test_tied_module_is_well_normed():
    @jax.jit
    def moved(w, seed):
        y, pull = jax.vjp(lambda w: TIED.apply(w, TOKENS), w)
        # The steepest step for a single score comes closest to the bound.
        step = steepest_step(TIED, pull(jnp.zeros_like(y).at[0, 0, seed].set(1.0))[0], w)
        return TIED.norm(step), jax.jvp(lambda w: TIED.apply(w, TOKENS), (w,), (step,))[1]

    w = jax.jit(TIED.init)(jax.random.key(0))
    norms, changes = zip(*(moved(w, score) for score in range(7)), strict=True)
    assert max(norms) <= 1 + 1e-5
    assert 0.5 < max(map(largest, changes)) <= 1


def test_tied_sharpness_scales_with_budget():
    """The tied module's sharpness equals the untied module's, for the longer step."""
    alpha, beta, gamma = UNEVEN.module.sharpness
    stretch = UNEVEN.budgets()[0] / (1 / 5 / 0.5)
    assert stretch > 1
    assert UNEVEN.sharpness == pytest.approx((stretch**2 * alpha, stretch * beta, gamma))


def test_tying_in_stacks_and_twice():
    """Stack budgets keep the copies' axis; a second tied group keeps the indices of the first."""
    inner = Tied(Linear(6, 6) @ (2 * Linear(6, 6)), (0, 2))
    # Within a copy: shares 1/2 each, budgets 1/2/2 and 1/2, so 1 / (2 + 1) = 1/3.
    stack = inner**2
    np.testing.assert_allclose(np.ravel(stack.budgets()[0]), [1 / 3 / 2 / 2, 1 / 3 / 2])
    twice = Tied(Tied(Compose((Linear(6, 6),) * 4), (0, 2)), (1, 3))
    assert twice.budgets() == (0.25, 0.25, (), ())
    assert twice.masses() == (2.0, 2.0, (), ())
    assert "tied" in str(twice)
