"""LAPACK on CPUs, called for single matrices."""

import re

import jax
import jax.numpy as jnp

from manifoldmuon import linalg
from manifoldmuon._internal.matrices.lapack import positive_qr
from manifoldmuon.manifolds import Stiefel
from manifoldmuon.modules import Linear


def lapack_calls(function, *args) -> set[tuple[int, ...]]:
    """Return the first operand's shape for every LAPACK call in a CPU program."""
    text = jax.jit(function).trace(*args).lower(lowering_platforms=("cpu",)).as_text()
    found = re.findall(r"custom_call @lapack\w+\(.*: \(tensor<([0-9x]+)xf32>", text)
    assert len(found) == text.count("stablehlo.custom_call @lapack")
    return {tuple(map(int, shape.split("x"))) for shape in found}


def test_lapack_gets_single_matrices():
    x = jnp.zeros((2, 3, 5, 4))
    assert lapack_calls(jnp.linalg.eigvalsh, x.mT @ x) == {(2, 3, 4, 4)}
    assert lapack_calls(positive_qr, x) == {(5, 4)}
    assert lapack_calls(Stiefel().distance, x) == {(4, 4)}
    assert lapack_calls(linalg.spectral_norm, x) == {(4, 4)}
    assert lapack_calls(linalg.nuclear_norm, x) == {(5, 4)}
    assert {len(shape) for shape in lapack_calls(linalg.SVD().polar, x)} == {2}
    assert lapack_calls((Linear(5, 5) ** 6).init, jax.random.key(0)) == {(5, 5)}
