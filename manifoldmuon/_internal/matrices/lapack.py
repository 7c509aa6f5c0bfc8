"""LAPACK on CPUs, without a deadlock of jaxlib 0.10.0 to 0.11.0.

These versions hand the matrices of a batch to the thread pool that runs the program, and wait for
them on a thread of the same pool: once every thread waits, no thread is left to work. A single
matrix is solved in the calling thread, so batches are solved matrix by matrix: see "Known limits"
in the docs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact

from manifoldmuon._internal.matrices.arrays import Matrices

_Result = TypeVar("_Result")


def map_matrices(
    function: Callable[[jax.Array], _Result], x: Inexact[Array, "*batch m n"]
) -> _Result:
    """Return `function(x)` for a function that runs a LAPACK routine; on CPUs, matrix by matrix.

    Its results have the leading axes of `x`. A batch axis from an outer `jax.vmap` is not split,
    and can still deadlock.
    """

    def mapped(x):
        return function(x) if x.ndim == 2 else jax.lax.map(mapped, x)

    if x.ndim == 2:
        return function(x)
    return jax.lax.platform_dependent(x, cpu=mapped, default=function)


def positive_qr(matrix: Matrices) -> Matrices:
    """Return the Q of the QR decomposition with a positive diagonal of R: unique and smooth."""
    q, r = map_matrices(jnp.linalg.qr, matrix)
    diagonal = jnp.diagonal(r, axis1=-2, axis2=-1)
    return q * jnp.where(diagonal < 0, -1, 1).astype(q.dtype)[..., None, :]
