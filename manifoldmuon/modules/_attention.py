"""Attention as a bond, and what goes with it: heads and positions."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from manifoldmuon.modules._module import Bond


@dataclasses.dataclass(frozen=True)
class FunctionalAttention(Bond):
    """`(q, k, v) -> softmax(q k^T / d + mask) v`, on `(..., sequence, d)` each.

    With the scale 1/d (not 1/sqrt(d)), in the largest RMS norm of a token, for inputs of norm at
    most 1 each: sensitivity 1 and sharpness 3 (modular norm, arXiv:2405.14813, proposition 7).

    Attributes:
      causal: whether a token sees only itself and those before it.

    Examples:
      >>> FunctionalAttention().forward(3 * (jnp.ones((10, 8)),)).shape
      (10, 8)
    """

    causal: bool = True
    gamma: ClassVar[float] = 3.0

    def forward(
        self,
        x: tuple[
            Float[Array, "*batch t d"], Float[Array, "*batch t d"], Float[Array, "*batch t e"]
        ],
    ) -> Float[Array, "*batch t e"]:
        query, key, value = x
        scores = jnp.matmul(query, key.mT) / query.shape[-1]
        if self.causal:
            scores = jnp.where(np.tri(scores.shape[-1], dtype=bool), scores, -jnp.inf)
        return jnp.matmul(jax.nn.softmax(scores, axis=-1), value)


@dataclasses.dataclass(frozen=True)
class SplitHeads(Bond):
    """`(..., sequence, heads * dim)` to `(..., heads, sequence, dim)`.

    An isometry where the norm is the root mean square over the heads. In the largest norm of a
    head, which attention takes, a vector that lies in one head alone counts sqrt(heads) times as
    much; the declared 1 is that of vectors spread evenly.

    Attributes:
      heads: how many.

    Examples:
      >>> SplitHeads(4).forward(jnp.ones((10, 32))).shape
      (4, 10, 8)
    """

    heads: int

    def forward(self, x: Float[Array, "*batch t d"]) -> Float[Array, "*batch h t e"]:
        if x.shape[-1] % self.heads:
            raise ValueError(f"{x.shape[-1]} features do not split into {self.heads} heads")
        split = x.reshape(*x.shape[:-1], self.heads, x.shape[-1] // self.heads)
        return jnp.swapaxes(split, -3, -2)


@dataclasses.dataclass(frozen=True)
class MergeHeads(Bond):
    """`(..., heads, sequence, dim)` to `(..., sequence, heads * dim)`: undoes `SplitHeads`.

    Examples:
      >>> MergeHeads().forward(jnp.ones((4, 10, 8))).shape
      (10, 32)
    """

    def forward(self, x: Float[Array, "*batch h t e"]) -> Float[Array, "*batch t d"]:
        moved = jnp.swapaxes(x, -3, -2)
        return moved.reshape(*moved.shape[:-2], math.prod(moved.shape[-2:]))


@dataclasses.dataclass(frozen=True)
class Positions(Bond):
    """Tokens `(..., sequence)` to the number of their place: 0, 1, 2, ...

    The sensitivity is declared as 1, that of the tokens beside it, so that token and position
    embeddings sum to a module of sensitivity 1 (modular norm, arXiv:2405.14813, appendix B.7).
    It is in truth 0.

    Examples:
      >>> Positions().forward(jnp.array([7, 7, 7])).tolist()
      [0, 1, 2]
    """

    def forward(self, x: Int[Array, "*batch t"]) -> Int[Array, "*batch t"]:
        return jnp.broadcast_to(jnp.arange(x.shape[-1], dtype=x.dtype), x.shape)


@dataclasses.dataclass(frozen=True)
class RoPE(Bond):
    """Rotary positions on `(..., sequence, d)`: products of tokens depend on their distance.

    Entry j and entry j + d/2 of token t turn by the angle `t / base**(2 j / d)` in their plane: an
    isometry (Su et al., arXiv:2104.09864, with the halves for pairs).

    Attributes:
      base: the slowest rotation takes about `2 pi base` tokens.

    Examples:
      >>> RoPE().forward(jnp.ones((10, 8))).shape
      (10, 8)
    """

    base: float = 10_000.0
    ranges: ClassVar = {"base": "[1, inf)"}

    def forward(self, x: Float[Array, "*batch t d"]) -> Float[Array, "*batch t d"]:
        tokens, dim = x.shape[-2:]
        if dim % 2:
            raise ValueError(f"RoPE turns pairs of entries; got {dim}, an odd number")
        half = dim // 2
        # In float64, at trace time: float32 loses the angles of late tokens.
        angles = np.outer(np.arange(tokens), self.base ** (-np.arange(half) / half))
        cos, sin = (jnp.asarray(f(angles), x.dtype) for f in (np.cos, np.sin))
        a, b = x[..., :half], x[..., half:]
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
