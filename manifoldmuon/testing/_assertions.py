"""Comparisons that name the law they check."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import PRNGKeyArray, PyTree


def wide(x) -> np.ndarray:
    """An array in float64 NumPy, where sums add no rounding of their own."""
    return np.asarray(x).astype(np.float64)


def numpy(tree: PyTree) -> PyTree:
    """Every array as a NumPy array of the same dtype.

    The checks compute with these: what JAX would compile for one sum takes longer than the sum.
    """
    return jax.tree.map(np.asarray, tree)


def normal(key: PRNGKeyArray, shape: tuple[int, ...], count: int) -> list[np.ndarray]:
    """Independent standard normal arrays in float32."""
    generator = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    return [np.asarray(generator.normal(size=shape), np.float32) for _ in range(count)]


def spoil(x: np.ndarray) -> np.ndarray:
    """A copy with a NaN in its first entry."""
    spoilt = x.copy()
    spoilt[(0,) * x.ndim] = np.nan
    return spoilt


def inner_products(x, y, ndim: int) -> np.ndarray:
    """`<x, y>` over the trailing `ndim` axes, in float64."""
    return np.asarray(np.sum(wide(x) * wide(y), axis=tuple(range(-ndim, 0))))


def agree(law: str, actual, expected, tolerance: float) -> None:
    """Raises unless every entry of `actual` is within `tolerance` of `expected`.

    Relative to the largest magnitude of `expected` where that is above 1. A NaN agrees with
    nothing.
    """
    actual, expected = wide(actual), wide(expected)
    require(law, actual.shape == expected.shape, f"shapes {actual.shape} and {expected.shape}")
    if actual.size == 0:
        return
    worst = np.max(np.abs(actual - expected)) / max(1.0, np.max(np.abs(expected)))
    require(law, bool(worst <= tolerance), f"off by {worst:.3g}, more than {tolerance:.3g}")


def at_most(law: str, actual, bound, tolerance: float = 0.0) -> None:
    """Raises unless `actual <= bound + tolerance` everywhere. A NaN is not below anything."""
    actual, bound = np.asarray(actual, np.float64), np.asarray(bound, np.float64)
    excess = np.max(actual - bound, initial=-np.inf)
    require(law, bool(excess <= tolerance), f"above the bound by {excess:.3g}")


def check_all(laws: Sequence[tuple[int, Callable[..., None]]], where: str, *args: Any) -> None:
    """Raises one `AssertionError` with a line for every law that is broken, by its number.

    Args:
      laws: the number of each law and what checks it.
      where: the page or docstring that lists them.
      *args: of the checks.
    """
    broken = []
    for number, check in laws:
        try:
            check(*args)
        except AssertionError as error:
            broken.append(f"{number}. {error}")
        except Exception as error:  # of the implementation under test
            first, *_ = str(error).splitlines() or [""]
            broken.append(f"{number}. law broken: no error ({type(error).__name__}: {first})")
    if broken:
        raise AssertionError("\n".join([*broken, f"The laws stand, numbered, in {where}."]))


def require(law: str, holds: bool, found: str = "") -> None:
    """Raises `AssertionError` that names the law and what was found instead."""
    if not holds:
        raise AssertionError(f"law broken: {law}" + (f" ({found})" if found else ""))


def check_value_object(strategy: object) -> None:
    """A frozen, hashable value, equal to its copy, never callable, a single leaf of a tree."""
    name = type(strategy).__name__
    require(f"{name} is a dataclass", dataclasses.is_dataclass(strategy))
    require(f"{name} is hashable", isinstance(strategy, Hashable))
    twin = dataclasses.replace(strategy)  # type: ignore[type-var]
    require(f"{name} equals its copy", twin == strategy and hash(twin) == hash(strategy))
    require(f"{name} is not callable", not callable(strategy))
    require(f"{name} is not one leaf of a pytree", jax.tree.leaves(strategy) == [strategy])


def same_tree_of_shapes(law: str, actual: PyTree, expected: PyTree) -> None:
    """Raises unless both trees have one structure and equal shapes and dtypes."""
    found, wanted = (
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
        for tree in (actual, expected)
    )
    require(law, found == wanted, f"{found} instead of {wanted}")
