"""Embedding tables, and the same table read backwards."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from manifoldmuon.manifolds import EmbeddingRows, Euclidean, Manifold
from manifoldmuon.modules._atom import Atom, check_atom, expect_features
from manifoldmuon.norms import L1ToRMS


@dataclasses.dataclass(frozen=True)
class Embed(Atom):
    """`token -> E[token]`: whole numbers to vectors.

    The table is `(vocabulary, dim)`, its norm the largest root-mean-square norm of a row.
    Tokens count as one-hot vectors with the l1 norm.

    Attributes:
      dim: entries of each vector.
      vocabulary: how many vectors.
      manifold: `Euclidean(L1ToRMS())` (default), `EmbeddingRows()`, or another that fits.
      mass: the share of learning.
    """

    dim: int
    vocabulary: int
    manifold: Manifold = Euclidean(L1ToRMS())
    mass: float = 1.0

    def __post_init__(self):
        check_atom(self)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.vocabulary, self.dim)

    def unconstrained(self) -> Manifold:
        return Euclidean(L1ToRMS())

    def curved(self) -> Manifold:
        return EmbeddingRows()

    def apply(self, params: Float[Array, "v d"], x: Num[Array, "..."]) -> Float[Array, "..."]:
        """The vectors of the tokens; a token outside of the vocabulary gives NaN."""
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"Embed takes whole numbers; got an input of dtype {x.dtype}")
        return jnp.take(params, x, axis=0, mode="fill", fill_value=jnp.nan)


@dataclasses.dataclass(frozen=True)
class Unembed(Atom):
    """`x -> E x / dim`: one score for each row of a table like that of `Embed`.

    It is the head that can share the table of `Embed` (see `tie`). In the norm of `Embed`, the
    largest RMS norm of a row, it is well-normed from the RMS norm of the input to the *largest*
    score: `|<e, x>| / dim <= ||e||_RMS ||x||_RMS`. That bounds the RMS norm of the scores too.

    Attributes:
      vocabulary: how many scores.
      dim: entries of the input.
      manifold: `Euclidean(L1ToRMS())` (default), `EmbeddingRows()`, or another that fits.
      mass: the share of learning.
    """

    vocabulary: int
    dim: int
    manifold: Manifold = Euclidean(L1ToRMS())
    mass: float = 1.0

    def __post_init__(self):
        check_atom(self)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.vocabulary, self.dim)

    def unconstrained(self) -> Manifold:
        return Euclidean(L1ToRMS())

    def curved(self) -> Manifold:
        return EmbeddingRows()

    def apply(self, params: Float[Array, "v d"], x: Float[Array, "..."]) -> Float[Array, "..."]:
        expect_features("Unembed", x, self.dim)
        return jnp.matmul(x, params.T) / self.dim
