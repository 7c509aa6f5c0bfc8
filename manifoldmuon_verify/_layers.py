"""Layers: their maps, Lipschitz constants and rounding errors.

Each kind has a map and a bound L on its Lipschitz constant in the Euclidean norm, computed from the
actual weights. For an input of norm at most `size`, the rounding error is at most
`gamma(terms) (gain size + offset)` plus an underflow term. The gain bounds the map with all its
terms in magnitude, for every order of summation.

| kind | map (on the last axes of one image) | L |
|---|---|---|
| `linear` | `W x` on the last axis | largest singular value of W |
| `locally_connected` | `W_p x_p` at each position p, on the last axis | the largest of all `W_p` |
| `bias` | `x + b` on the last axis | 1 |
| `scale` | `factor x` | `abs(factor)` |
| `group_sort` | entries i, i + n/size, i + 2n/size, ... sorted in descending order | 1 |
| `abs`, `relu`, `identity` | entrywise | 1 |
| `mean_subtract` | subtracts the mean over the last axis | 1 |
| `flatten`, `space_to_depth`, `shift` | permutes entries | 1 |
| `average_pool` | mean over blocks of n pixels | `1 / sqrt(n)` |
| `two_tap` | `x - P x + roll(P x)`, `P = U U^T` | `max(1, 2 b^2 - 1)`, b the largest of U |

`two_tap` multiplies each frequency t by `1 + (exp(it) - 1) P`; P has eigenvalues 0 and the squares
s of the singular values of U, and `|1 - s + exp(it) s| <= |1 - s| + s`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from manifoldmuon_verify._files import Stored
from manifoldmuon_verify._refusal import Refused, short
from manifoldmuon_verify._rounding import Arithmetic, down, norm, operator_norm, product, total, up
from manifoldmuon_verify._singular import SingularValues, singular_values

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Weight:
    """An array as used by a layer: whole, or the part for a single copy in a stack.

    Derived values are computed on first access and cached.

    Attributes:
      stored: the whole array.
      index: index of the copy.
      where: its name, for refusals.
    """

    stored: Stored
    index: tuple[int, ...]
    where: str

    @property
    def shape(self) -> Shape:
        return self.stored.shape[len(self.index) :]

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)

    @functools.cached_property
    def values(self) -> np.ndarray:
        return self.stored.values(self.index)

    @property
    def _matrices(self) -> np.ndarray:
        return self.values.reshape(-1, *self.shape[-2:])

    @functools.cached_property
    def spectra(self) -> tuple[SingularValues, ...]:
        """Enclosures of the singular values of each matrix `(..., m, n)`."""
        try:
            return tuple(singular_values(matrix) for matrix in self._matrices)
        except ArithmeticError as error:
            raise Refused(self.where, str(error)) from error

    @property
    def largest(self) -> float:
        """Upper bound on the largest singular value of all matrices."""
        return max(float(found.upper[0]) for found in self.spectra)

    @functools.cached_property
    def operator_norm(self) -> float:
        """Upper bound on the spectral norm of all matrices' magnitudes."""
        return max(operator_norm(matrix) for matrix in self._matrices)

    def bounds(self) -> "Bounds":
        """Bound the product with the matrices."""
        return Bounds(self.largest, self.operator_norm)


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Proved upper bounds for a layer.

    Attributes:
      lipschitz: bounds its Lipschitz constant.
      gain: bounds the norm of the map with all terms in magnitude.
      offset: bounds the norm of the terms that do not depend on the input.
    """

    lipschitz: float = 1.0
    gain: float = 1.0
    offset: float = 0.0


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """A layer with its weights, which are not read before the bounds or the map are used.

    Attributes:
      kind: its name in a certificate.
      shape: output shape, per image.
      forward: the map, for a batch of float64 inputs.
      prove: computes the bounds.
      terms: number of consecutive roundings, or terms of the longest sum.
      weight: array of matrices that enter matrix products; None for other layers.
    """

    kind: str
    shape: Shape
    forward: Callable[[np.ndarray], np.ndarray]
    prove: Callable[[], Bounds] = Bounds
    terms: int = 0
    weight: Weight | None = None

    @functools.cached_property
    def bounds(self) -> Bounds:
        return self.prove()

    @property
    def lipschitz(self) -> float:
        return self.bounds.lipschitz

    def rounding_error(self, arithmetic: Arithmetic, size: np.ndarray) -> np.ndarray:
        """Bound the norm of the output's rounding error; `size` and result are `(n,)`."""
        # Underflow adds at most `tiny` per operation, and `sqrt(tiny)` to the root of a square.
        operations = float(math.prod(self.shape) * (self.terms + 1))
        gain = self.bounds.gain
        underflow = product(operations, up(1 + gain), math.sqrt(arithmetic.tiny))
        terms = total(product(gain, size), self.bounds.offset)
        return total(product(arithmetic.gamma(self.terms), terms), underflow)


