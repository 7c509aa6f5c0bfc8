"""The layout wrapper: which axes of an array are the fan-in and the fan-out of a matrix."""

import dataclasses
import math

import chex
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray, Shaped

from manifoldmuon.manifolds._manifold import Manifold, Steepest
from manifoldmuon.norms import Effort


@dataclasses.dataclass(frozen=True)
class Axes(Manifold):
    """A manifold of `(fan_out, fan_in)` matrices, for arrays that are laid out differently.

    The array is rearranged to `(..., remaining axes, fan_out, fan_in)`, several axes of one kind
    flattened into one, handed to the inner manifold, and the results are moved back:

    | array | wrapper |
    |---|---|
    | Flax kernel (in, out) | `Axes(m, in_axes=0, out_axes=1)` or `Axes.transposed(m)` |
    | stack of them (layers, in, out) | `Axes(m, in_axes=-2, out_axes=-1)` |
    | fused heads (d_model, heads, head_dim) | `Axes(m, in_axes=0, out_axes=(1, 2))` |
    | the same, one matrix per head | `Axes(m, in_axes=0, out_axes=2)` |
    | HWIO kernel as one matrix | `Axes(m, in_axes=(0, 1, 2), out_axes=3)` |
    | HWIO kernel, tap by tap | `Axes(m, in_axes=2, out_axes=3)` |
    | OIHW kernel as one matrix | `Axes(m, in_axes=(1, 2, 3), out_axes=0)` |
    | OIHW kernel, tap by tap | `Axes(m, in_axes=-3, out_axes=-4)` |
    | embedding table (d, vocabulary) | `Axes.transposed(EmbeddingRows())` |

    Remaining axes keep their order. To a manifold of matrices they are independent copies, so
    that `norm`, `distance`, `residual` and `gap` have one number for each; to a manifold whose
    points have more axes (`Euclidean(ConvRMSToRMS())`, one point per kernel) the last of them
    are the taps.

    The numbers are positions within the trailing `ndim` axes, from the front where they are
    positive and from the back where they are negative. All axes before those are leading axes.

    Attributes:
      manifold: what the rearranged array belongs to; its points have at least two axes.
      in_axes: the axis, or axes, that make the last axis of the inner point.
      out_axes: the axis, or axes, that make the last but one.
      ndim: how many trailing axes make one array of this layout; 0, the default, stands for as
        many as the numbers reach. Positive numbers alone do not tell leading axes (a stack of
        layers) from trailing ones (the taps of OIHW), so that an array of more axes than they
        reach is refused unless `ndim` is said or the numbers are negative.
    """

    manifold: Manifold
    in_axes: int | tuple[int, ...]
    out_axes: int | tuple[int, ...]
    ndim: int = 0
    _whole: bool = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self):
        if self.manifold.ndim < 2:
            raise ValueError(
                f"Axes arranges matrices, but a point of {type(self.manifold).__name__} has "
                f"{self.manifold.ndim} axes; use that manifold without Axes"
            )
        ins, outs = _as_tuple("in_axes", self.in_axes), _as_tuple("out_axes", self.out_axes)
        named = ins + outs
        mixed = min(named) < 0 <= max(named)
        if mixed and self.ndim == 0:
            raise ValueError(
                f"in_axes={self.in_axes} and out_axes={self.out_axes} count from both ends; "
                "use one sign, or say ndim, the number of axes of the array"
            )
        reach = max(max(named) + 1, -min(named), len(named) + self.manifold.ndim - 2)
        ndim = reach if self.ndim == 0 else self.ndim
        if ndim < reach:
            raise ValueError(
                f"ndim={ndim} is too small: in_axes={self.in_axes}, out_axes={self.out_axes} and "
                f"a manifold whose points have {self.manifold.ndim} axes need {reach}"
            )
        ins, outs = (tuple(axis % ndim for axis in axes) for axes in (ins, outs))
        if len(set(ins + outs)) < len(named):
            raise ValueError(
                f"in_axes={self.in_axes} and out_axes={self.out_axes} name the same axis twice "
                f"in an array of {ndim} axes"
            )
        # Equal layouts compare equal, however they were written: same-shaped leaves with equal
        # manifolds are solved together.
        object.__setattr__(self, "in_axes", tuple(axis - ndim for axis in ins))
        object.__setattr__(self, "out_axes", tuple(axis - ndim for axis in outs))
        object.__setattr__(self, "_whole", self.ndim == 0 and min(named) >= 0)
        object.__setattr__(self, "ndim", ndim)

    @classmethod
    def transposed(cls, manifold: Manifold) -> "Axes":
        """The trailing two axes swapped: Flax kernels (in, out), tables (d, vocabulary)."""
        return cls(manifold, in_axes=-2, out_axes=-1)

    @classmethod
    def from_muon(
        cls, manifold: Manifold, dims: optax.contrib.MuonDimensionNumbers | None, ndim: int = 0
    ) -> "Axes":
        """The layout that `optax.contrib.muon` is told by `MuonDimensionNumbers`.

        Args:
          manifold: what the rearranged array belongs to.
          dims: its `reduction_axis` is the fan-in, its `output_axis` the fan-out.
          ndim: the number of axes of the array, needed as in `Axes`.

        Raises:
          TypeError: `dims` is None, with which Optax marks parameters that Muon leaves to Adam.
        """
        if dims is None:
            raise TypeError(
                "dims is None: optax.contrib.muon leaves such a parameter to Adam, and it has no "
                "matrix layout; give it Euclidean() or another optimizer"
            )
        ins, outs = (
            axes if isinstance(axes, int) else tuple(axes)
            for axes in (dims.reduction_axis, dims.output_axis)
        )
        return cls(manifold, ins, outs, ndim)

    @property
    def flat(self) -> bool:
        return self.manifold.flat

    def inner(self, first: Float[Array, "..."], second: Float[Array, "..."]) -> Float[Array, "..."]:
        return self.manifold.inner(self._inward(first), self._inward(second))

    def spread(self, numbers: Shaped[Array, "..."], shape: tuple[int, ...]) -> Shaped[Array, "..."]:
        inner = self._inner_shape(tuple(shape))
        full = jnp.broadcast_to(self.manifold.spread(numbers, inner), inner)
        return self._outward(full, tuple(shape))

    def check_shape(self, shape: tuple[int, ...]) -> None:
        if len(shape) < self.ndim:
            raise ValueError(
                f"in_axes={self.in_axes} and out_axes={self.out_axes} take an array of at least "
                f"{self.ndim} axes; got the shape {tuple(shape)}"
            )
        if self._whole and len(shape) > self.ndim:
            raise ValueError(
                f"the axis numbers given to Axes reach {self.ndim} axes from the front, and the "
                f"shape {tuple(shape)} has {len(shape)}: count from the back with negative "
                f"numbers, or say ndim"
            )
        inner = self._inner_shape(tuple(shape))
        try:
            self.manifold.check_shape(inner)
        except ValueError as error:
            raise ValueError(
                f"{error} (Axes made that of the shape {tuple(shape)}, by in_axes={self.in_axes} "
                f"and out_axes={self.out_axes})"
            ) from None

    def project(self, point: Float[Array, "..."]) -> Float[Array, "..."]:
        return self._outward(self.manifold.project(self._inward(point)), point.shape)

    def tangent(
        self, point: Float[Array, "..."], vector: Float[Array, "..."]
    ) -> Float[Array, "..."]:
        part = self.manifold.tangent(self._inward(point), self._inward(vector))
        return self._outward(part, vector.shape)

    def norm(self, vector: Float[Array, "..."]) -> Float[Array, "..."]:
        return self.manifold.norm(self._inward(vector))

    def init_carried(self, shape: tuple[int, ...]) -> chex.ArrayTree:
        return self.manifold.init_carried(self._inner_shape(tuple(shape)))

    def carried_norm(
        self, vector: Float[Array, "..."], carried: chex.ArrayTree, effort: Effort
    ) -> tuple[Float[Array, "..."], chex.ArrayTree]:
        return self.manifold.carried_norm(self._inward(vector), carried, effort)

    def init_dual(self, shape: tuple[int, ...]) -> chex.ArrayTree:
        return self.manifold.init_dual(self._inner_shape(tuple(shape)))

    def steepest(
        self, point: Float[Array, "..."], grad: Float[Array, "..."], dual: chex.ArrayTree
    ) -> Steepest:
        answer = self.manifold.steepest(self._inward(point), self._inward(grad), dual)
        return answer._replace(direction=self._outward(answer.direction, grad.shape))

    def retract(
        self, point: Float[Array, "..."], vector: Float[Array, "..."]
    ) -> Float[Array, "..."]:
        moved = self.manifold.retract(self._inward(point), self._inward(vector))
        return self._outward(moved, point.shape)

    def random_point(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype) -> Float[Array, "..."]:
        self.check_shape(shape)
        inner = self.manifold.random_point(key, self._inner_shape(tuple(shape)), dtype)
        return self._outward(inner, tuple(shape))

    def distance(self, point: Float[Array, "..."]) -> Float[Array, "..."]:
        return self.manifold.distance(self._inward(point))

    def _order(self, rank: int) -> tuple[int, ...]:
        """The permutation that brings an array of `rank` axes into the inner order."""
        named = tuple(rank + axis for axis in (*self._outs, *self._ins))
        return (*(axis for axis in range(rank) if axis not in named), *named)

    def _inner_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the rearranged array."""
        moved = tuple(shape[axis] for axis in self._order(len(shape)))
        cut = len(shape) - len(self._ins)
        rest = cut - len(self._outs)
        return (*moved[:rest], math.prod(moved[rest:cut]), math.prod(moved[cut:]))

    @property
    def _ins(self) -> tuple[int, ...]:
        return _as_tuple("in_axes", self.in_axes)

    @property
    def _outs(self) -> tuple[int, ...]:
        return _as_tuple("out_axes", self.out_axes)

    def _inward(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return x.transpose(self._order(x.ndim)).reshape(self._inner_shape(x.shape))

    def _outward(self, x: Shaped[Array, "..."], shape: tuple[int, ...]) -> Shaped[Array, "..."]:
        order = self._order(len(shape))
        back = sorted(range(len(order)), key=order.__getitem__)
        return x.reshape(tuple(shape[axis] for axis in order)).transpose(back)


def _as_tuple(name: str, axes: int | tuple[int, ...]) -> tuple[int, ...]:
    """One axis or several as a tuple of numbers."""
    numbers = (axes,) if isinstance(axes, int) else tuple(axes)
    if not numbers or not all(isinstance(axis, int) for axis in numbers):
        raise ValueError(f"{name} must be an axis number or several; got {axes!r}")
    return numbers
