"""Attention as a bond, in one piece and in its pieces, and rotary positions."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from manifoldmuon.modules._algebra import Bond
from manifoldmuon.modules._leaf import check_number


@dataclasses.dataclass(frozen=True)
class FunctionalAttention(Bond):
    """`(q, k, v) -> softmax(q k^T / d + mask) v`, on `(..., sequence, d)` each.

    With the scale 1/d (not 1/sqrt(d)), in the largest RMS norm of a token, for inputs of norm at
    most 1 each: sensitivity 1 and sharpness 3 (modular norm, arXiv:2405.14813, proposition 7).

    Attributes:
      causal: whether a token sees only itself and those before it.
    """

    causal: bool = True
    sensitivity: ClassVar[float] = 1.0
    gamma: ClassVar[float] = 3.0

    def forward(
        self,
        x: tuple[
            Float[Array, "*batch t d"], Float[Array, "*batch t d"], Float[Array, "*batch t e"]
        ],
    ) -> Float[Array, "*batch t e"]:
        query, key, value = x
        scores = QueryKey().forward((query, key))
        if self.causal:
            scores = CausalMask().forward(scores)
        return AttendValues().forward((jax.nn.softmax(scores, axis=-1), value))


@dataclasses.dataclass(frozen=True)
class QueryKey(Bond):
    """`(q, k) -> q k^T / d`: the scores `(..., sequence, sequence)` of attention.

    In the largest RMS norm of a token and the largest score: sensitivity and sharpness 1, for
    queries and keys of norm at most 1. The sensitivity grows in proportion to their norm.
    """

    sensitivity: ClassVar[float] = 1.0
    gamma: ClassVar[float] = 1.0

    def forward(
        self, x: tuple[Float[Array, "*batch t d"], Float[Array, "*batch s d"]]
    ) -> Float[Array, "*batch t s"]:
        query, key = x
        return jnp.matmul(query, key.mT) / query.shape[-1]


@dataclasses.dataclass(frozen=True)
class CausalMask(Bond):
    """Scores `(..., sequence, sequence)` with minus infinity where a token would look ahead."""

    sensitivity: ClassVar[float] = 1.0
    gamma: ClassVar[float] = 0.0

    def forward(self, x: Float[Array, "*batch t t"]) -> Float[Array, "*batch t t"]:
        return jnp.where(np.tri(x.shape[-1], dtype=bool), x, -jnp.inf)


@dataclasses.dataclass(frozen=True)
class AttendValues(Bond):
    """`(probabilities, v) -> probabilities v`.

    In the largest sum of a row of probabilities and the largest RMS norm of a token: sensitivity
    and sharpness 1, for values of norm at most 1.
    """

    sensitivity: ClassVar[float] = 1.0
    gamma: ClassVar[float] = 1.0

    def forward(
        self, x: tuple[Float[Array, "*batch t s"], Float[Array, "*batch s e"]]
    ) -> Float[Array, "*batch t e"]:
        probabilities, value = x
        return jnp.matmul(probabilities, value)


@dataclasses.dataclass(frozen=True)
class RoPE(Bond):
    """Rotary positions on `(..., sequence, d)`: products of tokens depend on their distance.

    Entry j and entry j + d/2 of token t turn by the angle `t / base**(2 j / d)` in their plane: an
    isometry (Su et al., arXiv:2104.09864, with the halves for pairs).

    Attributes:
      base: the slowest rotation takes about `2 pi base` tokens.
    """

    base: float = 10_000.0
    sensitivity: ClassVar[float] = 1.0
    gamma: ClassVar[float] = 0.0

    def __post_init__(self):
        check_number("RoPE.base", self.base, least=1.0)

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