Weights = Callable[[str, int], Weight]
"""Returns the array that a layer names under a key; refuses arrays with other than n axes."""


def normalisation(shape: Shape, shift: np.ndarray, scale: np.ndarray) -> Layer:
    """Return the layer `(pixel - shift) / scale`, which precedes the network."""

    def prove() -> Bounds:
        least = float(up(1 / np.min(scale)))
        offset = product(norm(np.broadcast_to(shift, shape)), least)
        return Bounds(least, gain=least, offset=offset)

    return Layer("input", shape, lambda x: (x - shift) / scale, prove, terms=6)


def build(kind: str, options: dict[str, Any], weights: Weights, shape: Shape, where: str) -> Layer:
    """Build the layer of an entry in a certificate: its kind, and its other keys as `options`.

    `shape` is the input's, per image; `where` is the path of the entry, for refusals.
    """
    if kind not in _KINDS:
        raise Refused(where, f"unknown kind {short(kind)}")
    maker, keys, axes = _KINDS[kind]
    if set(options) != keys:
        wanted = ", ".join(sorted(keys)) or "none"
        raise Refused(where, f"{kind} takes the keys {wanted}; got {short(sorted(options))}")
    if len(shape) < axes:
        raise Refused(where, f"{kind} takes {axes} axes or more; its input is {shape}")
    try:
        return maker(options, weights, shape)
    except _Misfit as error:
        raise Refused(where, f"{kind}: {error}") from error


class _Misfit(Exception):
    """A layer that does not fit its input."""


def _linear(options: dict[str, Any], weights: Weights, shape: Shape) -> Layer:
    weight = weights("weight", 2)
    outputs, inputs = weight.shape
    _expect_fit(inputs == shape[-1], weight, shape)

    def forward(x: np.ndarray) -> np.ndarray:
        return (x.reshape(-1, inputs) @ weight.values.T).reshape(*x.shape[:-1], outputs)

    return Layer("linear", (*shape[:-1], outputs), forward, weight.bounds, inputs, weight)


def _locally_connected(options: dict[str, Any], weights: Weights, shape: Shape) -> Layer:
    axes = _count(options, "axes")
    _expect(axes < len(shape), f"axes={axes} must be below the number of axes of the input {shape}")
    weight = weights("weight", axes + 2)
    *places, outputs, inputs = weight.shape
    _expect_fit(shape[-axes - 1 :] == (*places, inputs), weight, shape)
    out = (*shape[:-1], outputs)

    def forward(x: np.ndarray) -> np.ndarray:
        matrices = weight.values.reshape(-1, outputs, inputs)
        rows = np.moveaxis(x.reshape(-1, len(matrices), inputs), 1, 0)
        return np.moveaxis(rows @ np.swapaxes(matrices, -1, -2), 0, 1).reshape(len(x), *out)

    return Layer("locally_connected", out, forward, weight.bounds, inputs, weight)


