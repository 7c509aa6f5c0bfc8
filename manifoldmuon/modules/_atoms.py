"""Atoms, modules with a single weight: linear layer, bias, embedding tables, convolution."""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num, PRNGKeyArray

from manifoldmuon._internal.matrices.arrays import Floats
from manifoldmuon.manifolds import EmbeddingRows, Euclidean, Manifold, Stiefel
from manifoldmuon.modules._budgets import LINEAR, Sharpness, WeightSpec
from manifoldmuon.modules._module import Module
from manifoldmuon.norms import ConvRMSToRMS, FanRatio, Frobenius, L1ToRMS, RMSToRMS, RootDim


# Outside jit: compile a program per kind of weight, not per operation.
@functools.partial(jax.jit, static_argnums=(0, 2, 3), inline=True)
def _random_point(manifold: Manifold, key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any):
    return manifold.random_point(key, shape, dtype)


@dataclasses.dataclass(frozen=True)
class Atom(Module):
    """A module with a single weight, on a manifold of choice; the parameters are the array itself.

    The scale is part of the weight: the forward map is plain (`W x`), and a weight of norm 1 in
    the manifold's norm maps entries of size about 1 to entries of size about 1. A manifold fits if
    every direction of norm 1 in its norm has at most norm 1 in the atom's own norm (the norm of
    `free_space()`). The atom is then well-normed for inputs of norm at most 1, with sensitivity 1
    for weights of norm at most 1; larger inputs and weights scale these bounds. An atom in flat
    space starts on its default constraint and is trained without it.

    Subclasses have the fields `manifold` and `mass` and set `FREE_SPACE` and `CONSTRAINT`.
    """

    sensitivity: ClassVar[float] = 1.0
    sharpness: ClassVar[Sharpness] = Sharpness(0.0, 1.0, 0.0)
    parts: ClassVar[tuple[Module, ...]] = ()
    FREE_SPACE: ClassVar[Manifold]
    CONSTRAINT: ClassVar[Manifold]

    def __post_init__(self):
        name, space = f"{type(self).__name__}.manifold", self.manifold
        super().__post_init__()
        if not isinstance(space, Manifold):
            raise TypeError(f"{name} must be a Manifold; got {space!r}: atoms have a layout")
        try:
            space.check_shape(self.shape)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""

    @property
    @abc.abstractmethod
    def manifold(self) -> Manifold:
        """The weight's manifold, which also gives the norm of its directions."""

    def free_space(self) -> Manifold:
        """Return flat space with the atom's own norm."""
        return self.FREE_SPACE

    def constraint(self) -> Manifold:
        """Return the default constraint, scaled to norm 1 in the atom's own norm."""
        return self.CONSTRAINT

    def on(self, manifold: Manifold) -> Any:
        """Return the same atom on another manifold."""
        return dataclasses.replace(self, manifold=manifold)

    def init(self, key: PRNGKeyArray, dtype: Any = jnp.float32) -> Floats:
        start = self.manifold if self.manifold.constrained else self.constraint()
        return _random_point(start, key, self.shape, dtype)

    def plan(self, budget: np.ndarray) -> WeightSpec:
        # A frozen atom without neighbours would get the whole budget.
        budget = budget if self.mass > 0 else np.zeros_like(budget)
        return WeightSpec(self.manifold, len(self.shape), self.mass, budget)

    def map_atoms(self, function: Any) -> Any:
        return function(self)

    def describe(self) -> str:
        sizes = ", ".join(str(size) for size in self.shape)
        return f"{type(self).__name__}({sizes}) on {type(self.manifold).__name__}"

    def expect_features(self, x: Any, features: int) -> None:
        """Raise `ValueError` unless the last axis of `x` has `features` entries."""
        if x.shape[-1:] != (features,):
            name = type(self).__name__
            raise ValueError(f"{name} takes inputs (..., {features} entries); got {x.shape}")


@dataclasses.dataclass(frozen=True)
class Linear(Atom):
    """`x -> W x` on the last axis, without a bias; root-mean-square norms on both sides.

    The weight is `(fan_out, fan_in)`, with RMS-to-RMS norm 1 on the Stiefel manifold of scale
    `sqrt(fan_out / fan_in)`. `Hypersphere(FanRatio(), ndim=2)` fits as well, as the Frobenius norm
    is at least the spectral norm.

    Attributes:
      fan_out: entries of the output.
      fan_in: entries of the input.
      manifold: `Euclidean(RMSToRMS())` (default), `Stiefel(FanRatio())`, or another that fits.
      mass: see `Module`.

    Examples:
      >>> layer = Linear(10, 784, mm.manifolds.Stiefel())
      >>> layer.apply(layer.init(jax.random.key(0)), jnp.ones((5, 784))).shape
      (5, 10)
    """

    fan_out: int
    fan_in: int
    manifold: Manifold = Euclidean(RMSToRMS())
    mass: float = 1.0
    FREE_SPACE: ClassVar = Euclidean(RMSToRMS())
    CONSTRAINT: ClassVar = Stiefel(FanRatio())
    entry: ClassVar = ("linear",)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.fan_out, self.fan_in)

    def apply(self, params: Float[Array, "m n"], x: Floats) -> Floats:
        self.expect_features(x, self.fan_in)
        return jnp.matmul(x, params.T)


