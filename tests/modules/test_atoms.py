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

# atom, an input of norm at most 1, the norm of the output
ATOMS = {
    "Linear wide": (Linear(3, 7), unit_tokens(0, 4, 7), tokens),
    "Linear tall": (Linear(7, 3), unit_tokens(0, 4, 3), tokens),
    "Linear on Stiefel": (Linear(7, 3, Stiefel(FanRatio())), unit_tokens(0, 4, 3), tokens),
    "Linear on Orthogonal": (Linear(3, 3, Orthogonal()), unit_tokens(0, 4, 3), tokens),
    "Linear on a sphere": (
        Linear(7, 3, Hypersphere(FanRatio(), ndim=2)),
        unit_tokens(0, 4, 3),
        tokens,
    ),
    "LocallyConnected": (LocallyConnected((2, 5), 7, 3), unit_tokens(0, 4, 2, 5, 3), tokens),
    "LocallyConnected on Orthogonal": (
        LocallyConnected((4,), 3, 3, Orthogonal()),
        unit_tokens(0, 2, 4, 3),
        tokens,
    ),
    "Embed": (Embed(5, 7), TOKENS, tokens),
    "Embed on rows": (Embed(5, 7, EmbeddingRows()), TOKENS, tokens),
    "Unembed": (Unembed(7, 5), unit_tokens(0, 4, 5), largest),
    "Unembed on rows": (Unembed(7, 5, EmbeddingRows()), unit_tokens(0, 4, 5), largest),
    "Conv2D": (Conv2D(4, 3), IMAGE, tokens),
    "Conv2D on Stiefel": (Conv2D(4, 3).constrained(), IMAGE, tokens),
    "Conv2D with stride": (Conv2D(2, 3, kernel=2, stride=2, padding=0), IMAGE, tokens),
}


def probe(atom, x, key):
    """Return initial weights, output changes for unit steps in each argument, and norms."""
    w = atom.init(key)
    # The steepest step for a random gradient is the longest step allowed.
    step = steepest_step(atom, gaussian(3, *atom.shape), w)
    by_weight = jax.jvp(lambda w: atom.apply(w, x), (w,), (step,))[1]
    by_input = jnp.zeros(1)
    if jnp.issubdtype(x.dtype, jnp.floating):
        by_input = jax.jvp(lambda x: atom.apply(w, x), (x,), (unit_tokens(4, *x.shape),))[1]
    return w, by_weight, by_input, atom.norm(w), atom.norm(step), atom.constraint().distance(w)


@pytest.fixture(scope="module")
def probes():
    """Probe all atoms in one program, to save compilation time."""
    key = jax.random.key(0)
    return jax.jit(lambda: {name: probe(atom, x, key) for name, (atom, x, _) in ATOMS.items()})()


@pytest.mark.slow
@pytest.mark.parametrize("name", ATOMS)
def test_atoms_are_well_normed(name, probes):
    atom, _, size = ATOMS[name]
    w, by_weight, by_input, norm, step_norm, distance = probes[name]
    assert w.shape == atom.shape
    assert norm == pytest.approx(1, rel=1e-5)
    assert step_norm == pytest.approx(1, rel=1e-4)
    assert size(by_weight) <= 1 + 1e-5
    assert size(by_input) <= 1 + 1e-5
    if type(atom.manifold) in (Euclidean, type(atom.constraint())):
        assert np.max(distance) < 1e-5


def test_well_normedness_is_attained():
    """The bound is attained."""
    for name in ("Linear tall", "Embed", "Unembed"):
        atom, x, size = ATOMS[name]

        def steepest(key, atom=atom, x=x):
            w = atom.init(key)
            y, pull = jax.vjp(lambda w: atom.apply(w, x), w)
            # The cotangent selects the first vector, or the largest score.
            seed = (
                y * (y == y.max())
                if isinstance(atom, Unembed)
                else jnp.zeros_like(y).at[0].set(y[0])
            )
            return atom.apply(steepest_step(atom, pull(seed)[0], w), x)

        moved = jax.jit(steepest)(jax.random.key(0))
        assert size(moved) == pytest.approx(1, rel=1e-4), name


