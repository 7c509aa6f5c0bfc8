"""The Stiefel problem in float64 NumPy: families of problems to solve."""

import numpy as np

STIEFEL_FAMILIES = ("gaussian", "ill-conditioned", "rank 8", "rank 8 with noise")
"""The families of gradients that `stiefel_problem` knows."""


def orthonormal(rng: np.random.Generator, m: int, n: int) -> np.ndarray:
    """A uniformly distributed `(m, n)` matrix with orthonormal columns, float64."""
    q, r = np.linalg.qr(rng.standard_normal((m, n)))
    return q * np.sign(np.diag(r))


def stiefel_problem(family: str, m: int, n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A point and a gradient of spectral norm 1, both `(m, n)` in float64.

    The families are those on which published solvers differ: Gaussian entries; singular values
    from 1 to 1e-4 in geometric progression; rank 8; rank 8 with one percent of noise.

    Raises:
      ValueError: `family` is not in `STIEFEL_FAMILIES`, or `m < n`.
    """
    if family not in STIEFEL_FAMILIES:
        raise ValueError(f"family must be one of {STIEFEL_FAMILIES}; got {family!r}")
    if m < n:
        raise ValueError(f"a point needs m >= n; got m={m}, n={n}")
    rng = np.random.default_rng(seed)
    point = orthonormal(rng, m, n)
    low = rng.standard_normal((m, 8)) @ rng.standard_normal((8, n))
    noise = rng.standard_normal((m, n))
    if family == "gaussian":
        grad = noise
    elif family == "ill-conditioned":
        grad = orthonormal(rng, m, n) * np.logspace(0, -4, n) @ orthonormal(rng, n, n).T
    elif family == "rank 8":
        grad = low
    else:
        grad = low / np.linalg.norm(low, 2) + 0.01 * noise / np.linalg.norm(noise, 2)
    return point, grad / np.linalg.norm(grad, 2)
