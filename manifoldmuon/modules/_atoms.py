"""Atoms: modules with one weight. The linear layer, embedding tables and the convolution."""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num, PRNGKeyArray

from manifoldmuon._internal.arguments import check_fields, check_number
from manifoldmuon.manifolds import EmbeddingRows, Euclidean, Manifold, Stiefel
from manifoldmuon.modules._algebra import Module
from manifoldmuon.modules._plan import Sharpness, WeightSpec
from manifoldmuon.norms import ConvRMSToRMS, FanRatio, L1ToRMS, RMSToRMS


# Outside of jit: one program for each kind of weight, not one for each operation.
@functools.partial(jax.jit, static_argnums=(0, 2, 3), inline=True)
def _random_point(manifold: Manifold, key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any):
    return manifold.random_point(key, shape, dtype)


@dataclasses.dataclass(frozen=True)
class Atom(Module):
    """A module with one weight, on a manifold of choice.

    The scale is part of the weight: the forward map is plain (`W x`), and a weight of norm 1
    in the manifold's norm maps inputs with entries of size about 1 to outputs of such entries.
    A manifold fits if a direction of its norm 1 has at most norm 1 in the atom's own norm (that
    of `free_space()`); that makes the atom well-normed, for inputs of norm at most 1, with
    sensitivity 1. Both hold for weights of norm at most 1, and in proportion beyond.

    The parameters are the array itself. An atom in flat space starts on its default
    constraint, and is then trained without it.
    """

    sensitivity: ClassVar[float] = 1.0
    sharpness: ClassVar[Sharpness] = Sharpness(0.0, 1.0, 0.0)

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""

    @property
    @abc.abstractmethod
    def manifold(self) -> Manifold:
        """The space of the weight; its directions are measured in its norm."""

    @abc.abstractmethod
    def free_space(self) -> Manifold:
        """Flat space with the atom's own norm."""

    @abc.abstractmethod
    def constraint(self) -> Manifold:
        """The default constraint: as large as norm 1 allows."""

    def on(self, manifold: Manifold) -> Any:
        """The same atom on another manifold."""
        return dataclasses.replace(self, manifold=manifold)

    @property
    def parts(self) -> tuple[Module, ...]:
        return ()

    def init(self, key: PRNGKeyArray, dtype: Any = jnp.float32) -> Float[Array, "..."]:
        start = self.manifold if self.manifold.constrained else self.constraint()
        return _random_point(start, key, self.shape, dtype)

    def plan(self, target: np.ndarray) -> WeightSpec:
        # A frozen atom is given nothing by any rule but when it stands alone.
        budget = target if self.mass > 0 else np.zeros_like(target)
        return WeightSpec(self.manifold, len(self.shape), self.mass, budget)

    def map_atoms(self, function: Any) -> Any:
        return function(self)

    def describe(self) -> str:
        sizes = ", ".join(str(size) for size in self.shape)
        return f"{type(self).__name__}({sizes}) on {type(self.manifold).__name__}"


def check_atom(atom: Atom, *sizes: str) -> None:
    """Raise an error for a size below 1, a bad mass or a manifold that does not fit.

    Args:
      atom: what is checked.
      *sizes: the names of the fields that are sizes.
    """
    name = type(atom).__name__
    check_fields(atom, mass="[0, inf)", **dict.fromkeys(sizes, "[1, inf)"))
    if not isinstance(atom.manifold, Manifold):
        raise TypeError(
            f"{name}.manifold must be a Manifold; got {atom.manifold!r}. The weight of an atom has "
            "the layout that its docstring says"
        )
    try:
        atom.manifold.check_shape(atom.shape)
    except ValueError as error:
        raise ValueError(f"{name}.manifold: {error}") from error
    if atom.manifold.ndim > len(atom.shape):
        raise ValueError(f"{name}.manifold takes {atom.manifold.ndim} axes of {atom.shape}")


def expect_features(name: str, x: Any, features: int) -> None:
    """Raises `ValueError` unless the last axis of `x` has `features` entries."""
    if not x.shape or x.shape[-1] != features:
        raise ValueError(
            f"{name} takes an input whose last axis has {features} entries; got {x.shape}"
        )


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
        check_atom(self, "fan_out", "fan_in")

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.fan_out, self.fan_in)

    def free_space(self) -> Manifold:
        return Euclidean(RMSToRMS())

    def constraint(self) -> Manifold:
        return Stiefel(FanRatio())

    def apply(self, params: Float[Array, "m n"], x: Float[Array, "..."]) -> Float[Array, "..."]:
        expect_features("Linear", x, self.fan_in)
        return jnp.matmul(x, params.T)