def test_locally_connected_matches_matrix_per_position():
    atom = LocallyConnected((2, 3), 4, 5)
    w, x = gaussian(0, *atom.shape), gaussian(1, 6, 2, 3, 5)
    expected = np.zeros((6, 2, 3, 4))
    for row, column in np.ndindex(2, 3):
        matrix = np.asarray(w[row, column], np.float64)
        expected[:, row, column] = np.asarray(x[:, row, column]) @ matrix.T
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
    for i in range(rows):
        for j in range(columns):
            for a in range(kernel):
                for b in range(kernel):
                    pixel = image[:, i * stride + a, j * stride + b]
                    expected[:, i, j] += pixel @ np.asarray(w[a, b], np.float64).T
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


def test_atom_with_custom_norm():
    """The geometry and the printed module show the non-default norm."""
    atom: Atom = Linear(4, 4, Euclidean(Spectral()))
    assert atom.geometry() == Euclidean(Spectral())
    assert str(atom).splitlines()[1].startswith("Linear(4, 4) on Euclidean")


# Stacks ---------------------------------------------------------------------------------------

BLOCK = MeanSubtract() @ (1.5 * Linear(6, 6)) @ RMSDivide()
STACK = Stack(BLOCK, 2)


def test_stack_matches_unrolled():
    """A scan over stacked weights matches a loop over the copies."""
    unrolled = paper.unrolled(STACK)
    x = gaussian(2, 4, 6)

    @jax.jit
    def both(key, other):
        w, grads = STACK.init(key), STACK.init(other)
        pieces, grad_pieces = paper.unstacked(STACK, w), paper.unstacked(STACK, grads)
        stacked = (STACK.apply(w, x), STACK.norm(w), pieces)
        plain = (unrolled.apply(pieces, x), unrolled.norm(pieces))
        inits = tuple(BLOCK.init(k) for k in jax.random.split(key, 2))
        steps = [
            (paper.unstacked(STACK, make(STACK, grads, w)), make(unrolled, grad_pieces, pieces))
            for make in (steepest_step, normalized)
        ]
        ones, others = zip(*steps, strict=True)
        return (*stacked, *ones), (*plain, inits, *others)

    one, other = both(jax.random.key(0), jax.random.key(1))
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
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

TIED = Tied(Unembed(7, 6, mass=2.0) @ (0.5 * Linear(6, 6)) @ Embed(6, 7), (0, 3))


def test_tied_leaf_gets_summed_shares():
    """Untied budgets are 1/4 / (1/2) for the embedding and 2/4 for the head: both 1/2."""
    assert TIED.mass == 4
    assert TIED.masses() == (3.0, 1.0, (), ())
    np.testing.assert_allclose([TIED.budgets()[0], TIED.budgets()[1]], [0.5, 0.5])
    assert TIED.geometry()[3] == ()
    # Shares 1/5 and 3/5, budgets 1/5 / (1/2) and 3/5; unit steps have the effects 1/2 and 1.
    other = Tied(Unembed(7, 6, mass=3.0) @ (0.5 * Linear(6, 6)) @ Embed(6, 7), (0, 3))
    assert other.budgets()[0] == pytest.approx((1 / 5 + 3 / 5) / (1 / 2 + 1))


def test_tied_module_matches_untied_with_equal_weights():
    w = jax.jit(TIED.init)(jax.random.key(0))
    assert w[3] == ()
    untied = TIED.module
    full = (*w[:3], w[0])

    @functools.partial(jax.jit, static_argnums=0)
    def outputs_and_slopes(module, w):
        outputs = module.apply(w, TOKENS)
        return outputs, jax.grad(lambda w: jnp.sum(jnp.sin(module.apply(w, TOKENS))))(w)

    (one, tied), (other, both) = outputs_and_slopes(TIED, w), outputs_and_slopes(untied, full)
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
    changes = []
    for score in range(7):
        norm, change = moved(w, score)
        assert norm <= 1 + 1e-5
        changes.append(largest(change))
    assert 0.5 < max(changes) <= 1


def test_tied_sharpness_scales_with_budget():
    """The tied module's sharpness equals the untied module's, for the longer step."""
    uneven = Tied(Unembed(7, 6, mass=3.0) @ (0.5 * Linear(6, 6)) @ Embed(6, 7), (0, 3))
    alpha, beta, gamma = uneven.module.sharpness
    stretch = uneven.budgets()[0] / (1 / 5 / 0.5)
    assert stretch > 1
    assert uneven.sharpness == pytest.approx((stretch**2 * alpha, stretch * beta, gamma))


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


# With the optimizers --------------------------------------------------------------------------
