"""Check the arguments of optimizers and links when these are made, in one line each."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from manifoldmuon._internal.arguments import check_dtype, check_number, shown
from manifoldmuon.linalg import MsignMethod
from manifoldmuon.manifolds import LaidOut, Manifold
from manifoldmuon.norms import Combination, PowerIterations
from manifoldmuon.optim._geometry import (
    ByFunction,
    ByPath,
    check_entry,
    flatten_with_path,
    path_string,
)

Check = Callable[[str, Any], None]
_P = ParamSpec("_P")
_R = TypeVar("_R")


def checked(**own: Check) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Return a decorator that checks arguments by their names before a function is called.

    Args:
      **own: checks for arguments of this function, where they differ from those of `_CHECKS`.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        names = tuple(inspect.signature(function).parameters)
        checks = _CHECKS | own

        @functools.wraps(function)
        def make(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            for name, value in (dict(zip(names, args, strict=False)) | kwargs).items():
                if name in checks:
                    checks[name](f"{function.__name__}: {name}", value)
            return function(*args, **kwargs)

        return make

    return decorate


def number(within: str, *, none: bool = False, schedule: bool = False, link: bool = False) -> Check:
    """Return a check for numbers and scalar arrays in an interval; see `check_number`.

    The values of traced arrays, such as those of `optax.inject_hyperparams`, are not known.
    """
    kinds = {"a schedule": schedule, "a gradient transformation": link, "None": none}
    words = [kind for kind, allowed in kinds.items() if allowed]
    others = "".join(f", {word}" for word in words[:-1]) + "".join(f" or {w}" for w in words[-1:])

    def check(name: str, value: Any) -> None:
        is_schedule = schedule and callable(value) and not isinstance(value, type)
        is_link = link and isinstance(value, optax.GradientTransformation)
        if is_schedule or is_link or (none and value is None):
            return
        if isinstance(value, jax.Array | np.ndarray) and jnp.shape(value) == ():
            if isinstance(value, Tracer) and jnp.isdtype(value.dtype, _REAL):
                return
            value = value if isinstance(value, Tracer) else value.item()
        check_number(name, value, within=within, others=others)

    return check


_REAL = "real floating", "integral"


def one_of(*kinds: Any) -> Check:
    """Return a check for instances of these classes."""
    names = " or ".join(dict.fromkeys(kind.__name__ for kind in kinds))

    def check(name: str, value: Any) -> None:
        if not isinstance(value, kinds):
            hint = "; write it with parentheses" if callable(value) else ""
            raise TypeError(f"{name} must be a {names}; got {shown(value)}{hint}")

    return check


def _optional(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def _check_geometry(name: str, geometry: Any) -> None:
    if isinstance(geometry, ByFunction) or (callable(geometry) and not isinstance(geometry, type)):
        return
    entries = [(path_string(path), entry) for path, entry in flatten_with_path(geometry)[0]]
    if isinstance(geometry, ByPath):
        entries = [(str(pattern), entry) for pattern, entry in geometry.rules]
    if geometry is None or (entries and entries[0][0] == "" and not isinstance(geometry, _ENTRY)):
        hint = "; write it with parentheses" if callable(geometry) else ""
        raise TypeError(
            f"{name} must be a Manifold, a tree of them, by_path(...) or a function; got"
            f" {shown(geometry)}{hint}"
        )
    for path, entry in entries:
        check_entry(path, entry)


_ENTRY = Manifold, LaidOut


_CHECKS: dict[str, Check] = {
    "learning_rate": number("[0, inf)", schedule=True),
    "gain": number("[0, inf)", schedule=True),
    "momentum": number("[0, 1)", none=True),
    "neuron_decay": number("[0, 1)", none=True),
    "decay": number("[0, 1)"),
    "b1": number("[0, 1)"),
    "b2": number("[0, 1)"),
    "eps": number("[0, inf)"),
    "clip": number("(0, inf)", none=True, link=True),
    "weight_decay": number("[0, inf)", none=True, schedule=True, link=True),
    "threshold": number("(0, inf)"),
    "power": number("(0, inf)"),
    "first": number("(0, inf)"),
    "growth": number("[1, inf)"),
    "shrink": number("(0, 1)"),
    "share": number("(0, 1)"),
    "max_trials": functools.partial(check_number, within="[1, inf)", whole=True),
    "steps": functools.partial(check_number, within="[1, inf)", whole=True),
    "tolerance": number("[0, inf)", none=True),
    "geometry": _check_geometry,
    "sets": _check_geometry,
    "base": one_of(optax.GradientTransformation),
    "inner": one_of(optax.GradientTransformation),
    "tx": one_of(optax.GradientTransformation),
    "nesterov": one_of(bool, np.bool_),
    "certify": one_of(bool, np.bool_),
    "constrained": one_of(bool, np.bool_),
    "accumulator_dtype": _optional(check_dtype),
    "dtype": check_dtype,
    "combination": one_of(Combination),
    "iterations": one_of(PowerIterations),
    "method": _optional(MsignMethod.check),
}
