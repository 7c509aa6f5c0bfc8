"""Check an implementation of a norm against the laws of `Norm`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from manifoldmuon.norms import Norm, PowerIterations
from manifoldmuon.testing._assertions import (
    SCALES,
    agree,
    at_most,
    check_all,
    check_value_object,
    inner_products,
    normal,
    require,
    same_tree_of_shapes,
    wide,
    with_nan,
)
from manifoldmuon.testing._checked_manifold import Values, jitted


class NormResults(NamedTuple):
    """All answers of a norm for a gradient and a weight."""

    dualize: Values
    dual: Values
    gap: Values
    size: Values
    bound: Values
    size_of_dualize: Values
    estimate: Values
    projected: Values


class CheckedNorm(NamedTuple):
    """A norm with three random arrays, and the limits of its laws."""

    norm: Norm
    ask: Callable[[Values, Values], NormResults]
    grad: np.ndarray
    weight: np.ndarray
    other: np.ndarray
    tolerance: float
    loss: float

    def inner(self, x, y) -> np.ndarray:
        return inner_products(x, y, self.norm.ndim)

    def times(self, factors, x) -> np.ndarray:
        """Multiply every weight by its own factor."""
        factors = np.asarray(factors)
        factors = factors.reshape(factors.shape + (1,) * self.norm.ndim)
        return np.asarray(factors * x, np.float32)


def check_norm(
    norm: Norm,
    shape: tuple[int, ...],
    key: PRNGKeyArray,
    tolerance: float = 2e-5,
    loss: float = 1e-4,
    thorough: bool = True,
) -> None:
    """Check every law of `Norm`, at random weights and gradients.

    Args:
      norm: norm to check.
      shape: shape of a weight; may have leading axes.
      key: seeds the random arrays.
      tolerance: for float32 results, relative to their size.
      loss: how far `<g, dualize(g)>` may be below the dual norm, relative to it. Raise it for a
        method that stops short of convergence.
      thorough: whether to run the slow checks too: without `jax.jit`, under `jax.vmap`, in
        bfloat16, and of estimates from another weight's vectors.

    Raises:
      AssertionError: laws are broken; a line for each has its number in `Norm`, its name and the
        size of the violation.

    Examples:
      >>> check_norm(mm.norms.Frobenius(), (5, 3), jax.random.key(0), thorough=False)
    """
    check_value_object(norm)
    ask, (grad, weight, other) = jitted(lambda g, w: _ask(norm, g, w)), normal(key, shape, 3)
    case = CheckedNorm(norm, ask, grad, weight, other, tolerance, loss)
    check_all((*NORM_LAWS, *(SLOW_NORM_LAWS if thorough else ())), "the docstring of `Norm`", case)


def _ask(norm: Norm, grad: Array, weight: Array) -> NormResults:
    dualize = norm.dualize(grad)
    _, vectors = norm.estimate(weight, norm.init_vectors(weight.shape), PowerIterations())
    defined = type(norm).project is not Norm.project
    return NormResults(
        dualize,
        norm.dual_norm(grad),
        norm.gap(grad, dualize),
        norm.norm(weight),
        norm.bound(weight),
        norm.norm(dualize),
        norm.estimate(weight, vectors, PowerIterations())[0],
        norm.project(weight) if defined else weight,
    )


def _check_norm_shapes(case: CheckedNorm) -> None:
    norm, grad, results = case.norm, case.grad, case.ask(case.grad, case.weight)
    axes = grad.shape[: grad.ndim - norm.ndim]
    for name in ("dual", "gap", "size", "bound", "estimate"):
        require(f"{name} has the leading axes' shape", getattr(results, name).shape == axes)
    for name in ("dualize", "projected"):
        require(f"{name} keeps the shape", getattr(results, name).shape == grad.shape)
    short = jax.ShapeDtypeStruct(grad.shape, jnp.bfloat16)
    results = jax.eval_shape(lambda g, w: _ask(norm, g, w), short, short)
    for name in ("dualize", "dual", "size", "projected"):
        dtype = getattr(results, name).dtype
        require(f"dtype in = dtype out ({name})", dtype == jnp.bfloat16, str(dtype))
    require("gap is float32 or wider", results.gap.dtype == jnp.float32)
    cold = jax.eval_shape(lambda: norm.init_vectors(grad.shape))
    _, warm = jax.eval_shape(lambda w, v: norm.estimate(w, v, PowerIterations()), short, cold)
    same_tree_of_shapes("estimate keeps the structure of its vectors", warm, cold)


def _check_norms(case: CheckedNorm) -> None:
    """Check that `norm` and `dual_norm` are norms, dual to each other."""
    ask, first = case.ask, case.ask(case.grad, case.weight)
    require("norms of random arrays are positive", bool(np.all(first.size > 0)))
    paired = np.abs(case.inner(case.grad, case.weight)) / (wide(first.dual) * first.size)
    at_most("<g, w> <= dual_norm(g) norm(w)", paired, 1, case.tolerance)
    for c in SCALES:
        scaled = ask(c * case.grad, c * case.weight)
        law = f"norm(c w) == c norm(w) at c = {c:g}"
        agree(law, scaled.size / c, first.size, case.tolerance)
        agree(f"dual_norm(c g) at c = {c:g}", scaled.dual / c, first.dual, case.tolerance)
    rest = ask(case.other, case.other)
    whole = ask(case.grad + case.other, case.weight + case.other)
    for name in ("size", "dual"):
        ratio = getattr(whole, name) / (getattr(first, name) + getattr(rest, name))
        at_most(f"the triangle inequality ({name})", ratio, 1, case.tolerance)


def _check_dualize(case: CheckedNorm) -> None:
    grad, tolerance = case.grad, case.tolerance
    first = case.ask(grad, case.weight)
    _check_attains(case, grad, "")
    for c in SCALES:
        scaled = case.ask(c * grad, case.weight).dualize
        agree(f"dualize(c g) == dualize(g) at c = {c:g}", scaled, first.dualize, tolerance)
    negative = case.ask(-grad, case.weight).dualize
    agree("dualize(-g) == -dualize(g)", negative, -first.dualize, tolerance)


def _check_shortest(case: CheckedNorm) -> None:
    """Check gradients without full rank, where many directions attain the dual norm."""
    _, block = _diagonal_blocks(case.grad, case.norm.ndim)
    _check_attains(case, block, ", without full rank")
    direction = case.ask(block, case.weight).dualize
    # Parts that the gradient does not determine follow the noise, and cancel in the mean.
    noise = np.float32(1e-4 * np.max(np.abs(block))) * case.other
    around = [wide(case.ask(block + sign * noise, case.weight).dualize) for sign in (1, -1)]
    length, shortest = (np.sqrt(case.inner(x, x)) for x in (direction, sum(around) / 2))
    law = "dualize(g) is the shortest direction that attains the dual norm"
    at_most(law, length / shortest, 1.1)


def _check_norm_gap(case: CheckedNorm) -> None:
    """Check the gap, also of directions far from the steepest."""
    both, block = _diagonal_blocks(case.grad, case.norm.ndim)
    gap = jitted(case.norm.gap)
    for grad in (case.grad, both):
        results = case.ask(grad, case.weight)
        at_most(f"gap <= {case.loss}", results.gap, case.loss)
        for name, direction in (
            ("dualize(g)", results.dualize),
            ("dualize(g) / 2", results.dualize / 2),
            ("dualize of one block of g", case.ask(block, case.weight).dualize),
        )[: 3 if grad is both else 2]:
            value = gap(grad, direction)
            at_most(f"gap >= 0 at {name}", 0, value)
            missed = 1 - case.inner(grad, direction) / wide(results.dual)
            law = f"gap bounds 1 - <g, a> / dual_norm(g) at {name}"
            at_most(law, missed, value, case.tolerance)
    for c in SCALES:
        first, scaled = (case.ask(x, case.weight).gap for x in (case.grad, c * case.grad))
        agree(f"gap(c g) == gap(g) at c = {c:g}", scaled, first, case.tolerance)


def _check_norm_zero(case: CheckedNorm) -> None:
    zero = np.zeros_like(case.grad)
    for name, value in zip(NormResults._fields, case.ask(zero, zero), strict=True):
        require(f"{name} of zero is zero", bool(np.all(value == 0)), str(value))


def _check_cheap_norms(case: CheckedNorm) -> None:
    for c in (1, *SCALES):
        results = case.ask(case.grad, c * case.weight)
        bound, estimate = (wide(x) / results.size for x in (results.bound, results.estimate))
        at_most(f"norm(w) <= bound(w) at c = {c:g}", 1, bound, case.tolerance)
        at_most(f"bound(w) <= 2 norm(w) at c = {c:g}", bound, 2)
        at_most(f"estimate(w) <= norm(w) at c = {c:g}", estimate, 1, case.tolerance)
        at_most(f"estimate(w) >= 0.8 norm(w) at c = {c:g}", 0.8, estimate)


def _check_projection(case: CheckedNorm) -> None:
    if type(case.norm).project is Norm.project:
        return
    tolerance = case.tolerance + 2 * case.loss  # a projection computes two matrix signs
    size = case.ask(case.grad, case.weight).size
    inside, outside = (case.times(c / size, case.weight) for c in (0.5, 3))
    kept = case.ask(case.grad, inside).projected
    agree("project keeps weights of norm below 1", kept, inside, tolerance)
    projected = case.ask(case.grad, outside).projected
    at_most("norm(project(w)) <= 1", case.ask(case.grad, projected).size, 1, tolerance)
    # Equality in <away, a> <= dual_norm(away) proves the point the nearest of the ball.
    away = outside - projected
    reached = case.inner(away, projected) / wide(case.ask(away, case.weight).dual)
    at_most("project(w) is the nearest weight of norm 1", 1, reached, tolerance)


def _check_norm_fast(case: CheckedNorm) -> None:
    if (norm := case.norm.for_training()) == case.norm:
        return
    results, fast = case.ask(case.grad, case.weight), jitted(lambda g, w: _ask(norm, g, w))
    result = fast(case.grad, case.weight)
    for name in ("size", "dual"):
        law = f"for_training() is the same norm ({name})"
        agree(law, getattr(result, name), getattr(results, name), case.tolerance)
    gained = case.inner(case.grad, result.dualize) / wide(results.dual)
    law = "for_training(): norm(dualize(g)) <= 1"
    at_most(law, case.ask(case.grad, result.dualize).size, 1, case.tolerance)
    law = "for_training(): gap bounds 1 - <g, a> / dual_norm(g)"
    at_most(law, 1 - gained, result.gap, case.tolerance)
    at_most("for_training(): <g, dualize(g)> >= dual_norm(g) / 2", 0.5, gained)


def _check_norm_copies(case: CheckedNorm) -> None:
    """Check that a stack agrees with a loop, even if a copy is NaN or zero."""
    ask, grad, weight, corrupted = case.ask, case.grad, case.weight, with_nan(case.grad)
    grads = np.stack([grad, corrupted, np.zeros_like(grad), 1e20 * case.other])
    weights = np.stack([weight, corrupted, weight, case.other])
    stacked = ask(grads, weights)
    for index in (0, 2, 3):
        alone = ask(grads[index], weights[index])
        for name, one, many in zip(NormResults._fields, alone, stacked, strict=True):
            # A gap is a small number with the rounding noise of the direction.
            size = 1.0 if name == "gap" else np.maximum(np.max(np.abs(one), initial=0), 1e-30)
            agree(f"stack = loop ({name})", many[index] / size, one / size, case.tolerance)
    for name, value in zip(NormResults._fields, stacked, strict=True):
        require(f"a NaN stays visible ({name})", bool(np.any(np.isnan(value[1]))))


def _check_norm_short_dtype(case: CheckedNorm) -> None:
    short = case.ask(case.grad.astype(jnp.bfloat16), case.weight.astype(jnp.bfloat16))
    rounded = (x.astype(jnp.bfloat16).astype(np.float32) for x in (case.grad, case.weight))
    exact = case.ask(*rounded)
    for name in NormResults._fields:
        if name == "gap":  # of the rounded direction
            continue
        x, y = (wide(getattr(results, name)) for results in (short, exact))
        largest = np.max(np.abs(y))
        agree(f"bf16: float32 arithmetic ({name})", x / largest, y / largest, 2.0**-8)


def _check_norm_vmap(case: CheckedNorm) -> None:
    stacked = jitted(jax.vmap(functools.partial(_ask, case.norm)))
    grads, weights = np.stack([case.grad, case.other]), np.stack([case.weight, case.grad])
    results = stacked(grads, weights)
    for index in range(2):
        alone = case.ask(grads[index], weights[index])
        for name, one, many in zip(NormResults._fields, alone, results, strict=True):
            agree(f"vmap = loop ({name})", many[index], one, case.tolerance)


def _check_other_vectors(case: CheckedNorm) -> None:
    """Check that an estimate is of its weight, from vectors of another weight, too."""
    norm, other = case.norm, case.times(1000.0, case.other)

    def estimate(weight, other):
        vectors = norm.init_vectors(weight.shape)
        _, vectors = norm.estimate(other, vectors, PowerIterations())
        return norm.estimate(weight, vectors, PowerIterations())[0]

    for weight, start in ((case.weight, other), (other, case.weight)):
        ratio = jitted(estimate)(weight, start) / case.ask(case.grad, weight).size
        at_most("estimate(w) <= norm(w), from other vectors", ratio, 1, case.tolerance)
        at_most("estimate(w) >= norm(w) / 100, from other vectors", 0.01, ratio)


def _check_norm_eager(case: CheckedNorm) -> None:
    compiled, eager = case.ask(case.grad, case.weight), case.norm.dualize(jnp.asarray(case.grad))
    agree("jit = eager (dualize)", compiled.dualize, eager, case.tolerance)


def _check_attains(case: CheckedNorm, grad: np.ndarray, where: str) -> None:
    results, tolerance = case.ask(grad, case.weight), case.tolerance + case.loss
    ones = np.ones(results.dual.shape)
    agree(f"norm(dualize(g)) == 1{where}", results.size_of_dualize, ones, tolerance)
    gained = case.inner(grad, results.dualize) / wide(results.dual)
    agree(f"<g, dualize(g)> == dual_norm(g){where}", gained, ones, tolerance)


def _diagonal_blocks(grad: np.ndarray, ndim: int) -> tuple[np.ndarray, np.ndarray]:
    """Return two diagonal blocks of every matrix, or halves of every vector; the first alone."""
    sides = [np.arange(n) < max(n // 2, 1) for n in grad.shape[grad.ndim - min(ndim, 2) :]]
    first = functools.reduce(np.multiply.outer, sides, np.array(True))
    second = functools.reduce(np.multiply.outer, [~side for side in sides], np.array(True))
    return np.where(first | second, grad, 0), np.where(first, grad, 0)


NORM_LAWS = (
    (1, _check_norm_shapes),
    (2, _check_norms),
    (3, _check_dualize),
    (3, _check_shortest),
    (4, _check_norm_gap),
    (5, _check_norm_zero),
    (6, _check_cheap_norms),
    (7, _check_projection),
    (8, _check_norm_fast),
    (9, _check_norm_copies),
)
SLOW_NORM_LAWS = (
    (1, _check_norm_short_dtype),
    (6, _check_other_vectors),
    (9, _check_norm_eager),
    (9, _check_norm_vmap),
)
