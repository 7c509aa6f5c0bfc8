"""Parts of transformations: Optax's placeholders, terminal ones, signs of updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from manifoldmuon._internal.compiling import compiler_options
from manifoldmuon._internal.matrices.arrays import upcast

Transformation = optax.GradientTransformationExtraArgs


class Terminal(Transformation):
    """A transformation that must come last: nothing may change its updates.

    An ordinary `optax.GradientTransformationExtraArgs`; its type lets `chain` detect the mistake.
    """


def kind_around(tx: optax.GradientTransformation) -> type[Transformation]:
    """Return the type of a transformation around `tx`: `Terminal` if `tx` must come last."""
    return Terminal if isinstance(tx, Terminal) else Transformation


def _placeholder_type() -> type:
    """Return Optax's private placeholder type for parameters."""
    seen = []

    def init(params):
        seen.append(type(params))
        return params

    optax.tree_utils.tree_map_params(init, lambda leaf: leaf, {})
    return seen[0]


_Placeholder = _placeholder_type()


def gradient_transformation(
    update: Callable[..., Any],
    init: Callable[[Any], Any] = lambda params: optax.EmptyState(),
    placeholder: Callable[[Any], Any] = lambda params: optax.EmptyState(),
    kind: type[Transformation] = Transformation,
) -> Transformation:
    """Return a transformation with an `init` that also accepts Optax's placeholder.

    `optax.tree_utils.tree_map_params` calls `init` with a placeholder instead of parameters, to
    learn which parts of a state have their shape. Dictionaries of numbers have no such part.

    `placeholder` returns the state for that call, with a scalar for each such dictionary.
    """

    def init_fn(params: Any) -> Any:
        return (placeholder if isinstance(params, _Placeholder) else init)(params)

    return kind(init_fn, update)


def as_transformations(
    value: Any, make: Callable[[Any], Any]
) -> list[optax.GradientTransformation]:
    """Return a list: the transformation itself, `make` of another value, or empty for None."""
    if value is None:
        return []
    return [value if isinstance(value, optax.GradientTransformation) else make(value)]


def check_ascends(name: str, base: optax.GradientTransformation) -> None:
    """Raise `ValueError` if a base optimizer descends: later transformations flip the sign."""
    if _probe(base) < 0:
        raise ValueError(
            f"{name}(base) must ascend, without its own learning rate; got an optimizer that"
            " descends. Write optax.scale_by_adam() for optax.adam(rate), optax.trace(0.9) for"
            " optax.sgd(rate, 0.9)"
        )


def check_descends(name: str, tx: optax.GradientTransformation) -> None:
    """Raise `ValueError` if an optimizer ascends: nothing flips the sign of its updates."""
    if _probe(tx) > 0:
        raise ValueError(
            f"{name} must be a complete optimizer with its learning rate; got a transformation that"
            " ascends. Write optax.adam(rate) for optax.scale_by_adam(), optax.sgd(rate, 0.9) for"
            " optax.trace(0.9)"
        )


def _probe(tx: optax.GradientTransformation) -> float:
    """Return the summed updates of three steps with the scalar gradient 1.

    A transformation that fails there gives 0: it may need other parameters, further arguments, or
    hyperparameters that are being traced.
    """

    def probe() -> Any:
        one, total = jnp.ones(()), jnp.zeros(())
        state = tx.init(one)
        for _ in range(3):  # a schedule may start at zero
            update, state = tx.update(one, state, one)
            total += jnp.asarray(update)
        return total

    try:
        # Inside `jax.jit`, too, a compiled program runs at once; `ensure_compile_time_eval` would
        # compile a program for every operation.
        with jax.disable_jit(False):
            return float(jax.jit(probe).lower().compile(compiler_options((), 1) or None)())
    except Exception:
        return 0.0


def require_arguments(name: str, **arguments: Any) -> None:
    """Raise `ValueError` if an extra argument of `update` is missing."""
    missing = [key for key, value in arguments.items() if value is None]
    if missing:
        call = "".join(f", {key}=..." for key in arguments if key != "params")
        raise ValueError(
            f"{name} needs {' and '.join(missing)}: call tx.update(grads, state, params{call})."
        )


def difference(target: jax.Array, point: jax.Array) -> jax.Array:
    """Return the update `u`, in the point's dtype, for which `point + u` rounds close to `target`.

    Rounding the target first makes the difference exact wherever target and point are within a
    factor of two (Sterbenz): `point + u` is then the number nearest to `target`.
    """
    nearest = target.astype(point.dtype)
    return (upcast(nearest) - upcast(point)).astype(point.dtype)
