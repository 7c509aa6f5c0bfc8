"""Checks of arguments, and of the fields of strategies and manifolds."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, cast, get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

Check = Callable[[str, Any], None]
_F = TypeVar("_F", bound=Callable[..., Any])


def check_number(
    name: str, value: Any, *, within: str = "(-inf, inf)", whole: bool = False, others: str = ""
) -> None:
    """Raise `ValueError`, naming the argument, unless `value` is a finite number in a range.

    Python and NumPy numbers pass; a bool is not a number. If `whole`, a float such as 2.0 is
    refused. `others` names the allowed alternatives, for the message: `" or None"`.
    """
    low, high = map(float, within[1:-1].split(","))
    kinds = (int, np.integer) if whole else (int, float, np.integer, np.floating)
    real = isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)
    above = real and (value > low or (within[0] == "[" and value == low))
    if not (above and (value < high or (within[-1] == "]" and value == high))):
        kind = "whole" if whole else "finite"
        limit = f" in {within}" if within != "(-inf, inf)" else ""
        # Under `optax.inject_hyperparams` numbers become arrays, unless `static_args` names them.
        is_scalar = isinstance(value, jax.Array) and value.ndim == 0
        hint = "; it is static: give a Python number" if is_scalar else ""
        raise ValueError(f"{name} must be a {kind} number{limit}{others}; got {shown(value)}{hint}")


def check_fields(value: Any, **ranges: str) -> None:
    """Raise `ValueError` unless a dataclass holds numbers in their ranges, and bools in its flags.

    `ranges` has the intervals of `check_number` by field. There, fields annotated as `int` must
    hold integers. Fields annotated with `| None` may hold None.
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
    """Raise `TypeError` unless a field of a value is an instance of a given class."""
    one_of(*kinds)(f"{type(holder).__name__}.{field}", getattr(holder, field))


def check_retraction(manifold: Any, points: str) -> None:
    """Raise `TypeError` unless the field `retraction` holds a retraction of these points."""
    held = manifold.retraction
    if isinstance(held, type) or points not in getattr(held, "points", ()):
        hint = "; write an instance, with parentheses" if callable(held) else ""
        name = f"{type(manifold).__name__}.retraction"
        raise TypeError(f"{name} must be a Retraction of {points}; got {shown(held)}{hint}")


def check_step_norm(manifold: Any, *kinds: type) -> None:
    """Raise `ValueError` if the norm of steps has another class or another number of axes."""
    try:
        one_of(*kinds)(f"{type(manifold).__name__}.step_norm", norm := manifold.norm)
    except TypeError as error:
        raise ValueError(error) from None
    if norm.ndim != manifold.ndim:
        name, ndim = type(manifold).__name__, manifold.ndim
        raise ValueError(f"{name}.step_norm must be for {ndim} axes; got {shown(norm)}")


def check_axes(manifold: Any, shape: tuple[int, ...]) -> None:
    """Raise `ValueError` if a shape has too few axes for a point of a manifold."""
    if len(shape) < manifold.ndim:
        raise ValueError(
            f"{type(manifold).__name__} needs at least {manifold.ndim} axes; got the shape "
            f"{tuple(shape)}. Use a manifold for fewer axes, such as "
            f"Euclidean(Frobenius(ndim={len(shape)}))"
        )


def check_dtype(name: str, dtype: Any) -> None:
    """Raise `TypeError`, naming the argument, unless `dtype` is a floating dtype."""
    try:
        floating = dtype is not None and jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        floating = False
    if not floating:
        raise TypeError(f"{name} must be a floating dtype such as float32; got {shown(dtype)}")


def _check_state_dtype(name: str, dtype: Any) -> None:
    """Raise `TypeError` unless a state can have this dtype."""
    check_dtype(name, dtype)
    if jnp.finfo(dtype).bits < 16:
        raise TypeError(f"{name} must be bfloat16 or wider; got {shown(dtype)}")


def finite_array(name: str, value: Any) -> np.ndarray:
    """Return a float64 array; raise `ValueError` unless its entries are real and finite."""
    array = np.asarray(value)
    if not (jnp.isdtype(array.dtype, _REAL) and np.isfinite(array.astype(np.float64)).all()):
        raise ValueError(f"{name} must be real and finite; got {array.dtype} {array.shape}")
    return array.astype(np.float64)


