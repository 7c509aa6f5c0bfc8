"""Enclosures of singular values, against exact rational arithmetic and known spectra."""

import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from scipy.linalg import hadamard

from manifoldmuon_verify import singular_values
from manifoldmuon_verify._rounding import DOUBLE, SINGLE, check_arithmetic, norm, operator_norm
from manifoldmuon_verify._singular import residual
from tests.verify.independent import exactly


def characteristic(gram):
    """Return the coefficients of `det(x I - gram)`, highest first (Faddeev and LeVerrier)."""
    power = identity = exactly(np.eye(len(gram)))
    found: list[Any] = [Fraction(1)]
    for k in range(1, len(gram) + 1):
        product = gram @ power
        found.append(-sum(product.diagonal()) / k)
        power = product + found[-1] * identity
    return found


def roots_beyond(polynomial, number, sign):
    """Count roots above (sign 1) or below (-1) a number, by Descartes' rule for real roots."""
    shifted = list(polynomial)  # p(x + number), by Horner's scheme
    for stop in range(len(shifted) - 1, 0, -1):
        for i in range(1, stop + 1):
            shifted[i] += number * shifted[i - 1]
    signs = [c * sign**i > 0 for i, c in enumerate(shifted) if c]
    return sum(a != b for a, b in itertools.pairwise(signs))


def contained(matrix, found):
    """Return whether every singular value lies in its interval: exactly, by counting roots."""
    tall = exactly(matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T)
    polynomial = characteristic(tall.T @ tall)
    count = len(found.lower)
    pairs = zip(found.lower.tolist(), found.upper.tolist(), strict=True)
    return all(
        roots_beyond(polynomial, Fraction(high) ** 2, 1) <= i
        and roots_beyond(polynomial, Fraction(low) ** 2, -1) <= count - 1 - i
        for i, (low, high) in enumerate(pairs)
    )


def orthonormal(rng, m, n):
    return np.linalg.qr(rng.normal(size=(m, n)))[0]


def matrices() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "whole numbers": rng.integers(-9, 10, size=(5, 5)).astype(float),
        "tall": rng.normal(size=(9, 4)),
        "wide": rng.normal(size=(3, 8)),
        "orthonormal, rounded to float32": orthonormal(rng, 6, 6).astype(np.float32).astype(float),
        "rank one": np.outer(np.arange(1.0, 6), np.arange(2.0, 6)),
        "rank-deficient": rng.integers(-3, 4, size=(6, 2)) @ rng.integers(-3, 4, size=(2, 5)) / 1.0,
        "ill-conditioned": 1 / (np.arange(6)[:, None] + np.arange(6) + 1.0),
        "graded": orthonormal(rng, 5, 5) * 10.0 ** -np.arange(0, 20, 4),
        "clustered": orthonormal(rng, 5, 5)
        @ np.diag([1, 1 + 1e-14, 1, 1 - 1e-13, 0.5])
        @ orthonormal(rng, 5, 5),
        "tiny": 2.0**-900 * rng.normal(size=(4, 4)),
        "large": 2.0**200 * rng.normal(size=(4, 3)),
        "zero": np.zeros((4, 3)),
        "one entry": np.array([[-3.0]]),
        "one row": rng.normal(size=(1, 7)),
        "a column of zeros": rng.normal(size=(5, 4)) * np.array([1.0, 0, 1, 1]),
    }


MATRICES = matrices()


@pytest.mark.parametrize("name", MATRICES)
def test_intervals_contain_all_singular_values(name):
    matrix = np.asarray(MATRICES[name], float)
    found = singular_values(matrix)
    assert contained(matrix, found)
    assert np.all(found.lower <= found.upper)
    assert np.all(found.lower >= 0)
    assert np.max(found.upper - found.lower) <= 3e-14 * found.upper[0] + 1e-150


def test_counting_detects_narrow_intervals():
    matrix = MATRICES["whole numbers"]
    found = singular_values(matrix)
    middle = (found.lower + found.upper) / 2
    assert not contained(matrix, found._replace(lower=middle * (1 + 1e-9)))
    assert not contained(matrix, found._replace(upper=middle * (1 - 1e-9)))


