"""What each kind of layer does, how far it can move its output, and how much rounding adds.

For each kind: the map; a bound L on its Lipschitz constant in the Euclidean norm, with the
weights as they are (not as they should be); and the rounding when it is computed from an input of
norm at most `size`: at most `gamma(terms) (gain size + offset)`, and what underflow adds. The
gain bounds the map's terms in magnitude, whatever their order.

| kind | map (on the last axes of one image) | L |
|---|---|---|
| `linear` | `W x` on the last axis | largest singular value of W |
| `locally_connected` | `W_p x_p` at each place p, on the last axis | the largest of all `W_p` |
| `bias` | `x + b` on the last axis | 1 |
| `scale` | `factor x` | `abs(factor)` |
| `group_sort` | entries i, i + n/size, i + 2n/size, ... sorted, the largest first | 1 |
| `householder` | `z - 2 min(<v, z>, 0) v`, z = (x_i, x_{i + n/2}), row v | `max(1, 2 |v|^2 - 1)` |
| `abs`, `relu`, `identity` | entry by entry | 1 |
| `mean_subtract` | less the mean over the last axis | 1 |
| `flatten`, `swap_axes`, `space_to_depth`, `shift` | entries in another order | 1 |
| `norm_pool` | Euclidean norm over blocks of pixels | 1 |
| `average_pool` | mean over blocks of n pixels | `1 / sqrt(n)` |
| `two_tap` | `x - P x + roll(P x)`, `P = U U^T` | `max(1, 2 b^2 - 1)`, b the largest of U |

`householder` is continuous for a v of every length, because what is subtracted vanishes where it
sets in, and piecewise linear with pieces of norm 1 and `|1 - 2 |v|^2|`. `two_tap` is, for each
frequency t, multiplication by `1 + (exp(it) - 1) P`; P has eigenvalues 0 and the squares s of the
singular values of U, and `|1 - s + exp(it) s|` is largest at t = 0: `|1 - s| + s`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from manifoldmuon_verify._refusal import Refused, short
from manifoldmuon_verify._rounding import (
    Arithmetic,
    down,
    norm,
    operator_norm,
    product,
    total,
    up,
)
from manifoldmuon_verify._singular import SingularValues, singular_values

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer with its weights.

    Attributes:
      kind: what it is called in a certificate.
      shape: of the output for one image.
      forward: the map, for a batch of float64 inputs.
      lipschitz: at least its Lipschitz constant.
      terms: the roundings in a row, or the terms of the longest sum.
      gain: at least the norm of the map with all terms in magnitude.
      offset: the same of what does not depend on the input.
      weight: the matrix of a linear layer; None for others.
      spectra: enclosed singular values of its matrices.
    """

    kind: str
    shape: Shape
    forward: Callable[[np.ndarray], np.ndarray]
    lipschitz: float = 1.0
    terms: int = 0
    gain: float = 1.0
    offset: float = 0.0
    weight: np.ndarray | None = None
    spectra: tuple[SingularValues, ...] = ()

    def rounding(self, arithmetic: Arithmetic, size: np.ndarray) -> np.ndarray:
        """At least the norm of what rounding adds to the output; `size` and result are `(n,)`."""
        # An underflow adds at most `tiny` to one operation; to its square root, after squaring.
        operations = float(math.prod(self.shape) * (self.terms + 1))
        underflow = product(operations, up(1 + self.gain), math.sqrt(arithmetic.tiny))
        terms = total(product(self.gain, size), self.offset)
        return total(product(arithmetic.gamma(self.terms), terms), underflow)


Weights = Callable[[str, int], np.ndarray]
"""Gives the array that a layer names under a key, if it has so many axes."""


def normalisation(shape: Shape, shift: np.ndarray, scale: np.ndarray) -> Layer:
    """`(pixel - shift) / scale`, which comes before the first layer."""
    least = float(up(1 / np.min(scale)))
    offset = product(norm(np.broadcast_to(shift, shape)), least)
    forward = lambda x: (x - shift) / scale  # noqa: E731
    return Layer("input", shape, forward, least, terms=6, gain=least, offset=offset)


def build(kind: str, options: dict[str, Any], weights: Weights, shape: Shape, where: str) -> Layer:
    """The layer of one entry of a certificate.

    Args:
      kind: as in the table above.
      options: the entry's other keys.
      weights: gives the arrays.
      shape: of the input for one image.
      where: the place of the entry, for refusals.

    Raises:
      Refused: an unknown kind, or what does not fit.
    """
    if kind not in _KINDS:
        raise Refused(where, f"the kind {short(kind)} is unknown")
    maker, keys, axes = _KINDS[kind]
    if set(options) != keys:
        wanted = ", ".join(sorted(keys)) or "nothing"
        raise Refused(where, f"{kind} takes {wanted} and got {short(sorted(options))}")
    if len(shape) < axes:
        raise Refused(where, f"{kind} takes {axes} axes; its input is {shape}")
    try:
        return maker(options, weights, shape)
    except (ArithmeticError, _Misfit) as error:
        raise Refused(where, f"{kind}: {error}") from error