def _bias(options: dict[str, Any], weights: Weights, shape: Shape) -> Layer:
    bias = weights("weight", 1)
    _expect_fit(bias.shape[0] == shape[-1], bias, shape)
    prove = lambda: Bounds(offset=float(norm(np.broadcast_to(bias.values, shape))))  # noqa: E731
    return Layer("bias", shape, lambda x: x + bias.values, prove, terms=1)


def _scale(options: dict[str, Any], weights: Weights, shape: Shape) -> Layer:
    factor = options["factor"]
    _expect(type(factor) in (int, float), f"factor must be a number; got {short(factor)}")
    _expect(abs(factor) <= 2**64, f"factor must be at most 2**64; got {short(factor)}")
    factor, size = float(factor), abs(float(factor))
    return Layer("scale", shape, lambda x: factor * x, lambda: Bounds(size, size), terms=2)


def _group_sort(options: dict[str, Any], weights: Weights, shape: Shape) -> Layer:
    size, features = _count(options, "size"), shape[-1]
    _expect(features % size == 0, f"size={size} does not divide the {features} features")

    def forward(x: np.ndarray) -> np.ndarray:
        if size == 2:  # MaxMin, the most common activation; sorting takes ten times as long
            pair = x[..., : features // 2], x[..., features // 2 :]
            return np.concatenate([np.maximum(*pair), np.minimum(*pair)], axis=-1)
        groups = x.reshape(*x.shape[:-1], size, features // size)
        return np.flip(np.sort(groups, axis=-2), axis=-2).reshape(x.shape)

    return Layer("group_sort", shape, forward)


def _entrywise(kind: str, function: Callable[[np.ndarray], np.ndarray]) -> Any:
    return lambda options, weights, shape: Layer(kind, shape, function)


def _mean_subtract(options: dict[str, Any], weights: Weights, shape: Shape) -> Layer:
    subtract = lambda x: x - np.mean(x, axis=-1, keepdims=True)  # noqa: E731
    return Layer("mean_subtract", shape, subtract, lambda: Bounds(gain=2.0), terms=shape[-1] + 4)


def _flatten(options: dict[str, Any], weights: Weights, shape: Shape) -> Layer:
    axes = _count(options, "axes")
    _expect(axes <= len(shape), f"axes={axes} exceeds the axes of the input {shape}")
    flat = (*shape[: len(shape) - axes], math.prod(shape[len(shape) - axes :]))
    return Layer("flatten", flat, lambda x: x.reshape(len(x), *flat))


def _blocks(shape: Shape, rows: int, columns: int) -> tuple[Shape, Callable[..., np.ndarray]]:
    """Return the shape and the map that cut images into blocks of pixels.

    The result has the shape `(..., height, width, block, channels)`.
    """
    *batch, height, width, channels = shape
    fits = rows and columns and height % rows == 0 and width % columns == 0
    _expect(fits, f"blocks of {rows} by {columns} pixels do not divide the input {shape}")
    cut = (*batch, height // rows, rows, width // columns, columns, channels)
    joined = (*batch, height // rows, width // columns, rows * columns, channels)

    def blocks(x: np.ndarray) -> np.ndarray:
        return np.swapaxes(x.reshape(len(x), *cut), -4, -3).reshape(len(x), *joined)

    return joined, blocks


def _space_to_depth(options: dict[str, Any], weights: Weights, shape: Shape) -> Layer:
    side = _count(options, "side")
    (*outer, pixels, channels), blocks = _blocks(shape, side, side)
    out = (*outer, pixels * channels)
    return Layer("space_to_depth", out, lambda x: blocks(x).reshape(len(x), *out))


def _average_pool(options: dict[str, Any], weights: Weights, shape: Shape) -> Layer:
    rows, columns = _count(options, "rows"), _count(options, "columns")
    (*outer, pixels, channels), blocks = _blocks(shape, shape[-3] // rows, shape[-2] // columns)
    fits = tuple(outer[-2:]) == (rows, columns)
    _expect(fits, f"rows={rows}, columns={columns} do not divide the input {shape}")
    out = (*outer, channels)
    return Layer(
        "average_pool",
        out,
        lambda x: np.mean(blocks(x), axis=-2),
        lambda: Bounds(float(up(1 / down(np.sqrt(pixels))))),
        terms=pixels + 4,
    )


def _shift(options: dict[str, Any], weights: Weights, shape: Shape) -> Layer:
    by = _whole(options, "pixels")

    def forward(x: np.ndarray) -> np.ndarray:
        stay, *moving = np.array_split(x, 5, axis=-1)
        ways = ((-by, -3), (by, -3), (-by, -2), (by, -2))
        moved = [np.roll(part, n, axis) for part, (n, axis) in zip(moving, ways, strict=True)]
        return np.concatenate([stay, *moved], axis=-1)

    return Layer("shift", shape, forward)


def _two_tap(options: dict[str, Any], weights: Weights, shape: Shape) -> Layer:
    frame, axis, offset = weights("weight", 2), options["axis"], _whole(options, "offset")
    channels, rank = frame.shape
    _expect_fit(rank <= channels == shape[-1], frame, shape)
    _expect(axis in (-2, -3) and type(axis) is int, f"axis must be -2 or -3; got {short(axis)}")
    _expect(len(shape) >= -axis, f"axis={axis} exceeds the axes of the input {shape}")

    def forward(x: np.ndarray) -> np.ndarray:
        part = ((x.reshape(-1, channels) @ frame.values) @ frame.values.T).reshape(x.shape)
        return x - part + np.roll(part, offset, axis)

    def prove() -> Bounds:
        square = product(frame.largest, frame.largest)
        terms = product(frame.operator_norm, frame.operator_norm)
        return Bounds(max(1.0, float(up(2 * square - 1))), up(1 + 2 * terms))

    return Layer("two_tap", shape, forward, prove, terms=channels + rank + 4, weight=frame)


# For each kind: its builder, its keys, and the least number of input axes.
_KINDS: dict[str, tuple[Callable[..., Layer], set[str], int]] = {
    "linear": (_linear, {"weight"}, 1),
    "locally_connected": (_locally_connected, {"weight", "axes"}, 2),
    "bias": (_bias, {"weight"}, 1),
    "scale": (_scale, {"factor"}, 1),
    "group_sort": (_group_sort, {"size"}, 1),
    "abs": (_entrywise("abs", np.abs), set(), 1),
    "relu": (_entrywise("relu", lambda x: np.maximum(x, 0)), set(), 1),
    "identity": (_entrywise("identity", lambda x: x), set(), 1),
    "mean_subtract": (_mean_subtract, set(), 1),
    "flatten": (_flatten, {"axes"}, 1),
    "space_to_depth": (_space_to_depth, {"side"}, 3),
    "average_pool": (_average_pool, {"rows", "columns"}, 3),
    "shift": (_shift, {"pixels"}, 3),
    "two_tap": (_two_tap, {"weight", "axis", "offset"}, 2),
}


def _expect(fits: object, otherwise: str) -> None:
    if not fits:
        raise _Misfit(otherwise)


def _expect_fit(fits: object, weight: Weight, shape: Shape) -> None:
    _expect(fits, f"the weight {weight.shape} does not fit the input {shape}")


def _whole(options: dict[str, Any], key: str) -> int:
    value = options[key]
    fits = type(value) is int and abs(value) < 2**31
    _expect(fits, f"{key} must be a whole number; got {short(value)}")
    return value


def _count(options: dict[str, Any], key: str) -> int:
    value = _whole(options, key)
    _expect(value >= 1, f"{key} must be at least 1; got {value}")
    return value
