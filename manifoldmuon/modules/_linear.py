"""The linear layer."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon.manifolds import Euclidean, FanRatio, Manifold, Stiefel
from manifoldmuon.modules._atom import Atom, check_atom, expect_features
from manifoldmuon.norms import RMSToRMS


@dataclasses.dataclass(frozen=True)
class Linear(Atom):
    """`x -> W x` on the last axis, without a bias; root-mean-square norms on both sides.

    The weight is `(fan_out, fan_in)`, of RMS-to-RMS norm 1 on the Stiefel manifold of scale
    `sqrt(fan_out / fan_in)`. `Hypersphere(FanRatio(), ndim=2)` fits as well: a Frobenius norm is
    at least the spectral norm.

    Attributes:
      fan_out: entries of the output.
      fan_in: entries of the input.
      manifold: `Euclidean(RMSToRMS())` (default), `Stiefel(FanRatio())`, or another that fits.
      mass: the share of learning.
    """

    fan_out: int
    fan_in: int
    manifold: Manifold = Euclidean(RMSToRMS())
    mass: float = 1.0

    def __post_init__(self):
        check_atom(self)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.fan_out, self.fan_in)

    def unconstrained(self) -> Manifold:
        return Euclidean(RMSToRMS())

    def curved(self) -> Manifold:
        return Stiefel(FanRatio())

    def apply(self, params: Float[Array, "m n"], x: Float[Array, "..."]) -> Float[Array, "..."]:
        expect_features("Linear", x, self.fan_in)
        return jnp.matmul(x, params.T)
