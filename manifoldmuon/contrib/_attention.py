"""Attention in pieces: scores, mask, probabilities and values, as bonds of their own."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from manifoldmuon.bounds import L1, RMS, LInf, LipschitzBounds, NormBound, reads, rule
from manifoldmuon.modules import Bond


@dataclasses.dataclass(frozen=True)
class Softmax(Bond):
    """`softmax(scale * x)` over the last axis.

    From the largest entry of a perturbation to the sum of the output's, the sensitivity is the
    scale, attained where two entries share the probability; the sharpness is its square, attained
    where four do. Entries of minus infinity get probability zero.

    Attributes:
      scale: the inverse temperature; not negative.

    Examples:
      >>> Softmax().forward(jnp.zeros(2))
      Array([0.5, 0.5], dtype=float32)
    """

    scale: float = 1.0
    ranges: ClassVar = {"scale": "[0, inf)"}

    @property
    def sensitivity(self) -> float:
        return self.scale

    @property
    def gamma(self) -> float:
        return self.scale**2

    def forward(self, x: Any) -> Any:
        return jax.nn.softmax(self.scale * x, axis=-1)


@dataclasses.dataclass(frozen=True)
class QueryKey(Bond):
    """`(q, k) -> q k^T / d`: the scores `(..., sequence, sequence)` of attention.

    In the largest RMS norm of a token and the largest score: sensitivity and sharpness 1, for
    queries and keys of norm at most 1. The sensitivity grows in proportion to their norm.

    Examples:
      >>> QueryKey().forward((jnp.ones((3, 8)), jnp.ones((5, 8)))).shape
      (3, 5)
    """

    gamma: ClassVar[float] = 1.0

    def forward(
        self, x: tuple[Float[Array, "*batch t d"], Float[Array, "*batch s d"]]
    ) -> Float[Array, "*batch t s"]:
        query, key = x
        return jnp.matmul(query, key.mT) / query.shape[-1]


@dataclasses.dataclass(frozen=True)
class CausalMask(Bond):
    """Scores `(..., sequence, sequence)` with minus infinity where a token would look ahead.

    Examples:
      >>> CausalMask().forward(jnp.zeros((2, 2)))[0].tolist()
      [0.0, -inf]
    """

    def forward(self, x: Float[Array, "*batch t t"]) -> Float[Array, "*batch t t"]:
        return jnp.where(np.tri(x.shape[-1], dtype=bool), x, -jnp.inf)


@dataclasses.dataclass(frozen=True)
class AttendValues(Bond):
    """`(probabilities, v) -> probabilities v`.

    In the largest sum of a row of probabilities and the largest RMS norm of a token: sensitivity
    and sharpness 1, for values of norm at most 1.

    Examples:
      >>> AttendValues().forward((jnp.ones((3, 5)), jnp.ones((5, 8)))).shape
      (3, 8)
    """

    gamma: ClassVar[float] = 1.0

    def forward(
        self, x: tuple[Float[Array, "*batch t s"], Float[Array, "*batch s e"]]
    ) -> Float[Array, "*batch t e"]:
        probabilities, value = x
        return jnp.matmul(probabilities, value)


_CROSS = np.array([[0.0, 1.0], [1.0, 0.0]])


@rule.register
def bound_softmax(bond: Softmax, weights: Any, x: NormBound) -> LipschitzBounds:
    read = LipschitzBounds.convert_norm(x, x.measure if isinstance(x.measure, LInf) else LInf())
    out = NormBound(1.0, 1.0, L1(), read.outputs.features)
    return read.then_of(out, bond.scale, gamma=bond.scale**2)


@rule.register
def bound_query_key(bond: QueryKey, weights: Any, x: Any) -> LipschitzBounds:
    """A product: as steep in each factor as the other is large."""
    read = LipschitzBounds.convert_norm(x, RMS(), RMS())
    q, k = read.outputs
    q.expect_features(k.features)
    out = k.within(q.upper, measure=LInf(), features=None)
    return read.then_of(out, [k.upper, q.upper], gamma=_CROSS)


@rule.register
def bound_causal_mask(bond: CausalMask, weights: Any, x: NormBound) -> LipschitzBounds:
    read = LipschitzBounds.convert_norm(x, LInf())
    return read.then_of(read.outputs.within(measure=LInf(masked=True)), 1.0)


@rule.register
def bound_attend_values(bond: AttendValues, weights: Any, x: Any) -> LipschitzBounds:
    read = LipschitzBounds.convert_norm(x, L1(), RMS())
    p, v = read.outputs
    return read.then_of(v.within(p.upper), [v.upper, p.upper], gamma=_CROSS)


for kind in (Softmax, CausalMask):
    reads.register(kind, lambda bond: LInf())