SPREAD = np.concatenate([[1024, 1024, 1024, 3, 3], np.ones(50), [2.0**-20] * 9])
ORTHONORMAL = hadamard(256) / 16  # dyadic, so exact


@pytest.mark.slow_except("tall", "wide", "spread and clustered")
@pytest.mark.parametrize(
    ("matrix", "values"),
    [
        (ORTHONORMAL, 1),
        (ORTHONORMAL[:, :64], 1),
        (ORTHONORMAL[:64], 1),
        (hadamard(64) * SPREAD / 8, SPREAD),
    ],
    ids=["square", "tall", "wide", "spread and clustered"],
)
def test_known_values_are_enclosed_narrowly(matrix, values):
    found = singular_values(matrix)
    assert np.all(found.lower <= values)
    assert np.all(values <= found.upper)
    assert np.max(found.upper - found.lower) < 1e-12 * np.max(values)


@pytest.mark.parametrize(
    ("matrix", "what"),
    [
        (np.array([[1.0, np.inf]]), "inf"),
        (np.array([[1.0, np.nan]]), "nan"),
        (np.array([[2.0**300, 1]]), "must be finite, at most"),
        (np.array([[2.0**200, 2.0**-1000]]), "too much in size"),
    ],
)
def test_unenclosable_matrices_raise(matrix, what):
    with pytest.raises(ArithmeticError, match=what):
        singular_values(matrix)


def test_wrong_svd_widens_intervals_or_raises(rng, monkeypatch):
    """LAPACK's results are not trusted."""
    matrix, svd = rng.normal(size=(5, 5)), np.linalg.svd

    def wrong(x, **options):
        left, values, right = svd(x, **options)
        return left, values * np.array([0.9, 1, 1, 1, 1]), right

    monkeypatch.setattr(np.linalg, "svd", wrong)
    found = singular_values(matrix)
    assert contained(matrix, found)
    assert found.upper[0] - found.lower[0] > 0.05 * found.upper[0]
    monkeypatch.setattr(np.linalg, "svd", lambda x, **options: (x, np.ones(5), x))
    with pytest.raises(ArithmeticError, match="not orthonormal"):
        singular_values(matrix)

    def none(x, **options):
        raise np.linalg.LinAlgError("SVD did not converge")

    monkeypatch.setattr(np.linalg, "svd", none)
    with pytest.raises(ArithmeticError, match="did not converge"):
        singular_values(matrix)


@pytest.mark.parametrize("terms", [1, 3, 40])
def test_residual_bounds_are_tight(rng, terms):
    first, second = rng.normal(size=(6, terms)), rng.normal(size=(terms, 5))
    target = first @ second
    gap = exactly(target) - exactly(first) @ exactly(second)
    square = sum(entry**2 for entry in gap.flat)
    bound = Fraction(residual(target, first, second))
    assert square <= bound**2 <= Fraction(3) * square + Fraction(1e-15) ** 2


def test_norm_bounds_are_tight(rng):
    for x in (rng.normal(size=(7, 9)), np.full((40, 40), 0.1), np.full((3, 3), 1e-200)):
        square = sum(entry**2 for entry in exactly(x).flat)
        assert square <= Fraction(norm(x)) ** 2
        assert norm(x) <= np.sqrt(float(square)) * (1 + 1e-12) + 1e-150
        largest = np.linalg.norm(np.abs(x), 2)
        assert largest <= operator_norm(x) * (1 + 1e-14)
        assert operator_norm(x) <= norm(x)


def test_gamma_is_an_upper_bound():
    for arithmetic in (DOUBLE, SINGLE):
        for terms in (0, 1, 1000):
            part = terms * Fraction(arithmetic.unit)
            assert Fraction(arithmetic.gamma(terms)) >= part / (1 - part)
    assert SINGLE.gamma(2**24) == np.inf
    check_arithmetic()
