"""The laws of a norm, as a check for any implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from manifoldmuon.norms import Norm
from manifoldmuon.testing._assertions import (
    agree,
    at_most,
    check_value_object,
    inner_products,
    normal,
    numpy,
    require,
    spoil,
    wide,
)

_Ask = Callable[[np.ndarray, np.ndarray], "_Answers"]


class _Answers(NamedTuple):
    """Everything that a norm says about one gradient and one weight."""

    dualize: Array
    dual: Array
    gap: Array
    size: Array
    bound: Array
    size_of_dualize: Array


def check_norm(
    norm: Norm,
    shape: tuple[int, ...],
    key: PRNGKeyArray,
    tolerance: float = 2e-5,
    loss: float = 1e-4,
    thorough: bool = True,
) -> None:
    """Checks every law that `Norm` states, at random weights and gradients.

    Args:
      norm: what is to be checked.
      shape: of a weight, with leading axes if wanted.
      key: drives the random arrays.
      tolerance: for float32 results, relative to their size.
      loss: how far `<g, dualize(g)>` may be below the dual norm, relative to it. Raise it for a
        method that stops short of convergence.
      thorough: whether to run the slow checks too: without `jax.jit`, and in bfloat16.

    Raises:
      AssertionError: a law is broken; the message names it and the size of the violation.

    Examples:
      >>> check_norm(mm.norms.Frobenius(), (5, 3), jax.random.key(0), thorough=False)
    """
    check_value_object(norm)
    grad, weight, other = normal(key, shape, 3)
    jitted = jax.jit(lambda g, w: _ask(norm, g, w))
    ask: _Ask = lambda g, w: numpy(jitted(g, w))  # noqa: E731
    answers = ask(grad, weight)

    _check_values(norm, answers, grad, weight, tolerance, loss)
    _check_homogeneity(norm, ask, grad, weight, other, tolerance)
    _check_zero(ask, np.zeros(shape, np.float32))
    _check_copies(norm, ask, grad, weight, other, tolerance)
    _check_dtypes(norm, shape)
    if thorough:
        _check_short_dtype(ask, grad, weight)
        agree("jit = eager (dualize)", answers.dualize, norm.dualize(jnp.asarray(grad)), tolerance)


def _ask(norm: Norm, grad: Array, weight: Array) -> _Answers:
    dualize = norm.dualize(grad)
    return _Answers(
        dualize,
        norm.dual_norm(grad),
        norm.gap(grad, dualize),
        norm.norm(weight),
        norm.bound(weight),
        norm.norm(dualize),
    )


def _check_values(norm, answers: _Answers, grad, weight, tolerance, loss) -> None:
    axes = grad.shape[: grad.ndim - norm.ndim]
    for name in ("dual", "gap", "size"):
        require(f"{name} has the leading axes' shape", getattr(answers, name).shape == axes)
    require("dualize keeps the shape", answers.dualize.shape == grad.shape)
    require("norms of random arrays are positive", bool(np.all(answers.size > 0)))
    agree("norm(dualize(g)) == 1", answers.size_of_dualize, np.ones(axes), tolerance + loss)
    gained = inner_products(grad, answers.dualize, norm.ndim)
    dual = wide(answers.dual)
    agree("<g, dualize(g)> == dual_norm(g)", gained / dual, np.ones(axes), tolerance + loss)
    paired = np.abs(inner_products(grad, weight, norm.ndim))
    at_most("<g, w> <= dual_norm(g) norm(w)", paired / (dual * answers.size), 1, tolerance)
    at_most(
        "gap bounds 1 - <g, dualize(g)> / dual_norm(g)", 1 - gained / dual, answers.gap, tolerance
    )
    at_most("norm(w) <= bound(w)", answers.size / answers.bound, 1, tolerance)
    at_most("gap >= 0", 0, answers.gap)
    at_most(f"gap <= {loss}", answers.gap, loss)


def _check_homogeneity(norm, ask, grad, weight, other, tolerance) -> None:
    first = ask(grad, weight)
    for c in (1e-30, 1e-10, 1e10, 1e30):
        scaled = ask(c * grad, c * weight)
        agree(f"dualize(c g) == dualize(g) at c = {c:g}", scaled.dualize, first.dualize, tolerance)
        agree(f"gap(c g) == gap(g) at c = {c:g}", scaled.gap, first.gap, tolerance)
        agree(f"norm(c w) == c norm(w) at c = {c:g}", scaled.size / c, first.size, tolerance)
        agree(f"dual_norm(c g) at c = {c:g}", scaled.dual / c, first.dual, tolerance)
        at_most(f"norm(w) <= bound(w) at c = {c:g}", scaled.size / scaled.bound, 1, tolerance)
    agree("dualize(-g) == -dualize(g)", ask(-grad, weight).dualize, -first.dualize, tolerance)
    whole, rest = ask(grad + other, weight + other), ask(other, other)
    for name in ("size", "dual"):
        parts = getattr(first, name) + getattr(rest, name)
        ratio = getattr(whole, name) / parts
        at_most(f"the triangle inequality ({name})", ratio, 1, tolerance)


def _check_zero(ask, zero) -> None:
    for name, answer in zip(_Answers._fields, ask(zero, zero), strict=True):
        require(f"{name} of zero is zero", bool(np.all(answer == 0)), str(answer))


def _check_copies(norm, ask, grad, weight, other, tolerance) -> None:
    """A stack gives what a loop gives, also where one copy is NaN or zero."""
    spoilt = spoil(grad)
    grads = np.stack([grad, spoilt, np.zeros_like(grad), 1e20 * other])
    weights = np.stack([weight, spoilt, weight, other])
    stacked = ask(grads, weights)
    for index in (0, 2, 3):
        alone = ask(grads[index], weights[index])
        for name, one, many in zip(_Answers._fields, alone, stacked, strict=True):
            # A gap is a small number whose noise is that of the direction.
            size = 1.0 if name == "gap" else np.maximum(np.max(np.abs(one), initial=0), 1e-30)
            agree(f"stack = loop ({name})", many[index] / size, one / size, tolerance)
    for name, answer in zip(_Answers._fields, stacked, strict=True):
        require(f"a NaN stays visible ({name})", bool(np.any(np.isnan(answer[1]))))


def _check_dtypes(norm: Norm, shape: tuple[int, ...]) -> None:
    short = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    answers = jax.eval_shape(lambda g, w: _ask(norm, g, w), short, short)
    for name in ("dualize", "dual", "size"):
        dtype = getattr(answers, name).dtype
        require(f"dtype in = dtype out ({name})", dtype == jnp.bfloat16, str(dtype))
    require("gap is float32 or wider", answers.gap.dtype == jnp.float32)


def _check_short_dtype(ask: _Ask, grad: np.ndarray, weight: np.ndarray) -> None:
    short = ask(grad.astype(jnp.bfloat16), weight.astype(jnp.bfloat16))
    rounded = grad.astype(jnp.bfloat16).astype(np.float32)
    exact = ask(rounded, weight).dualize
    largest = np.max(np.abs(exact))
    agree("bf16: float32 arithmetic", wide(short.dualize) / largest, exact / largest, 2.0**-8)
