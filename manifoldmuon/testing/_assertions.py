"""Assertions that name the law they check."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import PRNGKeyArray, PyTree

SCALES = (1e-30, 1e-10, 1e10, 1e30)


def wide(x) -> np.ndarray:
    """Return a float64 NumPy array, so that sums add no float32 rounding."""
    return np.asarray(x).astype(np.float64)


def numpy(tree: PyTree) -> PyTree:
    """Convert every array to NumPy, with the same dtype.

    The checks compute in NumPy: compiling a sum takes longer than the sum.
    """
    return jax.tree.map(np.asarray, tree)


def normal(key: PRNGKeyArray, shape: tuple[int, ...], count: int) -> list[np.ndarray]:
    """Return `count` independent standard normal arrays in float32."""
    generator = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    return [np.asarray(generator.normal(size=shape), np.float32) for _ in range(count)]


def with_nan(x: np.ndarray) -> np.ndarray:
    """Return a copy with a NaN in its first entry."""
    corrupted = x.copy()
    corrupted[(0,) * x.ndim] = np.nan
    return corrupted


def inner_products(x, y, ndim: int) -> np.ndarray:
    """Return `<x, y>` over the trailing `ndim` axes, in float64."""
    return np.asarray(np.sum(wide(x) * wide(y), axis=tuple(range(-ndim, 0))))


def agree(law: str, actual, expected, tolerance: float) -> None:
    """Raise unless every entry of `actual` is within `tolerance` of `expected`.

    The tolerance is relative to the largest magnitude of `expected` if that is above 1. A NaN
    never agrees.
    """
    actual, expected = wide(actual), wide(expected)
    require(law, actual.shape == expected.shape, f"shapes {actual.shape} and {expected.shape}")
    if actual.size == 0:
        return
    worst = np.max(np.abs(actual - expected)) / max(1.0, np.max(np.abs(expected)))
    require(law, bool(worst <= tolerance), f"off by {worst:.3g}, more than {tolerance:.3g}")


def at_most(law: str, actual, bound, tolerance: float = 0.0) -> None:
    """Raise unless `actual <= bound + tolerance` everywhere; a NaN raises."""
    actual, bound = np.asarray(actual, np.float64), np.asarray(bound, np.float64)
    excess = np.max(actual - bound, initial=-np.inf)
    require(law, bool(excess <= tolerance), f"above the bound by {excess:.3g}")


def check_all(laws: Sequence[tuple[int, Callable[..., None]]], where: str, *args: Any) -> None:
    """Raise an `AssertionError` with a line for every broken law, with its number in `where`."""
    broken = []
    for number, check in laws:
        try:
            check(*args)
        except AssertionError as error:
            broken.append(f"{number}. {error}")
        except Exception as error:  # raised by the implementation under test
            first, *_ = str(error).splitlines() or [""]
            broken.append(f"{number}. law broken: no error ({type(error).__name__}: {first})")
    if broken:
        raise AssertionError("\n".join([*broken, f"See the numbered laws in {where}."]))


def require(law: str, holds: bool, details: str = "") -> None:
    """Raise an `AssertionError` that names the law and the result, unless the law holds."""
    if not holds:
        raise AssertionError(f"law broken: {law}" + (f" ({details})" if details else ""))


def check_value_object(strategy: object) -> None:
    """Check for a hashable dataclass, equal to its copy, not callable, a single pytree leaf."""
    name = type(strategy).__name__
    require(f"{name} is a dataclass", dataclasses.is_dataclass(strategy))
    require(f"{name} is hashable", isinstance(strategy, Hashable))
    twin = dataclasses.replace(strategy)  # type: ignore[type-var]
    require(f"{name} equals its copy", twin == strategy and hash(twin) == hash(strategy))
    require(f"{name} is not callable", not callable(strategy))
    require(f"{name} is not one leaf of a pytree", jax.tree.leaves(strategy) == [strategy])


def same_tree_of_shapes(law: str, actual: PyTree, expected: PyTree) -> None:
    """Raise unless both trees have the same structure, shapes and dtypes."""
    shapes, wanted = (
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
        for tree in (actual, expected)
    )
    require(law, shapes == wanted, f"{shapes} instead of {wanted}")
