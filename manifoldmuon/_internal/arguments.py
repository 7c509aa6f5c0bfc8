"""Checks of arguments, and of the fields of strategies and manifolds."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np


def check_number(
    name: str,
    value: Any,
    least: float = -math.inf,
    *,
    within: str = "(-inf, inf)",
    whole: bool = False,
    others: str = "",
) -> None:
    """Raise `ValueError`, naming the argument, unless `value` is a finite number in a range.

    Args:
      name: of the argument, for the message.
      value: what was given. Python and NumPy numbers pass; a bool is not a number.
      least: the smallest value allowed.
      within: the interval of the values allowed, such as `"[0, 1)"`.
      whole: require an integer. A float such as 2.0 is refused.
      others: what else the argument may be, for the message: `" or None"`.
    """
    low, high = map(float, within[1:-1].split(","))
    kinds = (int, np.integer) if whole else (int, float, np.integer, np.floating)
    real = isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)
    above = real and value >= least and (value > low or (within[0] == "[" and value == low))
    if not (above and (value < high or (within[-1] == "]" and value == high))):
        kind = "whole" if whole else "finite"
        limit = f" >= {least:g}" if least > -math.inf else ""
        limit += f" in {within}" if within != "(-inf, inf)" else ""
        raise ValueError(f"{name} must be a {kind} number{limit}{others}; got {shown(value)}")


def check_fields(value: Any, **ranges: str) -> None:
    """Raise `ValueError` unless fields of a dataclass hold numbers in their ranges, and flags.

    A field annotated as `int` must hold an integer, one annotated as `bool` a bool; one that may
    be None may hold None.

    Args:
      value: an instance of a dataclass.
      **ranges: by field name, the interval of the numbers allowed; see `check_number`.
    """
    for field in (field for field in dataclasses.fields(value) if field.init):
        held, kind = getattr(value, field.name), str(field.type).removesuffix(" | None")
        name = f"{type(value).__name__}.{field.name}"
        if held is None and kind != field.type:
            continue
        if field.name in ranges:
            check_number(name, held, within=ranges[field.name], whole=kind.split()[0] == "int")
        elif kind == "bool" and not isinstance(held, bool):
            raise ValueError(f"{name} must be True or False; got {shown(held)}")


def check_kind(holder: Any, field: str, *kinds: type) -> None:
    """Raise `TypeError` unless a field of a value is an instance of one of these classes."""
    if not isinstance(value := getattr(holder, field), kinds):
        raise TypeError(_wrong_kind(holder, field, kinds, value))


def check_retraction(manifold: Any, points: str) -> None:
    """Raise `TypeError` unless the field `retraction` holds a retraction of such points."""
    held = manifold.retraction
    if isinstance(held, type) or points not in getattr(held, "points", ()):
        hint = "; write an instance, with parentheses" if callable(held) else ""
        name = f"{type(manifold).__name__}.retraction"
        raise TypeError(f"{name} must be a Retraction of {points}; got {shown(held)}{hint}")


def check_step_norm(manifold: Any, *kinds: type) -> None:
    """Raise `ValueError` for a norm of steps of another class, or for another number of axes."""
    if not isinstance(norm := manifold.norm, kinds):
        raise ValueError(_wrong_kind(manifold, "step_norm", kinds, norm))
    if norm.ndim != manifold.ndim:
        name, ndim = type(manifold).__name__, manifold.ndim
        raise ValueError(f"{name}.step_norm must be for {ndim} axes; got {shown(norm)}")


def check_axes(manifold: Any, shape: tuple[int, ...]) -> None:
    """Raise `ValueError` for a shape that has too few axes for one point of a manifold."""
    if len(shape) < manifold.ndim:
        raise ValueError(
            f"{type(manifold).__name__} takes the trailing {manifold.ndim} axes of an array as one "
            f"point, but the shape {tuple(shape)} has {len(shape)}; use a manifold for fewer axes, "
            f"such as Euclidean(Frobenius(ndim={len(shape)}))"
        )


def check_dtype(name: str, dtype: Any) -> None:
    """Raise `TypeError`, naming the argument, unless `dtype` is a floating dtype."""
    try:
        floating = dtype is not None and jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        floating = False
    if not floating:
        raise TypeError(f"{name} must be a floating dtype such as float32; got {shown(dtype)}")


def shown(value: Any) -> str:
    """Return the `repr` of a value on one short line, for error messages."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 120 else f"{text[:80]} ... {text[-30:]}"


def _wrong_kind(holder: object, field: str, kinds: tuple[type, ...], value: object) -> str:
    names = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
    hint = "; write an instance, with parentheses" if callable(value) else ""
    return f"{type(holder).__name__}.{field} must be {names}; got {shown(value)}{hint}"
