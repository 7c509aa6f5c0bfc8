"""The layout language: which axes of an array are the fan-in and the fan-out of a matrix."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import optax

AxisNumbers = int | tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the fan-in, the fan-out and the taps of a weight are in an array.

    The array is rearranged to `(..., taps, fan_out, fan_in)`, several axes of one kind flattened
    into one (but for the taps, which stay apart), and results are moved back. All axes that are
    not named keep their order and come first: to a manifold of matrices they are independent
    copies.

    | array | layout |
    |---|---|
    | matrix (out, in), also a stack of them | `Layout()` |
    | Flax kernel (in, out) | `Layout(in_axes=-2, out_axes=-1)` |
    | fused heads (d_model, heads, head_dim) as one matrix | `Layout(in_axes=0, out_axes=(1, 2))` |
    | the same, one matrix per head | `Layout(in_axes=0, out_axes=2)` |
    | HWIO kernel as one matrix | `Layout(in_axes=(0, 1, 2), out_axes=3)` |
    | HWIO kernel, tap by tap | `Layout(in_axes=-2, out_axes=-1, taps=(-4, -3))` |
    | OIHW kernel as one matrix | `Layout(in_axes=(1, 2, 3), out_axes=0)` |
    | OIHW kernel, tap by tap | `Layout(in_axes=-3, out_axes=-4, taps=(-2, -1))` |

    Taps are matrices of one and the same layer. A manifold of matrices sees one point for each
    (so that naming them or not makes no difference to it), a manifold of kernels, such as
    `Euclidean(ConvRMSToRMS())`, one point with the taps in front, and automatic gradient descent
    one layer.

    The numbers are positions within the trailing `ndim` axes, from the front where they are
    positive and from the back where they are negative. All axes before those are leading axes.

    Attributes:
      in_axes: the axis, or axes, of the fan-in.
      out_axes: the axis, or axes, of the fan-out.
      taps: the axes of a convolution's taps.
      ndim: how many trailing axes make one array of this layout; 0, the default, stands for as
        many as the numbers reach. Positive numbers alone do not tell leading axes (a stack of
        layers) from trailing ones (the taps of OIHW), so that an array of more axes than they
        reach is refused unless `ndim` is said or the numbers are negative.

    Raises:
      ValueError: no axis, the same axis twice, numbers of both signs without `ndim`, or an
        `ndim` that does not reach them.
    """

    in_axes: AxisNumbers = -1
    out_axes: AxisNumbers = -2
    taps: AxisNumbers = ()
    ndim: int = 0
    # Whether the array has to have `ndim` axes, neither more nor less.
    _whole: bool = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self):
        named = {name: _as_tuple(name, getattr(self, name)) for name in _KINDS}
        every = [axis for axes in named.values() for axis in axes]
        if min(every) < 0 <= max(every) and self.ndim == 0:
            raise ValueError(
                f"{self._words()} count from both ends; use one sign, or say ndim, the number of "
                "axes of the array"
            )
        reach = max(max(every) + 1, -min(every), len(every))
        ndim = reach if self.ndim == 0 else self.ndim
        if ndim < reach:
            raise ValueError(f"ndim={ndim} is too small: {self._words()} need {reach}")
        if len({axis % ndim for axis in every}) < len(every):
            raise ValueError(f"{self._words()} name the same axis twice in an array of {ndim} axes")
        object.__setattr__(self, "_whole", self.ndim == 0 and min(every) >= 0)
        # Equal layouts compare equal, however they were written.
        for name, axes in named.items():
            object.__setattr__(self, name, tuple(axis % ndim - ndim for axis in axes))
        object.__setattr__(self, "ndim", ndim)

    @classmethod
    def from_muon(cls, dims: optax.contrib.MuonDimensionNumbers | None, ndim: int = 0) -> "Layout":
        """The layout that `optax.contrib.muon` is told by `MuonDimensionNumbers`.

        Args:
          dims: its `reduction_axis` is the fan-in, its `output_axis` the fan-out.
          ndim: the number of axes of the array, needed as in `Layout`.

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
        return cls(ins, outs, ndim=ndim)

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raises `ValueError` where an array of this shape has no such axes."""
        if len(shape) < self.ndim:
            raise ValueError(
                f"{self._words()} take an array of at least {self.ndim} axes; got the shape "
                f"{tuple(shape)}"
            )
        if self._whole and len(shape) > self.ndim:
            raise ValueError(
                f"the axis numbers reach {self.ndim} axes from the front, and the shape "
                f"{tuple(shape)} has {len(shape)}: count from the back with negative numbers, or "
                "say ndim"
            )

    def inner_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the rearranged array."""
        moved = tuple(shape[axis] for axis in self._order(len(shape)))
        ins, outs = len(_axes(self.in_axes)), len(_axes(self.out_axes))
        cut = len(shape) - ins
        return (*moved[: cut - outs], math.prod(moved[cut - outs : cut]), math.prod(moved[cut:]))

    def inward(self, x: Any) -> Any:
        """A JAX or NumPy array as `(..., taps, fan_out, fan_in)`."""
        return x.transpose(self._order(x.ndim)).reshape(self.inner_shape(x.shape))

    def outward(self, x: Any, shape: tuple[int, ...]) -> Any:
        """Undoes `inward` of an array of this shape."""
        order = self._order(len(shape))
        back = sorted(range(len(order)), key=order.__getitem__)
        return x.reshape(tuple(shape[axis] for axis in order)).transpose(back)

    def _order(self, rank: int) -> tuple[int, ...]:
        """The permutation that brings an array of `rank` axes into the inner order."""
        named = (*_axes(self.taps), *_axes(self.out_axes), *_axes(self.in_axes))
        places = tuple(rank + axis for axis in named)
        return (*(axis for axis in range(rank) if axis not in places), *places)

    def _words(self) -> str:
        given = {name: getattr(self, name) for name in _KINDS}
        return ", ".join(f"{name}={axes}" for name, axes in given.items() if axes != ())


_KINDS = ("in_axes", "out_axes", "taps")


def _axes(numbers: AxisNumbers) -> tuple[int, ...]:
    return (numbers,) if isinstance(numbers, int) else numbers


def _as_tuple(name: str, axes: AxisNumbers) -> tuple[int, ...]:
    """One axis or several as a tuple of numbers."""
    numbers = (axes,) if isinstance(axes, int) else tuple(axes)
    if not (numbers or name == "taps") or not all(isinstance(axis, int) for axis in numbers):
        raise ValueError(f"{name} must be an axis number or several; got {axes!r}")
    return numbers