class _Misfit(Exception):
    """A layer that does not fit its input."""


def _linear(options: dict[str, Any], weights: Weights, shape: Shape) -> Layer:
    matrix = weights("weight", 2)
    outputs, inputs = matrix.shape
    _expect(inputs == shape[-1], f"a matrix {matrix.shape} for an input {shape}")
    found = singular_values(matrix)
    return Layer(
        "linear",
        (*shape[:-1], outputs),
        lambda x: (x.reshape(-1, inputs) @ matrix.T).reshape(*x.shape[:-1], outputs),
        float(found.upper[0]),
        terms=inputs,
        gain=operator_norm(matrix),
        weight=matrix,
        spectra=(found,),
    )


def _locally_connected(options: dict[str, Any], weights: Weights, shape: Shape) -> Layer:
    axes = _count(options, "axes")
    _expect(axes < len(shape), f"{axes} axes of places in {shape}")
    weight = weights("weight", axes + 2)
    *places, outputs, inputs = weight.shape
    _expect(shape[-axes - 1 :] == (*places, inputs), f"{weight.shape} for an input {shape}")
    matrices = weight.reshape(-1, outputs, inputs)
    spectra = tuple(singular_values(matrix) for matrix in matrices)
    out = (*shape[:-1], outputs)

    def forward(x: np.ndarray) -> np.ndarray:
        rows = np.moveaxis(x.reshape(-1, len(matrices), inputs), 1, 0)
        return np.moveaxis(rows @ np.swapaxes(matrices, -1, -2), 0, 1).reshape(len(x), *out)

    return Layer(
        "locally_connected",
        out,
        forward,
        max(float(found.upper[0]) for found in spectra),
        terms=inputs,
        gain=max(operator_norm(matrix) for matrix in matrices),
        spectra=spectra,
    )


def _bias(options: dict[str, Any], weights: Weights, shape: Shape) -> Layer:
    bias = weights("weight", 1)
    _expect(bias.shape[0] == shape[-1], f"a bias {bias.shape} for an input {shape}")
    offset = float(norm(np.broadcast_to(bias, shape)))
    return Layer("bias", shape, lambda x: x + bias, terms=1, offset=offset)


def _scale(options: dict[str, Any], weights: Weights, shape: Shape) -> Layer:
    factor = options["factor"]
    _expect(type(factor) in (int, float), f"the factor {short(factor)} is not a number")
    _expect(abs(factor) <= 2**64, f"the factor {short(factor)} is too large")
    factor = float(factor)
    size = abs(factor)
    return Layer("scale", shape, lambda x: factor * x, size, terms=2, gain=size)


