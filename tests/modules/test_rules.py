"""The rules of the modular norm: mass, sensitivity, norm, duality map, sharpness."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from manifoldmuon import modules, optim
from tests.compiled import ask
from tests.modules import measure, paper

A = modules.Linear(3, 5)
B = modules.Linear(4, 3, mass=2.0)
C = 0.5 * modules.Linear(4, 4, mass=0.5)
D = -3.0 * modules.Linear(4, 4, mass=4.0)
FROZEN = modules.Linear(3, 5, mass=0.0)
Q, K, V = modules.Linear(4, 4), modules.Linear(4, 4, mass=3.0), modules.Linear(4, 4)
ATTENTION = modules.FunctionalAttention() @ (Q, K, V)
RELU = modules.ReLU(modules.ReLU.BALANCED)


def weights(module: modules.Module, seed: int = 0) -> Any:
    return measure.random_like(measure.shapes_of(module), seed)


# module, mass, sensitivity, budgets in the order of the leaves
ROWS = {
    "atom": (A, 1.0, 1.0, [1.0]),
    "composition": (B @ A, 3.0, 1.0, [1 / 3, 2 / 3]),
    "composition over a sensitivity": (B @ RELU @ A, 3.0, 0.5**0.5, [2**0.5 / 3, 2 / 3]),
    "composition of three": (D @ C @ B, 6.5, 1.5, [2 / 6.5 / 1.5, 0.5 / 6.5 / 1.5, 4 / 6.5 / 3]),
    "concatenation": ((A, FROZEN) @ modules.Identity(), 1.0, 2.0, [1.0, 0.0]),
    "concatenation of three": ((Q, K, V) @ modules.Abs(), 5.0, 3.0, [0.2, 0.6, 0.2]),
    "sum": (C + D, 4.5, 3.5, [0.5 / 4.5 / 0.5, 4 / 4.5 / 3]),
    "difference": (C - D, 4.5, 3.5, [0.5 / 4.5 / 0.5, 4 / 4.5 / 3]),
    "scalar": (2 * A, 1.0, 2.0, [0.5]),
    "quotient": (A / 4, 1.0, 0.25, [4.0]),
    "negative scalar": (-2 * A, 1.0, 2.0, [0.5]),
    "negation": (-A, 1.0, 1.0, [1.0]),
    "zero scalar": (0 * A, 1.0, 0.0, [0.0]),
    "zero scalar in a sum": (0 * C + D, 4.5, 3.0, [0.0, 4 / 4.5 / 3]),
    "power": ((2 * Q) ** 3, 3.0, 8.0, [[1 / 3 / 8, 1 / 3 / 4, 1 / 3 / 2]]),
    "power of sensitivity one": (Q**3, 3.0, 1.0, [1 / 3]),
    "power of a power": (((2 * Q) ** 2) ** 2, 4.0, 16.0, [[[1 / 64, 1 / 32], [1 / 16, 1 / 8]]]),
    "power zero": (Q**0, 0.0, 1.0, []),
    "zero mass": (B @ FROZEN, 2.0, 1.0, [0.0, 1.0]),
    "zero mass everywhere": ((B @ A).tare(0.0), 0.0, 1.0, [0.0, 0.0]),
    "tare absolute": ((B @ A).tare(absolute=6.0), 6.0, 1.0, [1 / 3, 2 / 3]),
    "tare by default": (Q @ (B @ A).tare(), 2.0, 1.0, [1 / 6, 1 / 3, 1 / 2]),
    "tare in a stack": ((Q**3).tare() @ B, 3.0, 1.0, [2 / 3, 1 / 9]),
    "attention": (ATTENTION / 3, 5.0, 1.0, [0.6, 1.8, 0.6]),
    "residual": (modules.residual(Q, 4), 4.0, 1.0, [1.0]),
    "bond": (modules.Abs(), 0.0, 1.0, []),
}


@pytest.mark.parametrize("name", ROWS)
def test_mass_sensitivity_and_budgets_match_table(name):
    module, mass, sensitivity, budgets = ROWS[name]
    assert module.mass == pytest.approx(mass, rel=1e-12)
    assert module.sensitivity == pytest.approx(sensitivity, rel=1e-12)
    for one, other in zip(jax.tree.leaves(module.budgets()), budgets, strict=True):
        np.testing.assert_allclose(np.squeeze(one), other, rtol=1e-12)
    assert sum(jax.tree.leaves(module.masses())) == pytest.approx(mass)


SUM = A + 2 * (A - 3 * FROZEN)
# Few different shapes: the optimizer stacks equal shapes, which saves compilation.
NETWORKS = {
    "MLP": modules.mlp(4, 4, 4, 4, RELU),
    "ResMLP": modules.res_mlp(4, 4, 4, 2, mass=2.0),
    "sums of sums": B @ SUM @ modules.residual(D + C @ C, 3) @ modules.Linear(5, 4) @ C,
    "GPT with a head of rows": modules.Unembed(5, 4, mass=0.5) @ modules.gpt(4, 4, 2, 2, context=5),
}
MODULES = {name: row[0] for name, row in ROWS.items()} | NETWORKS


class AllModules:
    """All rows and networks as a single architecture; the optimizer treats them separately."""

    def geometry(self) -> Any:
        return {name: module.geometry() for name, module in MODULES.items()}

    def budgets(self) -> Any:
        return {name: module.budgets() for name, module in MODULES.items()}


# Each test compiles a single program for all rows, which saves most of the time.


@pytest.mark.slow
def test_norms_match_recursion():
    ws = {name: weights(module) for name, module in MODULES.items()}
    found = jax.jit(lambda ws: {name: MODULES[name].norm(w) for name, w in ws.items()})(ws)
    expected = {name: paper.norm(module, ws[name]) for name, module in MODULES.items()}
    assert {name: float(norm) for name, norm in found.items()} == pytest.approx(expected, rel=2e-6)


@pytest.mark.slow
def test_steps_match_recursion():
    """Top-down budgets agree with bottom-up duality maps."""
    grads = {name: weights(module) for name, module in MODULES.items()}
    tx, still = optim.modular(1.0, AllModules(), momentum=None), []
    updates = ask(lambda g: tx.update(g, tx.init(g), g)[0], grads)
    for name, module in MODULES.items():
        step = jax.tree.map(np.negative, updates[name])
        measure.assert_steps_agree(step, paper.dualize(module, grads[name]), name)
        if any(np.any(leaf) for leaf in jax.tree.leaves(step)):
            assert paper.norm(module, step) == pytest.approx(1, rel=1e-4), name
        else:
            still.append(name)
    assert still == ["zero scalar", "power zero", "zero mass everywhere", "bond"]


@pytest.mark.slow
def test_frozen_leaf_neither_moves_nor_counts():
    module = ROWS["zero mass"][0]
    w, norm = weights(module), jax.jit(module.norm)
    for make in (measure.steepest_step, measure.normalized):
        assert not np.any(ask(lambda w: make(module, w, w), w)[0])  # noqa: B023
    assert norm((1e3 * w[0], w[1])) == norm(w)


TIED = modules.Tied(Q @ (2 * Q) ** 2 @ modules.gpt(4, 4, 2, 2), (2, 4))


@pytest.mark.parametrize("name", [*MODULES, "tied"])
def test_weights_tree_matches_init(name):
    module = TIED if name == "tied" else MODULES[name]
    shapes, specs = measure.shapes_of(module), module.weights()
    structure = jax.tree.structure(shapes)
    for spec, shape in zip(*map(jax.tree.leaves, (specs, shapes)), strict=True):
        assert isinstance(spec, modules.WeightSpec)
        assert shape.shape[: len(shape.shape) - spec.ndim] == spec.budget.shape
    sizes = module.map_weights(lambda spec, shape: shape.size * spec.mass, shapes)
    trees = specs, sizes, module.geometry(), module.budgets(), module.masses()
    assert all(jax.tree.structure(tree) == structure for tree in trees)
    with pytest.raises(ValueError, match="expected a tree of the structure that init returns"):
        module.map_weights(lambda spec, shape: shape, (shapes, shapes))


# Sharpness ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class DeclaredLinear(modules.Linear):
    """An atom with arbitrary sensitivity and sharpness, to exercise the rules."""

    mu: float = 1.0
    sharp: modules.Sharpness = modules.Sharpness(0.0, 0.0, 0.0)

    @property
    def sensitivity(self) -> float:
        return self.mu

    @property
    def sharpness(self) -> modules.Sharpness:
        return self.sharp


X = DeclaredLinear(4, 4, mass=2.0, mu=0.7, sharp=modules.Sharpness(1.1, 0.9, 1.3))
Y = DeclaredLinear(4, 4, mass=0.5, mu=1.7, sharp=modules.Sharpness(0.3, 1.2, 0.4))
STILL = modules.Linear(4, 4, mass=0.0)
Z = DeclaredLinear(4, 4, mass=3.0, mu=0.4, sharp=modules.Sharpness(2.0, 0.1, 0.8))


def test_sharpness_of_compositions_tuples_and_multiples():
    p1, p2 = 0.8, 0.2
    alpha = p1**2 * 1.1 / 1.7 + p2**2 * 0.3 + 2 * p1 * p2 / 1.7 * 1.2 + p1**2 / 1.7**2 * 0.4
    beta = p1 * 0.9 + 0.7 * (p2 * 1.2 + p1 / 1.7 * 0.4)
    gamma = 1.7 * 1.3 + 0.7**2 * 0.4
    assert (Y @ X).sharpness == pytest.approx((alpha, beta, gamma))
    alpha, beta = p1**2 * 1.1 + p2**2 * 0.3, p1 * 0.9 + p2 * 1.2
    assert modules.Concatenate((X, Y)).sharpness == pytest.approx((alpha, beta, 1.3 + 0.4))
    assert (0 * X).sharpness == (0, 0, 0)


def attributes(module: modules.Module):
    budgets = [np.ravel(b) for b in jax.tree.leaves(module.budgets())]
    return [module.mass, module.sensitivity, *module.sharpness, *np.concatenate(budgets)]


def compose(*parts: modules.Module) -> modules.Module:
    """Compose without flattening, as `@` would."""
    return modules.Compose(parts)


def concatenate(*parts: modules.Module) -> modules.Module:
    return modules.Concatenate(parts)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (compose(X, compose(Y, Z)), compose(compose(X, Y), Z)),
        (compose(X, compose(modules.Abs(), Z)), compose(compose(X, modules.Abs()), Z)),
        (compose(X, compose(STILL, Z)), compose(X, STILL, Z)),
        (concatenate(X, concatenate(Y, Z)), concatenate(concatenate(X, Y), Z)),
        (concatenate(X, concatenate(Y, Z)), concatenate(X, Y, Z)),
        ((X + Y) + Z, X + (Y + Z)),
        (modules.Stack(Y, 3), compose(Y, modules.Stack(Y, 2))),
        (modules.Stack(modules.Stack(Y, 2), 2), modules.Stack(Y, 4)),
    ],
)
def test_attributes_are_associative(one, other):
    # Copies of a stack are in the order of application, as in a composition.
    assert attributes(one) == pytest.approx(attributes(other), rel=1e-12)


def test_compositions_flatten_and_drop_identity():
    assert (A @ modules.Abs()) @ modules.Linear(5, 2) == A @ (modules.Abs() @ modules.Linear(5, 2))
    assert modules.Identity() @ A == A == A @ modules.Identity()
    assert modules.Identity() @ modules.Identity() == modules.Identity()
    assert hash(B @ A) == hash(B @ A)


@pytest.mark.parametrize("blocks", [1, 2, 7, 100])
def test_residual_sharpness_stays_below_limit(blocks):
    """Proposition 4: the limit is (alpha + beta + gamma/3, beta + gamma/2, gamma), from below."""
    block = DeclaredLinear(4, 4, sharp=modules.Sharpness(1.1, 0.9, 1.3))
    limit = np.array([1.1 + 0.9 + 1.3 / 3, 0.9 + 1.3 / 2, 1.3])
    net = modules.residual(block, blocks)
    assert net.sensitivity == pytest.approx(1)
    assert np.all(np.array(net.sharpness) <= limit * (1 + 1e-12))
    if blocks == 100:
        np.testing.assert_allclose(net.sharpness, limit, rtol=0.02)
    if blocks == 1:
        assert net.sharpness == pytest.approx(block.sharpness)


# Errors ---------------------------------------------------------------------------------------


def test_invalid_modules_raise():
    with pytest.raises(ValueError, match=r"no atom's weight at \(1,\)"):
        modules.Tied(Q @ modules.Abs() @ Q, (0, 1))
    with pytest.raises(ValueError, match="consists of Param and bonds"):
        modules.ExternalModule(A @ modules.Param("a", A.manifold))


def test_module_prints_as_tree():
    text = str((2 * Q) ** 3 @ modules.ReLU(sensitivity=1.0) @ FROZEN)
    assert text.startswith("module  ")
    for part in ("Stack of 3", "100.0%", "0.04167 … 0.1667", "frozen"):
        assert part in text
    assert len(text.splitlines()) == 8  # the header, and seven modules


def test_numpy_scalars_multiply_modules():
    assert np.float64(2) * A == 2.0 * A
    assert modules.Mul(2.0) @ A == np.int64(2) * A
    assert modules.Add() @ (A, A) == A + A
    assert modules.RMSDivide() @ A != A
