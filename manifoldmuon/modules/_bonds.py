"""Bonds: modules without weights. Nonlinearities, normalisation, and moving entries about."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from manifoldmuon._internal.arguments import check_fields, check_number
from manifoldmuon._internal.arrays import nonzero_or_one, upcast
from manifoldmuon.modules._algebra import Bond, Module

BALANCED = math.sqrt(0.5)
"""How much a ReLU shrinks a perturbation where half of its inputs are negative."""


@dataclasses.dataclass(frozen=True)
class Abs(Bond):
    """The magnitude of every entry. Its second derivative is zero but for the kink."""

    sensitivity: ClassVar[float] = 1.0
    gamma: ClassVar[float] = 0.0

    def forward(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return jnp.abs(x)


@dataclasses.dataclass(frozen=True)
class ReLU(Bond):
    """`max(x, 0)`. Its second derivative is zero but for the kink.

    The default sensitivity 1 is the bound that holds for every input, as in the Modula package; the
    one of the paper, 1/sqrt(2) (modular norm, arXiv:2405.14813, appendix B.2), is that of inputs
    with balanced signs: `ReLU(BALANCED)`.

    Attributes:
      sensitivity: what is declared.
    """

    sensitivity: float = 1.0
    gamma: ClassVar[float] = 0.0

    def __post_init__(self):
        check_fields(self, sensitivity="[0, inf)")

    def forward(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return jnp.maximum(x, 0)


@dataclasses.dataclass(frozen=True)
class ScaledReLU(Bond):
    """`sqrt(2) max(x, 0)`: keeps the RMS norm of inputs with balanced signs.

    Attributes:
      sensitivity: what is declared: 1, or sqrt(2) for a bound at every input.
    """

    sensitivity: float = 1.0
    gamma: ClassVar[float] = 0.0

    def __post_init__(self):
        check_fields(self, sensitivity="[0, inf)")

    def forward(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return math.sqrt(2) * jnp.maximum(x, 0)


@dataclasses.dataclass(frozen=True)
class GELU(Bond):
    """`x P(N(0,1) <= x)`, the Gaussian error linear unit, in its exact form.

    The published sensitivity is that of `ReLU`; a Gaussian input shrinks a perturbation to 0.675
    of its size. The bound that holds for every input is `GELU.LIPSCHITZ` (1.1289), so that
    `GELU(GELU.LIPSCHITZ) / GELU.LIPSCHITZ` has sensitivity 1 everywhere. The sharpness is the
    largest second derivative, sqrt(2/pi), in the maximum norm.

    Attributes:
      sensitivity: what is declared.
    """

    sensitivity: float = BALANCED
    gamma: ClassVar[float] = math.sqrt(2 / math.pi)
    # At x = sqrt(2), where the second derivative (2 - x**2) exp(-x**2 / 2) / sqrt(2 pi) vanishes.
    LIPSCHITZ: ClassVar[float] = 0.5 * (1 + math.erf(1.0)) + math.exp(-1.0) / math.sqrt(math.pi)

    def __post_init__(self):
        check_fields(self, sensitivity="[0, inf)")

    def forward(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return jax.nn.gelu(x, approximate=False)


@dataclasses.dataclass(frozen=True)
class Softmax(Bond):
    """`softmax(scale * x)` over the last axis.

    From the largest entry of a perturbation to the sum of the output's, the sensitivity is the
    scale, attained where two entries share the probability; the sharpness is its square, attained
    where four do. Entries of minus infinity get probability zero.

    Attributes:
      scale: the inverse temperature; not negative.
    """

    scale: float = 1.0

    def __post_init__(self):
        check_fields(self, scale="[0, inf)")

    @property
    def sensitivity(self) -> float:
        return self.scale

    @property
    def gamma(self) -> float:
        return self.scale**2

    def forward(self, x: Any) -> Any:
        return jax.nn.softmax(self.scale * x, axis=-1)


Axis = int | tuple[int, ...]


def _check_axis(name: str, axis: Axis) -> None:
    for number in axis if isinstance(axis, tuple) else (axis,):
        check_number(f"{name}.axis", number, whole=True)


@dataclasses.dataclass(frozen=True)
class MeanSubtract(Bond):
    """The input, less its mean.

    Attributes:
      axis: over which axes; the default is the last.
    """

    axis: Axis = -1
    sensitivity: ClassVar[float] = 1.0
    gamma: ClassVar[float] = 0.0

    def __post_init__(self):
        _check_axis("MeanSubtract", self.axis)

    def forward(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return x - jnp.mean(x, axis=self.axis, keepdims=True)


@dataclasses.dataclass(frozen=True)
class RMSDivide(Bond):
    """The input, divided by its root mean square; zero stays zero.

    The sensitivity is `1 / ||x||_RMS`, so that the declared 1 holds for inputs of RMS norm at
    least 1; in the same way the sharpness is `2/sqrt(3) / ||x||_RMS**2`.

    Attributes:
      axis: over which axes; the default is the last.
    """

    axis: Axis = -1
    sensitivity: ClassVar[float] = 1.0
    gamma: ClassVar[float] = 2 / math.sqrt(3)

    def __post_init__(self):
        _check_axis("RMSDivide", self.axis)

    def forward(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        wide = upcast(x)
        # By the largest magnitude first: no square over- or underflows. The quotient does not
        # depend on it, and neither does the derivative.
        top = jax.lax.stop_gradient(jnp.max(jnp.abs(wide), axis=self.axis, keepdims=True))
        scaled = wide / nonzero_or_one(top)
        square = jnp.mean(scaled**2, axis=self.axis, keepdims=True)
        return (scaled / jnp.sqrt(nonzero_or_one(square))).astype(x.dtype)


def LayerNorm(axis: Axis = -1) -> Module:
    """`RMSDivide(axis) @ MeanSubtract(axis)`: mean zero and RMS norm 1, without gain or bias.

    Args:
      axis: over which axes; the default is the last.
    """
    return RMSDivide(axis) @ MeanSubtract(axis)


@dataclasses.dataclass(frozen=True)
class SplitHeads(Bond):
    """`(..., sequence, heads * dim)` to `(..., heads, sequence, dim)`.

    An isometry where the norm is the root mean square over the heads. In the largest norm of a
    head, which attention takes, a vector that lies in one head alone counts sqrt(heads) times as
    much; the declared 1 is that of vectors spread evenly.

    Attributes:
      heads: how many.
    """

    heads: int
    sensitivity: ClassVar[float] = 1.0
    gamma: ClassVar[float] = 0.0

    def __post_init__(self):
        check_fields(self, heads="[1, inf)")

    def forward(self, x: Float[Array, "*batch t d"]) -> Float[Array, "*batch h t e"]:
        if x.shape[-1] % self.heads:
            raise ValueError(f"{x.shape[-1]} features do not split into {self.heads} heads")
        split = x.reshape(*x.shape[:-1], self.heads, x.shape[-1] // self.heads)
        return jnp.swapaxes(split, -3, -2)


@dataclasses.dataclass(frozen=True)
class MergeHeads(Bond):
    """`(..., heads, sequence, dim)` to `(..., sequence, heads * dim)`: undoes `SplitHeads`."""

    sensitivity: ClassVar[float] = 1.0
    gamma: ClassVar[float] = 0.0

    def forward(self, x: Float[Array, "*batch h t e"]) -> Float[Array, "*batch t d"]:
        moved = jnp.swapaxes(x, -3, -2)
        return moved.reshape(*moved.shape[:-2], math.prod(moved.shape[-2:]))


@dataclasses.dataclass(frozen=True)
class AveragePool(Bond):
    """Images `(..., height, width, channels)` averaged down to `rows` by `columns` pixels.

    Attributes:
      rows: pixels of the output, from top to bottom; must divide the height.
      columns: pixels of the output, from left to right; must divide the width.
    """

    rows: int = 1
    columns: int = 1
    sensitivity: ClassVar[float] = 1.0
    gamma: ClassVar[float] = 0.0

    def __post_init__(self):
        check_fields(self, rows="[1, inf)", columns="[1, inf)")

    def forward(self, x: Float[Array, "*batch h w c"]) -> Float[Array, "*batch r s c"]:
        *batch, height, width, channels = x.shape
        if height % self.rows or width % self.columns:
            raise ValueError(
                f"an image of {height} by {width} pixels does not divide into {self.rows} by "
                f"{self.columns}"
            )
        rows, columns = height // self.rows, width // self.columns
        blocks = x.reshape(*batch, self.rows, rows, self.columns, columns, channels)
        return jnp.mean(blocks, axis=(-4, -2))


@dataclasses.dataclass(frozen=True)
class Flatten(Bond):
    """The last axes as one: the RMS norm of all is at most the largest of the parts.

    Attributes:
      axes: how many; 3 for images.
    """

    axes: int = 3
    sensitivity: ClassVar[float] = 1.0
    gamma: ClassVar[float] = 0.0

    def __post_init__(self):
        check_fields(self, axes="[1, inf)")

    def forward(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        if x.ndim < self.axes:
            raise ValueError(f"Flatten takes at least {self.axes} axes; got the shape {x.shape}")
        keep = x.ndim - self.axes
        return x.reshape(*x.shape[:keep], math.prod(x.shape[keep:]))


@dataclasses.dataclass(frozen=True)
class Positions(Bond):
    """Tokens `(..., sequence)` to the number of their place: 0, 1, 2, ...

    The sensitivity is declared as 1, that of the tokens beside it, so that token and position
    embeddings sum to a module of sensitivity 1 (modular norm, arXiv:2405.14813, appendix B.7).
    It is in truth 0.
    """

    sensitivity: ClassVar[float] = 1.0
    gamma: ClassVar[float] = 0.0

    def forward(self, x: Int[Array, "*batch t"]) -> Int[Array, "*batch t"]:
        return jnp.broadcast_to(jnp.arange(x.shape[-1], dtype=x.dtype), x.shape)
