"""Round weights to few bits, with a scale for each row or for each block of sixteen."""

import functools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

BLOCK = 16
FOUR_BITS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Absolute values of the four-bit format E2M1."""


def round_rows(w: Float[Array, "... n"], bits: int) -> Float[Array, "... n"]:
    """Round to `2**bits - 1` symmetric, equidistant values up to the largest entry of each row.

    Args:
      w: matrices.
      bits: bits per entry.
    """
    most = 2 ** (bits - 1) - 1
    step = jnp.max(jnp.abs(w), axis=-1, keepdims=True) / most
    return jnp.round(w / jnp.where(step == 0, 1, step)) * step


def round_blocks(w: Float[Array, "... n"]) -> Float[Array, "... n"]:
    """Round as NVFP4: E2M1 entries, an E4M3 scale per block of 16, and a scale per matrix.

    Args:
      w: matrices, with a multiple of 16 columns.
    """
    largest = FOUR_BITS[-1]
    whole = jnp.max(jnp.abs(w), axis=(-2, -1), keepdims=True) / (largest * 448)
    whole = jnp.where(whole == 0, 1, whole)[..., None]
    blocks = w.reshape(*w.shape[:-1], -1, BLOCK)
    scale = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True) / largest / whole
    scale = scale.astype(jnp.float8_e4m3fn).astype(w.dtype) * whole
    sizes = np.array(FOUR_BITS, np.float32)
    x = jnp.abs(blocks) / jnp.where(scale == 0, 1, scale)
    near = jnp.asarray(sizes)[jnp.searchsorted((sizes[1:] + sizes[:-1]) / 2, x)]
    return (jnp.sign(blocks) * near * scale).reshape(w.shape)


ROUNDINGS: dict[str, Callable[[Array], Array]] = {
    **{f"bits{bits}": functools.partial(round_rows, bits=bits) for bits in (8, 4, 3)},
    "nvfp4": round_blocks,
}