def shown(value: Any) -> str:
    """Return the `repr` of a value on a single short line, for error messages."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 120 else f"{text[:80]} ... {text[-30:]}"


def checked(function: _F) -> _F:
    """Check the arguments of a function by its annotations, before each call.

    `name: Annotated[kind, check]` is checked by `check("function: name", value)`. Flags, dtypes and
    Optax transformations are checked by their own annotations. With `| None` behind it, None
    passes. Every `optax.MultiSteps` is replaced by its transformation.
    """
    named = inspect.signature(function).parameters.values()
    names = tuple([x.name for x in named if x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)])

    @functools.cache  # types are looked up at the first call, when all are defined
    def checks() -> dict[str, Check]:
        hints = get_type_hints(function, include_extras=True)
        return {name: _check_of(hints[name]) for name in names}

    @functools.wraps(function)
    def make(*args: Any, **kwargs: Any) -> Any:
        args = tuple([as_transformation(value) for value in args])
        kwargs = {name: as_transformation(value) for name, value in kwargs.items()}
        for name, value in (dict(zip(names, args, strict=False)) | kwargs).items():
            if name in names:
                checks()[name](f"{function.__name__}: {name}", value)
        return function(*args, **kwargs)

    return cast(_F, make)


def _check_of(hint: Any) -> Check:
    parts = (hint, *get_args(hint))
    found = [check for part in parts for check in getattr(part, "__metadata__", ())]
    kinds: dict[Any, Check] = {
        bool: one_of(bool, np.bool_),
        DTypeLike: _check_state_dtype,
        optax.GradientTransformation: one_of(optax.GradientTransformation),
    }
    found += [check for kind, check in kinds.items() if hint in (kind, kind | None)]
    optional = type(None) in parts

    def check(name: str, value: Any) -> None:
        for each in found if value is not None or not optional else ():
            each(name, value)

    return check


def as_transformation(value: Any) -> Any:
    """Return the transformation of an `optax.MultiSteps`, and any other value unchanged.

    `MultiSteps.gradient_transformation` drops extra arguments of `update`.
    """
    if isinstance(value, optax.MultiSteps):
        init, update = value.init, value.update
        return optax.GradientTransformationExtraArgs(init, update)  # type: ignore[arg-type]
    return value


def number(
    within: str, *, none: bool = False, schedule: bool = False, transformation: bool = False
) -> Check:
    """Return a check for numbers and scalar arrays in an interval; see `check_number`.

    Traced real scalars, as from `optax.inject_hyperparams`, pass: their values are unknown.
    """
    kinds = {"a schedule": schedule, "a gradient transformation": transformation, "None": none}
    words = [kind for kind, allowed in kinds.items() if allowed]
    others = "".join(f", {word}" for word in words[:-1]) + "".join(f" or {w}" for w in words[-1:])

    def check(name: str, value: Any) -> None:
        is_transformation = transformation and isinstance(value, optax.GradientTransformation)
        if (
            is_transformation
            or (none and value is None)
            or (schedule and _is_schedule(name, value))
        ):
            return
        if isinstance(value, jax.Array | np.ndarray) and jnp.shape(value) == ():
            if isinstance(value, Tracer) and jnp.isdtype(value.dtype, _REAL):
                return
            value = value if isinstance(value, Tracer) else value.item()
        check_number(name, value, within=within, others=others)

    return check


def whole(within: str) -> Check:
    """Return a check for integers in an interval."""
    return functools.partial(check_number, within=within, whole=True)


_REAL = "real floating", "integral"


def _is_schedule(name: str, value: Any) -> bool:
    """Return whether a value is a function that returns a number for a traced count, or raises.

    Raise `ValueError` if it returns an array that is not a scalar.
    """
    if not callable(value) or isinstance(value, type):
        return False
    results = []
    try:
        jax.eval_shape(lambda n: results.append(value(n)), jax.ShapeDtypeStruct((), jnp.int32))
    except Exception:  # a schedule may need a concrete count
        return True
    if not all(isinstance(x, int | float | np.number | jax.Array | np.ndarray) for x in results):
        return False
    if shapes := [jnp.shape(x) for x in results if jnp.ndim(x)]:
        raise ValueError(f"{name} must return a single number; got an array of shape {shapes[0]}")
    return True


def one_of(*kinds: Any) -> Check:
    """Return a check for instances of these classes."""
    names = " or ".join(dict.fromkeys("None" if k is type(None) else k.__name__ for k in kinds))

    def check(name: str, value: Any) -> None:
        if not isinstance(value, kinds):
            hint = "; write an instance, with parentheses" if callable(value) else ""
            raise TypeError(f"{name} must be a {names}; got {shown(value)}{hint}")

    return check


# Types of arguments with their checks; see `checked`.
Rate = Annotated[optax.ScalarOrSchedule, number("[0, inf)", schedule=True)]
WeightDecay = Annotated[optax.ScalarOrSchedule | None, number("[0, inf)", none=True, schedule=True)]
Momentum = Annotated[ArrayLike | None, number("[0, 1)", none=True)]
Decay = Annotated[ArrayLike, number("[0, 1)")]
Epsilon = Annotated[ArrayLike, number("[0, inf)")]
ClipNorm = Annotated[
    ArrayLike | optax.GradientTransformation | None,
    number("(0, inf)", none=True, transformation=True),
]