@dataclasses.dataclass(frozen=True)
class Bias(Atom):
    """`x -> x + b` on the last axis, initialised to zero.

    Attributes:
      features: entries of the last axis; the parameters are `(features,)`.
      manifold: flat space under the RMS norm (default), or another that fits.
      mass: see `Module`.
    """

    features: int
    manifold: Manifold = Euclidean(Frobenius(1, RootDim()))
    mass: float = 1.0
    sharpness: ClassVar[Sharpness] = LINEAR
    # The default constraint is flat space: a bias gains nothing from a fixed length.
    FREE_SPACE: ClassVar = Euclidean(Frobenius(1, RootDim()))
    CONSTRAINT: ClassVar = FREE_SPACE
    entry: ClassVar = ("bias",)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.features,)

    def init(self, key: PRNGKeyArray, dtype: Any = jnp.float32) -> Float[Array, " n"]:
        return jnp.zeros(self.shape, dtype)

    def apply(self, params: Float[Array, " n"], x: Floats) -> Floats:
        self.expect_features(x, self.features)
        return x + params


@dataclasses.dataclass(frozen=True)
class Embed(Atom):
    """`token -> E[token]`: whole numbers, one-hot vectors with the l1 norm, to vectors.

    The table is `(vocabulary, dim)`; its norm is the largest root-mean-square norm of a row.

    Attributes:
      dim: entries of each vector.
      vocabulary: number of vectors.
      manifold: `Euclidean(L1ToRMS())` (default), `EmbeddingRows()`, or another that fits.
      mass: see `Module`.
    """

    dim: int
    vocabulary: int
    manifold: Manifold = Euclidean(L1ToRMS())
    mass: float = 1.0
    FREE_SPACE: ClassVar = Euclidean(L1ToRMS())
    CONSTRAINT: ClassVar = EmbeddingRows()

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.vocabulary, self.dim)

    def apply(self, params: Float[Array, "v d"], x: Num[Array, "..."]) -> Floats:
        """Return the vectors of the tokens; a token outside the vocabulary gives NaN."""
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"Embed takes whole numbers; got an input of dtype {x.dtype}")
        return params.at[x].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


@dataclasses.dataclass(frozen=True)
class Unembed(Atom):
    """`x -> E x / dim`: a score for each row of a table with the shape and norm of `Embed`'s.

    It can share the table of `Embed` (see `Tied`). By `|<e, x>| / dim <= ||e||_RMS ||x||_RMS`
    it is well-normed from the RMS norm of the input to the *largest* score.

    Attributes:
      vocabulary: number of scores.
      dim: entries of the input.
      manifold: as for `Embed`.
      mass: see `Module`.
    """

    vocabulary: int
    dim: int
    manifold: Manifold = Euclidean(L1ToRMS())
    mass: float = 1.0
    FREE_SPACE: ClassVar = Euclidean(L1ToRMS())
    CONSTRAINT: ClassVar = EmbeddingRows()

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.vocabulary, self.dim)

    def apply(self, params: Float[Array, "v d"], x: Floats) -> Floats:
        self.expect_features(x, self.dim)
        return jnp.matmul(x, params.T) / self.dim


@dataclasses.dataclass(frozen=True)
class Conv2D(Atom):
    """A convolution (cross-correlation) of images `(..., height, width, channels)`, no bias.

    The kernel is `(kernel, kernel, out_channels, in_channels)`: a matrix for each tap. Its norm is
    `kernel**2` times the largest RMS-to-RMS norm of a tap. The norm of an image is the largest RMS
    norm of a pixel. In these norms the layer is well-normed at every stride and padding.

    Attributes:
      out_channels: channels of the output.
      in_channels: channels of the input.
      kernel: taps along each side.
      stride: pixels from one output pixel to the next.
      padding: zeros on each of the four sides. None keeps the size at stride 1 (an even kernel
        has an extra zero at the bottom and on the right).
      manifold: `Euclidean(ConvRMSToRMS())` (default), `Stiefel(FanRatio(1 / kernel**2))` tap by
        tap, or another that fits.
      mass: see `Module`.
    """

    out_channels: int
    in_channels: int
    kernel: int = 3
    stride: int = 1
    padding: int | None = None
    manifold: Manifold = Euclidean(ConvRMSToRMS())
    mass: float = 1.0
    FREE_SPACE: ClassVar = Euclidean(ConvRMSToRMS())
    convolves: ClassVar[bool] = True
    ranges: ClassVar = {"padding": "[0, inf)"}

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.kernel, self.kernel, self.out_channels, self.in_channels)

    def constraint(self) -> Manifold:
        return Stiefel(FanRatio(1 / self.kernel**2))

    def apply(self, params: Float[Array, "k k m n"], x: Any) -> Floats:
        self.expect_features(x, self.in_channels)
        if x.ndim < 3:
            raise ValueError(f"Conv2D takes (..., height, width, channels); got {x.shape}")
        pad = ((self.kernel - 1) // 2, self.kernel // 2)
        pad = pad if self.padding is None else (self.padding, self.padding)
        axes = ("NHWC", "HWOI", "NHWC")
        images, strides = x.reshape(-1, *x.shape[-3:]), (self.stride, self.stride)
        y = jax.lax.conv_general_dilated(
            images, params, strides, (pad, pad), dimension_numbers=axes
        )
        return y.reshape(*x.shape[:-3], *y.shape[1:])
