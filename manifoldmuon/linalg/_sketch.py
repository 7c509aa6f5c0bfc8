"""msign of the leading singular directions only, by a randomised range finder."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon.linalg._matrix import mT, product
from manifoldmuon.linalg._method import MsignMethod


@dataclasses.dataclass(frozen=True)
class Sketch(MsignMethod):
    """`U_r V_r^T` for the `rank` largest singular values; the other directions become zero.

    A randomised range finder with power iterations and a small SVD (Halko, Martinsson, Tropp
    2011, algorithms 4.4 and 5.1). Right to rounding where the singular values fall off behind
    the rank, an approximation where they do not. Its cost is linear in the rank.

    Attributes:
      rank: how many singular directions; at most those of the matrix are returned.
      oversample: further random directions, dropped at the end.
      power_iterations: how often the range is refined by `x x^T`.
      seed: of the random test matrix, which is the same for every matrix of a shape.
    """

    rank: int
    oversample: int = 8
    power_iterations: int = 2
    seed: int = 0

    def __post_init__(self):
        if self.rank < 1 or self.oversample < 0 or self.power_iterations < 0:
            raise ValueError(
                "rank must be at least 1, oversample and power_iterations not negative; got "
                f"{self.rank!r}, {self.oversample!r} and {self.power_iterations!r}"
            )

    def polar(self, x: Float[Array, "*batch m n"]) -> Float[Array, "*batch m n"]:
        n = x.shape[-1]
        kept, width = min(self.rank, n), min(self.rank + self.oversample, n)
        test = jax.random.normal(jax.random.key(self.seed), (n, width), x.dtype)
        basis = _orthonormal(product(x, test))
        for _ in range(self.power_iterations):
            basis = _orthonormal(product(x, _orthonormal(product(mT(x), basis))))
        left, values, right = jnp.linalg.svd(product(mT(basis), x), full_matrices=False)
        # As in SVD: what is below rounding of the largest value, and zero, stays zero.
        sign = values[..., :kept] > jnp.finfo(x.dtype).eps * values[..., :1]
        left = left[..., :, :kept] * sign[..., None, :]
        return product(product(basis, left), right[..., :kept, :])


def _orthonormal(x):
    return jnp.linalg.qr(x)[0]
