"""Bonds: activations, normalisation, and changes of the shape of images."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon._internal.matrices.arrays import Floats, nonzero_or_one, upcast
from manifoldmuon.modules._module import Bond


@dataclasses.dataclass(frozen=True)
class Abs(Bond):
    """The magnitude of every entry, with second derivative zero except at the kink."""

    entry: ClassVar = ("abs",)

    def forward(self, x: Floats) -> Floats:
        return jnp.abs(x)


@dataclasses.dataclass(frozen=True)
class ReLU(Bond):
    """`max(x, 0)`, with second derivative zero except at the kink.

    The default sensitivity 1 holds for every input, as in the Modula package. The paper's value,
    1/sqrt(2) (modular norm, arXiv:2405.14813, appendix B.2), holds if half of the entries are
    negative: `ReLU(ReLU.BALANCED)`.

    Attributes:
      sensitivity: the declared sensitivity.
    """

    sensitivity: float = 1.0
    BALANCED: ClassVar[float] = math.sqrt(0.5)
    entry: ClassVar = ("relu",)

    def forward(self, x: Floats) -> Floats:
        return jnp.maximum(x, 0)


@dataclasses.dataclass(frozen=True)
class GELU(Bond):
    """`x P(N(0,1) <= x)`, the Gaussian error linear unit, in its exact form.

    The published sensitivity is 1/sqrt(2), as for `ReLU`; for Gaussian inputs, a perturbation
    shrinks to 0.675 of its size. The bound for every input is `GELU.LIPSCHITZ` (1.1289), so that
    `GELU(GELU.LIPSCHITZ) / GELU.LIPSCHITZ` has sensitivity 1 everywhere. The sharpness is the
    largest second derivative, sqrt(2/pi), in the maximum norm.

    Attributes:
      sensitivity: the declared sensitivity.
    """

    sensitivity: float = ReLU.BALANCED
    gamma: ClassVar[float] = math.sqrt(2 / math.pi)
    # The slope at sqrt(2), the zero of the second derivative (2 - x**2) exp(-x**2/2) / sqrt(2 pi).
    LIPSCHITZ: ClassVar[float] = 0.5 * (1 + math.erf(1.0)) + math.exp(-1.0) / math.sqrt(math.pi)

    def forward(self, x: Floats) -> Floats:
        return jax.nn.gelu(x, approximate=False)


@dataclasses.dataclass(frozen=True)
class GroupSort(Bond):
    """Sort the entries of each group, the largest first (Anil et al., arXiv:1811.05381).

    The last axis of n entries is split into `n / size` groups; group `i` holds the entries `i`,
    `i + n / size`, `i + 2 n / size`, ... Sorting permutes entries: it keeps every norm that does
    not depend on their order, never increases the distance of two inputs, and keeps the length of
    gradients. `GroupSort(2)` is MaxMin: the larger entry of each pair, then the smaller.

    Attributes:
      size: entries of a group; must divide the length of the last axis.

    Examples:
      >>> GroupSort(2).forward(jnp.array([1.0, 2.0, 3.0, 0.0]))
      Array([3., 2., 1., 0.], dtype=float32)
    """

    size: int = 2
    entry: ClassVar = ("group_sort", "size")

    def forward(self, x: Floats) -> Floats:
        features = x.shape[-1]
        if features % self.size:
            raise ValueError(f"{features} features do not fall into groups of {self.size}")
        if self.size == 2:
            first, second = jnp.split(x, 2, axis=-1)
            halves = [jnp.maximum(first, second), jnp.minimum(first, second)]
            return jnp.concatenate(halves, axis=-1)
        groups = x.reshape(*x.shape[:-1], self.size, features // self.size)
        return jnp.sort(groups, axis=-2, descending=True).reshape(x.shape)


@dataclasses.dataclass(frozen=True)
class MeanSubtract(Bond):
    """The input minus its mean over the last axis."""

    entry: ClassVar = ("mean_subtract",)

    def forward(self, x: Floats) -> Floats:
        return x - jnp.mean(x, axis=-1, keepdims=True)


@dataclasses.dataclass(frozen=True)
class RMSDivide(Bond):
    """The input, divided by its root mean square over the last axis; zero stays zero.

    The sensitivity is `1 / ||x||_RMS` and the sharpness `2/sqrt(3) / ||x||_RMS**2`, so that the
    declared values, 1 and `2/sqrt(3)`, hold for inputs of RMS norm at least 1. Layer normalisation
    without gain or bias is `RMSDivide() @ MeanSubtract()`.
    """

    gamma: ClassVar[float] = 2 / math.sqrt(3)

    def forward(self, x: Floats) -> Floats:
        wide = upcast(x)
        # Divide by the largest magnitude first, or squares would over- or underflow. It cancels,
        # in the derivative too.
        top = jax.lax.stop_gradient(jnp.max(jnp.abs(wide), axis=-1, keepdims=True))
        scaled = wide / nonzero_or_one(top)
        square = jnp.mean(scaled**2, axis=-1, keepdims=True)
        return (scaled / jnp.sqrt(nonzero_or_one(square))).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class AveragePool(Bond):
    """Average images `(..., height, width, channels)` down to `rows` by `columns` pixels.

    Attributes:
      rows: height of the output in pixels; must divide the input's height.
      columns: width of the output in pixels; must divide the input's width.
    """

    rows: int = 1
    columns: int = 1
    entry: ClassVar = ("average_pool", "rows", "columns")

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
    """Merge the last axes into a single axis.

    The RMS norm of the result is at most the largest RMS norm over the last input axis.

    Attributes:
      axes: number of axes to merge; 3 for images.
    """

    axes: int = 3
    entry: ClassVar = ("flatten", "axes")

    def forward(self, x: Floats) -> Floats:
        if x.ndim < self.axes:
            raise ValueError(f"Flatten takes at least {self.axes} axes; got the shape {x.shape}")
        keep = x.ndim - self.axes
        return x.reshape(*x.shape[:keep], math.prod(x.shape[keep:]))