@dataclasses.dataclass(frozen=True)
class LocallyConnected(Atom):
    """`x_p -> W_p x_p`: a matrix of its own for every place, where `Linear` has one for all.

    Inputs are `(..., *places, fan_in)`. Behind `SpaceToDepth` it is a locally connected layer, a
    convolution of as large a stride as kernel that shares no weights between places; on rows of
    features, a block-diagonal matrix. The weight is `(*places, fan_out, fan_in)`, measured matrix
    by matrix as that of `Linear`, its norm the largest of them.

    Attributes:
      places: the lengths of the axes before the last, such as `(rows, columns)` of an image.
      fan_out: entries of the output at a place.
      fan_in: entries of the input at a place.
      manifold: `Euclidean(RMSToRMS())` (default), `Stiefel(FanRatio())`, or another that fits.
      mass: the share of learning.
    """

    places: tuple[int, ...]
    fan_out: int
    fan_in: int
    manifold: Manifold = Euclidean(RMSToRMS())
    mass: float = 1.0

    def __post_init__(self):
        if not isinstance(self.places, tuple) or not self.places:
            raise ValueError(
                "LocallyConnected.places must be a tuple of at least one length; got "
                f"{self.places!r}. A layer without places is Linear"
            )
        for size in self.places:
            check_number("LocallyConnected.places", size, least=1.0, whole=True)
        check_atom(self, "fan_out", "fan_in")

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.places, self.fan_out, self.fan_in)

    def free_space(self) -> Manifold:
        return Euclidean(RMSToRMS())

    def constraint(self) -> Manifold:
        return Stiefel(FanRatio())

    def apply(
        self, params: Float[Array, "*places m n"], x: Float[Array, "..."]
    ) -> Float[Array, "..."]:
        wanted = (*self.places, self.fan_in)
        if x.shape[-len(wanted) :] != wanted:
            sizes = ", ".join(str(size) for size in wanted)
            raise ValueError(f"LocallyConnected takes inputs (..., {sizes}); got {x.shape}")
        before = x.shape[: x.ndim - len(wanted)]
        matrices = params.reshape(-1, self.fan_out, self.fan_in)
        y = jnp.einsum("pmn,bpn->bpm", matrices, x.reshape(-1, len(matrices), self.fan_in))
        return y.reshape(*before, *self.places, self.fan_out)


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
        check_atom(self, "dim", "vocabulary")

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.vocabulary, self.dim)

    def free_space(self) -> Manifold:
        return Euclidean(L1ToRMS())

    def constraint(self) -> Manifold:
        return EmbeddingRows()

    def apply(self, params: Float[Array, "v d"], x: Num[Array, "..."]) -> Float[Array, "..."]:
        """The vectors of the tokens; a token outside of the vocabulary gives NaN."""
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"Embed takes whole numbers; got an input of dtype {x.dtype}")
        return params.at[x].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


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
        check_atom(self, "vocabulary", "dim")

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.vocabulary, self.dim)

    def free_space(self) -> Manifold:
        return Euclidean(L1ToRMS())

    def constraint(self) -> Manifold:
        return EmbeddingRows()

    def apply(self, params: Float[Array, "v d"], x: Float[Array, "..."]) -> Float[Array, "..."]:
        expect_features("Unembed", x, self.dim)
        return jnp.matmul(x, params.T) / self.dim


@dataclasses.dataclass(frozen=True)
class Conv2D(Atom):
    """A convolution (cross-correlation) of images `(..., height, width, channels)`, no bias.

    The kernel is `(kernel, kernel, out_channels, in_channels)`: one matrix for each tap. Its norm
    is `kernel**2` times the largest RMS-to-RMS norm of a tap. The norm of an image is the largest
    RMS norm of a pixel; with it the layer is well-normed at every stride and padding.

    Attributes:
      out_channels: channels of the output.
      in_channels: channels of the input.
      kernel: taps along each side.
      stride: pixels from one output pixel to the next.
      padding: zeros around the image, on all four sides. None: as many as keep the size at
        stride 1 (for an even kernel one more at the bottom and on the right).
      manifold: `Euclidean(ConvRMSToRMS())` (default), `Stiefel(FanRatio(1 / kernel**2))` tap by
        tap, or another that fits.
      mass: the share of learning.
    """

    out_channels: int
    in_channels: int
    kernel: int = 3
    stride: int = 1
    padding: int | None = None
    manifold: Manifold = Euclidean(ConvRMSToRMS())
    mass: float = 1.0

    def __post_init__(self):
        check_atom(self, "out_channels", "in_channels", "kernel", "stride")
        check_fields(self, padding="[0, inf)")

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.kernel, self.kernel, self.out_channels, self.in_channels)

    def free_space(self) -> Manifold:
        return Euclidean(ConvRMSToRMS())

    def constraint(self) -> Manifold:
        return Stiefel(FanRatio(1 / self.kernel**2))

    def apply(self, params: Float[Array, "k k m n"], x: Any) -> Float[Array, "..."]:
        expect_features("Conv2D", x, self.in_channels)
        if x.ndim < 3:
            raise ValueError(f"Conv2D takes (..., height, width, channels); got {x.shape}")
        pixels = x.reshape(-1, *x.shape[-3:])
        sides = (self.kernel - 1) // 2, self.kernel // 2
        pad = sides if self.padding is None else (self.padding, self.padding)
        y = jax.lax.conv_general_dilated(
            pixels,
            params,
            (self.stride, self.stride),
            (pad, pad),
            dimension_numbers=("NHWC", "HWOI", "NHWC"),
        )
        return y.reshape(*x.shape[:-3], *y.shape[1:])
