"""The layout language: which axes of an array are the fan-in and the fan-out of a matrix."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import optax

from manifoldmuon._internal.arguments import check_fields, check_number
from manifoldmuon._internal.paths import Cut
from manifoldmuon._internal.values import Value

AxisNumbers = int | tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Layout(Value):
    """Axes of an array that hold the fan-in, the fan-out and the taps of a weight.

    The array is rearranged to `(..., taps, fan_out, fan_in)`, several axes of one kind flattened
    into one (except the taps, which stay apart), and results are moved back. All axes that are
    not named keep their order and come first: to a manifold of matrices they are independent
    copies. So are the blocks into which one axis that holds several matrices is cut: heads that are
    fused into one axis, or the gate and the input of a gated unit. Experts, like heads and layers
    on an axis of their own, are left unnamed.

    | array | layout |
    |---|---|
    | matrix (out, in), also a stack of them | `Layout()` |
    | Flax kernel (in, out) | `Layout(in_axes=-2, out_axes=-1)` |
    | fused heads (d_model, heads, head_dim) as one matrix | `Layout(in_axes=0, out_axes=(1, 2))` |
    | the same, one matrix per head | `Layout(in_axes=0, out_axes=2)` |
    | fused q, k, v (3 heads head_dim, d_model), by heads | `Layout(out_blocks=3 * heads)` |
    | fused q, k, v of grouped queries, by heads | `Layout(out_blocks=heads + 2 * kv_heads)` |
    | fused q, k, v as three whole matrices | `Layout(out_blocks=(q, k, v))`, with their lengths |
    | output projection (d_model, heads head_dim), by heads | `Layout(in_blocks=heads)` |
    | experts (experts, in, out), one matrix each | `Layout(in_axes=-2, out_axes=-1)` |
    | HWIO kernel as one matrix | `Layout(in_axes=(0, 1, 2), out_axes=3)` |
    | HWIO kernel, tap by tap | `Layout(in_axes=-2, out_axes=-1, taps=(-4, -3))` |
    | OIHW kernel as one matrix | `Layout(in_axes=(1, 2, 3), out_axes=0)` |
    | OIHW kernel, tap by tap | `Layout(in_axes=-3, out_axes=-4, taps=(-2, -1))` |

    Taps are matrices of one and the same layer. A manifold of matrices sees one point for each
    (so that naming them or not makes no difference to it), a manifold of kernels, such as
    `Euclidean(ConvRMSToRMS())`, one point with the taps in front, and automatic gradient descent
    one layer.

    Blocks are consecutive: the fan-out, its axes flattened in the order in which they are named, is
    cut into `out_blocks` equal parts, the fan-in into `in_blocks`. The rearranged array is then
    `(..., out_blocks, in_blocks, taps, fan_out, fan_in)`, without those of the two that are 1, and
    the fans are those of one block.

    With a tuple, `out_blocks` are the lengths of unequal blocks along one axis, such as q, k and v
    of grouped queries. Optimizers see each block as a parameter of its own: the blocks of
    `qkv/kernel` have the paths `qkv/kernel/0`, `qkv/kernel/1`, ... in states and tables.

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
      in_blocks: how many matrices lie side by side along the fan-in.
      out_blocks: how many matrices lie one below the other along the fan-out, or their lengths.

    Raises:
      ValueError: no axis, the same axis twice, numbers of both signs without `ndim`, an `ndim`
        that does not reach them, less than one block, or unequal blocks along several axes.

    Examples:
      >>> Layout(in_axes=(0, 1, 2), out_axes=3).inner_shape((3, 3, 16, 32))  # HWIO
      (32, 144)
    """

    in_axes: AxisNumbers = -1
    out_axes: AxisNumbers = -2
    taps: AxisNumbers = ()
    ndim: int = 0
    in_blocks: int = 1
    out_blocks: int | tuple[int, ...] = 1
    # Whether the array has to have `ndim` axes, neither more nor less.
    _whole: bool = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self):
        lengths = self.out_blocks if isinstance(self.out_blocks, tuple) else ()
        count = len(lengths) if isinstance(self.out_blocks, tuple) else self.out_blocks
        check_number("Layout.out_blocks", count, within="[1, inf)", whole=True)
        for length in lengths:
            check_number("Layout.out_blocks: a length", length, within="[1, inf)", whole=True)
        check_fields(self, ndim="[0, inf)", in_blocks="[1, inf)")
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
        if lengths and (len(_axes(self.out_axes)) > 1 or self.in_blocks > 1):
            raise ValueError(
                f"out_blocks={self.out_blocks} are lengths along one axis, without in_blocks; got "
                f"out_axes={self.out_axes}, in_blocks={self.in_blocks}"
            )

    @property
    def cut(self) -> Cut | None:
        """Unequal blocks along the axis of the fan-out, or None."""
        if isinstance(self.out_blocks, int):
            return None
        return Cut(_axes(self.out_axes)[0], self.out_blocks)

    def of_parts(self) -> "Layout":
        """Return the layout of each unequal block, cut out of the array."""
        return dataclasses.replace(self, out_blocks=1)

    @classmethod
    def from_muon(cls, dims: optax.contrib.MuonDimensionNumbers | None, ndim: int = 0) -> "Layout":
        """Return the layout of the dimension numbers that `optax.contrib.muon` takes.

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
        """Raise `ValueError` where an array of this shape has no such axes."""
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

        *_, fan_out, fan_in = self._matrix_shape(shape)
        if self.cut:
            if sum(self.cut.lengths) != fan_out:
                raise ValueError(
                    f"out_blocks={self.out_blocks} must add up to the fan of {fan_out} that "
                    f"{self._words()} make of the shape {tuple(shape)}"
                )
            return
        for name, blocks, fan in (
            ("in_blocks", self.in_blocks, fan_in),
            ("out_blocks", self._out_blocks, fan_out),
        ):
            if fan % blocks:
                raise ValueError(
                    f"{name}={blocks} does not divide the fan of {fan} that {self._words()} make"
                    f" of the shape {tuple(shape)}"
                )

    def inner_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the rearranged array.

        Raises:
          ValueError: the blocks are unequal, so that no one array holds them.
        """
        *copies, fan_out, fan_in = self._matrix_shape(shape)
        before = len(copies) - len(_axes(self.taps))
        blocks = (n for n in (self._out_blocks, self.in_blocks) if n > 1)
        matrix = fan_out // self._out_blocks, fan_in // self.in_blocks
        return (*copies[:before], *blocks, *copies[before:], *matrix)

    def inward(self, x: Any) -> Any:
        """Return a JAX or NumPy array as `(..., blocks, taps, fan_out, fan_in)`."""
        matrices = x.transpose(self._order(x.ndim))
        if self._blocked:
            matrices = matrices.reshape(self._cut_shape(x.shape)).transpose(self._moves(x.shape))
        return matrices.reshape(self.inner_shape(x.shape))

    def outward(self, x: Any, shape: tuple[int, ...]) -> Any:
        """Undo `inward` of an array of this shape."""
        if self._blocked:
            cut, moves = self._cut_shape(shape), self._moves(shape)
            x = x.reshape(tuple(cut[axis] for axis in moves)).transpose(_inverse(moves))
        order = self._order(len(shape))
        return x.reshape(tuple(shape[axis] for axis in order)).transpose(_inverse(order))

    def permutation(self, rank: int) -> tuple[int, ...] | None:
        """Return the axis that each axis of the rearranged array is, or None if axes merge."""
        fans = len(_axes(self.in_axes)), len(_axes(self.out_axes))
        return None if self._blocked or fans != (1, 1) else self._order(rank)

    @property
    def _blocked(self) -> bool:
        return self.in_blocks * self._out_blocks > 1

    @property
    def _out_blocks(self) -> int:
        if isinstance(self.out_blocks, tuple):
            raise ValueError(f"here out_blocks must be a number of equal blocks; got {self!r}")
        return self.out_blocks

    def _matrix_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """`(..., taps, fan_out, fan_in)`, with blocks still side by side."""
        moved = tuple(shape[axis] for axis in self._order(len(shape)))
        ins, outs = len(_axes(self.in_axes)), len(_axes(self.out_axes))
        cut = len(shape) - ins
        return (*moved[: cut - outs], math.prod(moved[cut - outs : cut]), math.prod(moved[cut:]))

    def _cut_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """`(..., taps, out_blocks, fan_out, in_blocks, fan_in)`."""
        *copies, fan_out, fan_in = self._matrix_shape(shape)
        outs = self._out_blocks, fan_out // self._out_blocks
        return (*copies, *outs, self.in_blocks, fan_in // self.in_blocks)

    def _moves(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The permutation of the cut shape that brings blocks before taps and matrices."""
        copies = len(self._matrix_shape(shape)) - 2
        before = copies - len(_axes(self.taps))
        taps = range(before, copies)
        return (*range(before), copies, copies + 2, *taps, copies + 1, copies + 3)

    def _order(self, rank: int) -> tuple[int, ...]:
        """The permutation that brings an array of `rank` axes into the inner order."""
        named = (*_axes(self.taps), *_axes(self.out_axes), *_axes(self.in_axes))
        places = tuple(rank + axis for axis in named)
        return (*(axis for axis in range(rank) if axis not in places), *places)

    def __repr__(self) -> str:
        """Show what differs from the default, one axis as a number."""
        axes = {name: _axes(getattr(self, name)) for name in _KINDS}
        shown: dict[str, Any] = {k: v[0] if len(v) == 1 else v for k, v in axes.items()}
        shown["ndim"] = 0 if self.ndim == -min(sum(axes.values(), ())) else self.ndim
        shown |= {"in_blocks": self.in_blocks, "out_blocks": self.out_blocks}
        differ = [f"{k}={v}" for k, v in shown.items() if v != getattr(Layout, k)]
        return f"Layout({', '.join(differ)})"

    def _words(self) -> str:
        given = {name: getattr(self, name) for name in _KINDS}
        return ", ".join(f"{name}={axes}" for name, axes in given.items() if axes != ())


_KINDS = ("in_axes", "out_axes", "taps")


def _axes(numbers: AxisNumbers) -> tuple[int, ...]:
    return (numbers,) if isinstance(numbers, int) else numbers


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def _as_tuple(name: str, axes: AxisNumbers) -> tuple[int, ...]:
    """Return one axis or several as a tuple of numbers."""
    numbers = tuple(axes) if isinstance(axes, Iterable) else (axes,)
    if not (numbers or name == "taps") or not all(type(axis) is int for axis in numbers):
        raise ValueError(f"{name} must be an axis number or several; got {axes!r}")
    return numbers
