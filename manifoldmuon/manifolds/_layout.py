"""Layouts: the axes of an array that are the fan-in and the fan-out of a matrix."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable
from typing import Any

import optax

from manifoldmuon._internal.arguments import check_fields, check_number
from manifoldmuon._internal.values import Value

AxisNumbers = int | tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Layout(Value):
    """Axes of an array that hold the fan-in, the fan-out and the taps of a weight.

    The array is rearranged to `(..., taps, fan_out, fan_in)`: several axes of the fan-in or the
    fan-out are flattened, taps stay separate, and results are moved back. Unnamed axes keep their
    order and come first: a manifold of matrices treats them as independent copies. An axis that
    fuses several matrices, such as heads, or the gate and the input of a gated unit, is cut into
    blocks, which are independent copies, too. Leave an axis of experts, heads or layers unnamed.

    | array | layout |
    |---|---|
    | matrix (out, in); with a stack axis | `Layout()`; `Layout(ndim=3)` |
    | Flax kernel (in, out) | `Layout(in_axes=-2, out_axes=-1)` |
    | fused heads (d_model, heads, head_dim), as one matrix | `Layout(in_axes=0, out_axes=(1, 2))` |
    | fused heads (d_model, heads, head_dim), by heads | `Layout(in_axes=0, out_axes=2)` |
    | fused q, k, v (3 heads head_dim, d_model), by heads | `Layout(out_blocks=3 * heads)` |
    | fused q, k, v of grouped queries, by heads | `Layout(out_blocks=heads + 2 * kv_heads)` |
    | fused q, k, v as three whole matrices | `Layout(out_blocks=(q, k, v))`, with their lengths |
    | output projection (d_model, heads head_dim), by heads | `Layout(in_blocks=heads)` |
    | experts (experts, in, out), by expert | `Layout(in_axes=-2, out_axes=-1, ndim=3)` |
    | HWIO kernel, as one matrix | `Layout(in_axes=(0, 1, 2), out_axes=3)` |
    | HWIO kernel, tap by tap | `Layout(in_axes=-2, out_axes=-1, taps=(-4, -3))` |
    | OIHW kernel, as one matrix | `Layout(in_axes=(1, 2, 3), out_axes=0)` |
    | OIHW kernel, tap by tap | `Layout(in_axes=-3, out_axes=-4, taps=(-2, -1))` |

    Taps are matrices of the same layer. A manifold of matrices treats each tap as a point, named or
    not. A manifold of kernels, such as `Euclidean(ConvRMSToRMS())`, treats the kernel as a single
    point with as many leading axes of taps, and automatic gradient descent treats it as a single
    layer.

    Blocks are consecutive: the fan-out, its axes flattened in the order named, is cut into
    `out_blocks` equal parts, the fan-in into `in_blocks`. The rearranged array is then
    `(..., out_blocks, in_blocks, taps, fan_out, fan_in)` with the fans of a block; a count of 1
    adds no axis.

    As a tuple, `out_blocks` gives the lengths of unequal blocks along a single axis, such as q, k
    and v of grouped queries. Optimizers treat each block as a separate parameter: the blocks of
    `qkv/kernel` have the paths `qkv/kernel/0`, `qkv/kernel/1`, ... in states and tables.

    Axis numbers count within the trailing `ndim` axes, from the back if negative and from the front
    otherwise. All axes before these are leading axes: copies that `optim` warns of unless `ndim`
    covers them (see `Manifold.stacked`).

    Attributes:
      in_axes: the axis, or axes, of the fan-in.
      out_axes: the axis, or axes, of the fan-out.
      taps: the axes of a convolution's taps.
      ndim: the number of trailing axes of an array of this layout; 0, the default: up to the
        largest axis number. Positive numbers cannot tell leading axes (a stack of layers) from
        trailing axes (the taps of OIHW): if an array has more axes, set `ndim` or use negative
        numbers.
      in_blocks: the number of equal blocks along the fan-in.
      out_blocks: the number of equal blocks along the fan-out, or the lengths of unequal blocks.

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
    # Whether the array must have exactly `ndim` axes.
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
                f"{self._words()} mix positive and negative axis numbers; use one sign, or set "
                "ndim, the number of axes of the array"
            )
        reach = max(max(every) + 1, -min(every), len(every))
        ndim = reach if self.ndim == 0 else self.ndim
        if ndim < reach:
            raise ValueError(f"ndim={ndim} is too small: {self._words()} need {reach}")
        if len({axis % ndim for axis in every}) < len(every):
            raise ValueError(f"{self._words()} name the same axis twice in an array of {ndim} axes")
        object.__setattr__(self, "_whole", self.ndim == 0 and min(every) >= 0)
        # Normalise, so that equivalent layouts compare equal.
        for name, axes in named.items():
            object.__setattr__(self, name, tuple(axis % ndim - ndim for axis in axes))
        object.__setattr__(self, "ndim", ndim)
        if lengths and (len(_axes(self.out_axes)) > 1 or self.in_blocks > 1):
            raise ValueError(
                f"lengths as out_blocks={self.out_blocks} need a single axis in out_axes and "
                f"in_blocks=1; got out_axes={self.out_axes}, in_blocks={self.in_blocks}"
            )

    @property
    def blocks(self) -> tuple[tuple[int, int, int], ...]:
        """Return axis, start and end of each unequal block along the fan-out; empty without."""
        if isinstance(self.out_blocks, int):
            return ()
        axis, ends = _axes(self.out_axes)[0], itertools.accumulate(self.out_blocks)
        pairs = zip(self.out_blocks, ends, strict=True)
        return tuple([(axis, end - length, end) for length, end in pairs])

    def of_block(self) -> "Layout":
        """Return the layout of each unequal block, cut out of the array."""
        return dataclasses.replace(self, out_blocks=1)

    @classmethod
    def from_muon(cls, dims: optax.contrib.MuonDimensionNumbers | None, ndim: int = 0) -> "Layout":
        """Return the layout for dimension numbers of `optax.contrib.muon`.

        Args:
          dims: `reduction_axis` is the fan-in, `output_axis` the fan-out.
          ndim: the number of axes of the array, needed in the same cases as in `Layout`.

        Raises:
          TypeError: `dims` is None, Optax's mark for parameters that Muon leaves to Adam.
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
        """Raise `ValueError` if an array of this shape does not fit the layout."""
        if len(shape) < self.ndim:
            raise ValueError(
                f"{self._words()} take an array of at least {self.ndim} axes; got the shape "
                f"{tuple(shape)}"
            )
        if self._whole and len(shape) > self.ndim:
            raise ValueError(
                f"axis numbers from the front cover {self.ndim} axes, but the shape "
                f"{tuple(shape)} has {len(shape)}: use negative axis numbers, or set ndim"
            )

        *_, fan_out, fan_in = self._matrix_shape(shape)
        if isinstance(self.out_blocks, tuple):
            if sum(self.out_blocks) != fan_out:
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
        """Return the shape of the rearranged array; raise `ValueError` for unequal blocks."""
        self.check_shape(shape)
        *copies, fan_out, fan_in = self._matrix_shape(shape)
        before = len(copies) - len(_axes(self.taps))
        blocks = (n for n in (self._out_blocks, self.in_blocks) if n > 1)
        matrix = fan_out // self._out_blocks, fan_in // self.in_blocks
        return (*copies[:before], *blocks, *copies[before:], *matrix)

    def inward(self, x: Any) -> Any:
        """Rearrange a JAX or NumPy array to `(..., blocks, taps, fan_out, fan_in)`."""
        matrices = x.transpose(self._order(x.ndim))
        if self._blocked:
            matrices = matrices.reshape(self._cut_shape(x.shape)).transpose(self._moves(x.shape))
        return matrices.reshape(self.inner_shape(x.shape))

    def outward(self, x: Any, shape: tuple[int, ...]) -> Any:
        """Undo `inward` for an array of the original shape `shape`."""
        if self._blocked:
            cut, moves = self._cut_shape(shape), self._moves(shape)
            x = x.reshape(tuple(cut[axis] for axis in moves)).transpose(_invert(moves))
        order = self._order(len(shape))
        return x.reshape(tuple(shape[axis] for axis in order)).transpose(_invert(order))

    def permutation(self, rank: int) -> tuple[int, ...] | None:
        """Return the source of each axis of the rearranged array; None if axes merge or are cut."""
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
        """Return `(..., taps, fan_out, fan_in)`, before the cut into blocks."""
        sizes = tuple(shape[axis] for axis in self._order(len(shape)))
        ins, outs = len(_axes(self.in_axes)), len(_axes(self.out_axes))
        cut = len(shape) - ins
        return (*sizes[: cut - outs], math.prod(sizes[cut - outs : cut]), math.prod(sizes[cut:]))

    def _cut_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return `(..., taps, out_blocks, fan_out, in_blocks, fan_in)`."""
        *copies, fan_out, fan_in = self._matrix_shape(shape)
        outs = self._out_blocks, fan_out // self._out_blocks
        return (*copies, *outs, self.in_blocks, fan_in // self.in_blocks)

    def _moves(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the permutation of the cut shape that moves blocks before taps and matrices."""
        copies = len(self._matrix_shape(shape)) - 2
        before = copies - len(_axes(self.taps))
        taps = range(before, copies)
        return (*range(before), copies, copies + 2, *taps, copies + 1, copies + 3)

    def _order(self, rank: int) -> tuple[int, ...]:
        """Return the permutation of an array of `rank` axes into the inner order."""
        named = (*_axes(self.taps), *_axes(self.out_axes), *_axes(self.in_axes))
        positions = tuple(rank + axis for axis in named)
        return (*(axis for axis in range(rank) if axis not in positions), *positions)

    def __repr__(self) -> str:
        """Show the fields that differ from the default, single axes as numbers."""
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


def _invert(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def _as_tuple(name: str, axes: AxisNumbers) -> tuple[int, ...]:
    """Return axis numbers as a tuple."""
    numbers = tuple(axes) if isinstance(axes, Iterable) else (axes,)
    if not (numbers or name == "taps") or not all(type(axis) is int for axis in numbers):
        raise ValueError(f"{name} must be an axis number or several; got {axes!r}")
    return numbers
