"""LAPACK on CPUs, kept clear of a deadlock.

jaxlib 0.10.0 to 0.11.0 hands the matrices of a batch to the thread pool that runs the program, and
waits for them on a thread of that pool: once every thread waits, none is left to do the work. A
single matrix is done where it is, so matrices go one by one: see "Known limits" in the docs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact

from manifoldmuon._internal.arrays import Matrices

_Result = TypeVar("_Result")


def map_matrices(
    function: Callable[[jax.Array], _Result], x: Inexact[Array, "*batch m n"]
) -> _Result:
    """`function` of matrices that runs a LAPACK routine, on CPUs of one matrix after the other.

    Args:
      function: takes `(*batch, m, n)` and returns arrays with the same leading axes.
      x: matrices in the trailing two axes; leading axes are independent.

    Returns:
      `function(x)`. A `jax.vmap` around it adds a batch that is not kept apart.
    """

    def mapped(x):
        return function(x) if x.ndim == 2 else jax.lax.map(mapped, x)

    if x.ndim == 2:
        return function(x)
    return jax.lax.platform_dependent(x, cpu=mapped, default=function)


def positive_qr(matrix: Matrices) -> Matrices:
    """Return the Q whose R has a positive diagonal: a unique, smooth choice."""
    q, r = map_matrices(jnp.linalg.qr, matrix)
    diagonal = jnp.diagonal(r, axis1=-2, axis2=-1)
    return q * jnp.where(diagonal < 0, -1, 1).astype(q.dtype)[..., None, :]