def _group_sort(options: dict[str, Any], weights: Weights, shape: Shape) -> Layer:
    size, features = _count(options, "size"), shape[-1]
    _expect(features % size == 0, f"{features} features do not fall into groups of {size}")

    def forward(x: np.ndarray) -> np.ndarray:
        groups = x.reshape(*x.shape[:-1], size, features // size)
        return np.flip(np.sort(groups, axis=-2), axis=-2).reshape(x.shape)

    return Layer("group_sort", shape, forward)


def _householder(options: dict[str, Any], weights: Weights, shape: Shape) -> Layer:
    rows, half = weights("weight", 2), shape[-1] // 2
    _expect(rows.shape == (half, 2) and shape[-1] % 2 == 0, f"rows {rows.shape} for {shape}")
    square = product(*[float(np.max(norm(rows, 1), initial=0.0))] * 2)

    def forward(x: np.ndarray) -> np.ndarray:
        first, second = x[..., :half], x[..., half:]
        fold = 2 * np.minimum(rows[:, 0] * first + rows[:, 1] * second, 0)
        parts = [first - fold * rows[:, 0], second - fold * rows[:, 1]]
        return np.concatenate(parts, axis=-1)

    lipschitz = max(1.0, float(up(2 * square - 1)))
    return Layer("householder", shape, forward, lipschitz, terms=8, gain=up(1 + 2 * square))


def _entrywise(kind: str, function: Callable[[np.ndarray], np.ndarray]) -> Any:
    return lambda options, weights, shape: Layer(kind, shape, function)


def _mean_subtract(options: dict[str, Any], weights: Weights, shape: Shape) -> Layer:
    return Layer(
        "mean_subtract",
        shape,
        lambda x: x - np.mean(x, axis=-1, keepdims=True),
        terms=shape[-1] + 4,
        gain=2.0,
    )


def _flatten(options: dict[str, Any], weights: Weights, shape: Shape) -> Layer:
    axes = _count(options, "axes")
    _expect(axes <= len(shape), f"{axes} axes of {shape}")
    flat = (*shape[: len(shape) - axes], math.prod(shape[len(shape) - axes :]))
    return Layer("flatten", flat, lambda x: x.reshape(len(x), *flat))


def _swap_axes(options: dict[str, Any], weights: Weights, shape: Shape) -> Layer:
    swapped = (*shape[:-2], shape[-1], shape[-2])
    return Layer("swap_axes", swapped, lambda x: np.ascontiguousarray(np.swapaxes(x, -1, -2)))


def _blocks(shape: Shape, rows: int, columns: int) -> tuple[Shape, Callable[..., np.ndarray]]:
    """What cuts images into blocks of pixels, as `(..., height, width, block, channels)`."""
    *batch, height, width, channels = shape
    fits = rows and columns and height % rows == 0 and width % columns == 0
    _expect(fits, f"blocks of {rows} by {columns} pixels in {shape}")
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


def _norm_pool(options: dict[str, Any], weights: Weights, shape: Shape) -> Layer:
    side = _count(options, "side")
    (*outer, pixels, channels), blocks = _blocks(shape, side, side)
    out = (*outer, channels)
    return Layer(
        "norm_pool", out, lambda x: np.sqrt(np.sum(blocks(x) ** 2, axis=-2)), terms=pixels + 4
    )


def _average_pool(options: dict[str, Any], weights: Weights, shape: Shape) -> Layer:
    rows, columns = _count(options, "rows"), _count(options, "columns")
    (*outer, pixels, channels), blocks = _blocks(shape, shape[-3] // rows, shape[-2] // columns)
    _expect(tuple(outer[-2:]) == (rows, columns), f"{shape} does not divide into {rows, columns}")
    out = (*outer, channels)
    return Layer(
        "average_pool",
        out,
        lambda x: np.mean(blocks(x), axis=-2),
        up(1 / down(np.sqrt(pixels))),
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
    _expect(channels == shape[-1], f"a frame {frame.shape} for an input {shape}")
    _expect(axis in (-2, -3) and type(axis) is int, f"the axis {short(axis)} is not -2 or -3")
    _expect(len(shape) >= -axis, f"axis {axis} of {shape}")
    found = singular_values(frame)
    square = product(float(found.upper[0]), float(found.upper[0]))

    def forward(x: np.ndarray) -> np.ndarray:
        part = ((x.reshape(-1, channels) @ frame) @ frame.T).reshape(x.shape)
        return x - part + np.roll(part, offset, axis)

    terms = operator_norm(frame)
    return Layer(
        "two_tap",
        shape,
        forward,
        max(1.0, float(up(2 * square - 1))),
        terms=channels + rank + 4,
        gain=up(1 + 2 * product(terms, terms)),
        spectra=(found,),
    )


# Of each kind: what makes it, its keys, and how many axes its input has at least.
_KINDS: dict[str, tuple[Callable[..., Layer], set[str], int]] = {
    "linear": (_linear, {"weight"}, 1),
    "locally_connected": (_locally_connected, {"weight", "axes"}, 2),
    "bias": (_bias, {"weight"}, 1),
    "scale": (_scale, {"factor"}, 1),
    "group_sort": (_group_sort, {"size"}, 1),
    "householder": (_householder, {"weight"}, 1),
    "abs": (_entrywise("abs", np.abs), set(), 1),
    "relu": (_entrywise("relu", lambda x: np.maximum(x, 0)), set(), 1),
    "identity": (_entrywise("identity", lambda x: x), set(), 1),
    "mean_subtract": (_mean_subtract, set(), 1),
    "flatten": (_flatten, {"axes"}, 1),
    "swap_axes": (_swap_axes, set(), 2),
    "space_to_depth": (_space_to_depth, {"side"}, 3),
    "norm_pool": (_norm_pool, {"side"}, 3),
    "average_pool": (_average_pool, {"rows", "columns"}, 3),
    "shift": (_shift, {"pixels"}, 3),
    "two_tap": (_two_tap, {"weight", "axis", "offset"}, 2),
}


def _expect(fits: object, otherwise: str) -> None:
    if not fits:
        raise _Misfit(otherwise)


def _whole(options: dict[str, Any], key: str) -> int:
    value = options[key]
    _expect(type(value) is int and abs(value) < 2**31, f"{key} {short(value)} is no whole number")
    return value


def _count(options: dict[str, Any], key: str) -> int:
    value = _whole(options, key)
    _expect(value >= 1, f"{key} is {value}, which is not at least 1")
    return value
