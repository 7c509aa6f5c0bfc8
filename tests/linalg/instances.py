"""Table of msign methods; add a row to check all laws for a new method."""

import math
from typing import NamedTuple

import numpy as np

from manifoldmuon import linalg


class MethodCase(NamedTuple):
    """A method with its accuracy.

    Attributes:
      name: test id.
      method: the method.
      orthogonality: orthogonality error of its results, in units of eps sqrt(n).
      products: matrix products per step. The condition number multiplies the errors of the first
        step; later factors are smaller, in a geometric series.
      condition: largest condition number at which the accuracy holds.
    """

    name: str
    method: linalg.MsignMethod
    orthogonality: float = 10.0
    products: int = 4
    condition: float = 1e6


SCHEDULE = linalg.DEFAULT_MSIGN.schedule  # type: ignore[attr-defined]


def by_degree(degree: int, safety: float) -> MethodCase:
    schedule = linalg.PolarExpress(3e-7, degree, safety=safety, cushion=0.05)
    return MethodCase(f"degree {degree}", linalg.NewtonSchulz(schedule))


# Accurate in float32 up to a condition number of 1e6.
ACCURATE = [
    MethodCase("default", linalg.DEFAULT_MSIGN),
    MethodCase("direct form", linalg.NewtonSchulz(SCHEDULE)),
    MethodCase("gram form", linalg.GramNewtonSchulz(SCHEDULE)),
    *(by_degree(*options) for options in ((7, 1.0001), (9, 1.001), (3, 1.0001))),
    MethodCase("cubic", linalg.NewtonSchulz(linalg.CUBIC.with_steps(42))),
    MethodCase("svd", linalg.SVD()),
]
OTHERS = [
    MethodCase("published polar express", linalg.NewtonSchulz(linalg.POLAR_EXPRESS), condition=1e3),
    MethodCase("quintic", linalg.NewtonSchulz(linalg.QUINTIC), math.inf),
    MethodCase("muon", linalg.NewtonSchulz(linalg.MUON, frobenius=True), math.inf),
    MethodCase("six steps", linalg.NewtonSchulz(linalg.MODULA_SIX_STEP), math.inf),
]

METHODS = [*ACCURATE, *OTHERS]


def conditioned(shape: tuple[int, int], condition: float) -> np.ndarray:
    """Return a float64 matrix with geometrically spaced singular values, at most 1."""
    k, rng = min(shape), np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.standard_normal((size, k)))[0] for size in shape)
    return (left * np.geomspace(1, 1 / condition, k)) @ right.T


def polar(x: np.ndarray) -> np.ndarray:
    """Return the polar factor by a float64 SVD."""
    left, _, right = np.linalg.svd(np.asarray(x, np.float64), full_matrices=False)
    return left @ right
