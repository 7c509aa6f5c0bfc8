"""Bonds for attention: softmax attention, heads and positions."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from manifoldmuon._internal.matrices.arrays import Floats
from manifoldmuon.modules._module import Bond


@dataclasses.dataclass(frozen=True)
class FunctionalAttention(Bond):
    """`(q, k, v) -> softmax(q k^T / d + mask) v`, on `(..., sequence, d)` each.

    With the scale 1/d (not 1/sqrt(d)), it has sensitivity 1 and sharpness 3 in the largest RMS
    norm of a token, for q, k and v of norm at most 1 each (modular norm, arXiv:2405.14813,
    proposition 7).

    Attributes:
      causal: whether a token sees only itself and earlier tokens.
    """

    causal: bool = True
    gamma: ClassVar[float] = 3.0

    def forward(self, x: tuple[Floats, Floats, Floats]) -> Floats:
        query, key, value = x
        scores = jnp.matmul(query, key.mT) / query.shape[-1]
        if self.causal:
            scores = jnp.where(np.tri(scores.shape[-1], dtype=bool), scores, -jnp.inf)
        return jnp.matmul(jax.nn.softmax(scores, axis=-1), value)


@dataclasses.dataclass(frozen=True)
class SplitHeads(Bond):
    """`(..., sequence, heads * dim)` to `(..., heads, sequence, dim)`.

    It is an isometry if norms are root mean squares over all heads. In the norm of attention, the
    largest norm of a head, a vector inside a single head is sqrt(heads) times as long; the
    declared sensitivity 1 is for vectors spread evenly over heads.

    Attributes:
      heads: number of heads.
    """

    heads: int

    def forward(self, x: Float[Array, "*batch t d"]) -> Float[Array, "*batch h t e"]:
        if x.shape[-1] % self.heads:
            raise ValueError(f"{x.shape[-1]} features do not split into {self.heads} heads")
        split = x.reshape(*x.shape[:-1], self.heads, x.shape[-1] // self.heads)
        return jnp.swapaxes(split, -3, -2)


@dataclasses.dataclass(frozen=True)
class MergeHeads(Bond):
    """Undo `SplitHeads`: `(..., heads, sequence, dim)` to `(..., sequence, heads * dim)`."""

    def forward(self, x: Float[Array, "*batch h t e"]) -> Float[Array, "*batch t d"]:
        swapped = jnp.swapaxes(x, -3, -2)
        return swapped.reshape(*swapped.shape[:-2], math.prod(swapped.shape[-2:]))


@dataclasses.dataclass(frozen=True)
class Positions(Bond):
    """Tokens `(..., sequence)` to their positions 0, 1, 2, ...

    The declared sensitivity is 1, so that the mean of token and position embeddings has
    sensitivity 1 (modular norm, arXiv:2405.14813, appendix B.7). The true sensitivity is 0.
    """

    def forward(self, x: Integer[Array, "*batch t"]) -> Integer[Array, "*batch t"]:
        return jnp.broadcast_to(jnp.arange(x.shape[-1]), x.shape)


@dataclasses.dataclass(frozen=True)
class RoPE(Bond):
    """Rotary positions on `(..., sequence, d)`: products of tokens depend on their distance.

    Entries j and j + d/2 of token t are rotated by the angle `t / base**(2 j / d)`, an isometry
    (Su et al., arXiv:2104.09864, with halves in place of adjacent pairs).

    Attributes:
      base: the slowest rotation has a period of about `2 pi base` tokens.
    """

    base: float = 10_000.0
    ranges: ClassVar = {"base": "[1, inf)"}

    def forward(self, x: Float[Array, "*batch t d"]) -> Float[Array, "*batch t d"]:
        tokens, dim = x.shape[-2:]
        if dim % 2:
            raise ValueError(f"RoPE turns pairs of entries; got {dim}, an odd number")
        half = dim // 2
        # Compute angles in float64, at trace time: float32 is too coarse for late tokens.
        angles = np.outer(np.arange(tokens), self.base ** (-np.arange(half) / half))
        cos, sin = (jnp.asarray(f(angles), x.dtype) for f in (np.cos, np.sin))
        a, b = x[..., :half], x[..., half:]
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
