"""The fan-in and fan-out of a weight, declared: what automatic gradient descent has to know."""

import dataclasses
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from manifoldmuon.manifolds import Axes, FanRatio, Stiefel
from manifoldmuon.optim._geometry import Layout, lay_out
from manifoldmuon.optim._grouping import placed_like

FansTree = Any
"""A prefix tree of `Fans`, a `by_path` object, or a function `(path, leaf) -> Fans`."""


@dataclasses.dataclass(frozen=True)
class Fans:
    """Which axes of an array are the fan-in and the fan-out of a layer, and which are its taps.

    | array | declaration |
    |---|---|
    | matrix (out, in), also a stack of them | `Fans()` |
    | Flax kernel (in, out) | `Fans(in_axes=-2, out_axes=-1)` |
    | fused heads (d_model, heads, head_dim) | `Fans(in_axes=-3, out_axes=(-2, -1))` |
    | `modules.Conv2D`: (height, width, out, in) | `Fans(taps=(-4, -3))` |
    | Flax convolution HWIO | `Fans(in_axes=-2, out_axes=-1, taps=(-4, -3))` |
    | OIHW convolution | `Fans(in_axes=-3, out_axes=-4, taps=(-2, -1))` |

    Axes are counted from the back. All others are stacked layers: each copy is a layer by itself,
    and counts for the depth of the network.

    Attributes:
      in_axes: the axis, or axes, of the fan-in.
      out_axes: the axis, or axes, of the fan-out.
      taps: the axes of a convolution's taps, which are matrices of one and the same layer.
    """

    in_axes: int | tuple[int, ...] = -1
    out_axes: int | tuple[int, ...] = -2
    taps: int | tuple[int, ...] = ()

    def __post_init__(self):
        for field in dataclasses.fields(self):
            given = getattr(self, field.name)
            axes = _as_tuple(given)
            if not (axes or field.name == "taps") or not all(
                isinstance(axis, int) and axis < 0 for axis in axes
            ):
                raise ValueError(
                    f"Fans.{field.name} must be an axis, or axes, counted from the back (-1 is the"
                    f" last); got {given!r}. All axes that are not named are stacked layers."
                )
            object.__setattr__(self, field.name, axes)  # equal declarations compare equal
        if len(set(self._named)) < len(self._named):
            raise ValueError(
                f"in_axes={self.in_axes}, out_axes={self.out_axes} and taps={self.taps} name the"
                " same axis twice"
            )

    @property
    def matrix_axes(self) -> tuple[int, ...]:
        """The axes of one matrix: those of the fan-out, then those of the fan-in."""
        return _as_tuple(self.out_axes) + _as_tuple(self.in_axes)

    @property
    def _named(self) -> tuple[int, ...]:
        return self.matrix_axes + _as_tuple(self.taps)

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raises `ValueError` where an array of this shape has no such axes."""
        reach = -min(self._named)
        if len(shape) < reach:
            raise ValueError(
                f"{self} needs an array of {reach} axes or more, but the shape is {tuple(shape)}."
                " Biases, gains and scalars have no fan-in, and automatic gradient descent gives"
                " no step for them: leave them out of the network, or hand them to another"
                " optimizer with optax.partition."
            )

    def scale(self, shape: tuple[int, ...]) -> float:
        """`sqrt(d_out / (d_in * taps))`: the size of the layer's matrices, one for each tap."""
        d_out, d_in = (_size(shape, axes) for axes in (self.out_axes, self.in_axes))
        columns = d_in * self.count_taps(shape)
        return math.sqrt(d_out / columns) if d_out and columns else 1.0

    def count_taps(self, shape: tuple[int, ...]) -> int:
        """How many matrices one layer has: 1 but for convolutions."""
        return _size(shape, self.taps)

    def layers(self, shape: tuple[int, ...]) -> int:
        """How many layers an array of this shape holds."""
        named = {axis % len(shape) for axis in self._named}
        return math.prod(size for axis, size in enumerate(shape) if axis not in named)


def lay_out_fans(fans: FansTree, tree: Any, name: str) -> Layout:
    """Takes a tree apart and finds the `Fans` of every leaf, with dtypes and shapes checked.

    Raises:
      TypeError: if an entry is no `Fans`, or a leaf is not a real floating point array.
      ValueError: as for every geometry, or if a leaf does not have the axes.
    """
    layout = lay_out(fans, tree, lambda node: isinstance(node, Fans))
    for index in layout.indices():
        path, leaf, value = layout.paths[index], layout.leaves[index], layout.values[index]
        if not isinstance(value, Fans):
            raise TypeError(f"{name}: the entry of {path!r} is {value!r}, not Fans.")
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"{name}: {path!r} has dtype {dtype}, not real floating point.")
        try:
            value.check_shape(jnp.shape(leaf))
        except ValueError as error:
            raise ValueError(f"{name}: {path!r}: {error}") from None
    return layout


def init_semi_orthogonal(fans: FansTree, key: PRNGKeyArray, params: Any) -> Any:
    """Random weights for automatic gradient descent: semi-orthogonal, of unit RMS-to-RMS norm.

    Every matrix has all its singular values equal to `sqrt(d_out / d_in)`, those of a convolution
    (one for each tap) to `sqrt(d_out / (d_in * taps))` (arXiv:2304.05187, appendix B; the factor
    in the text of its section 3.3 is upside down). The randomness of a leaf comes from `key`
    and its path alone.

    Args:
      fans: the declaration of every parameter; see `agd`.
      key: a JAX random key.
      params: arrays or `jax.ShapeDtypeStruct` that give structure, shapes and dtypes.

    Returns:
      A tree of the same structure, shapes and dtypes.

    Raises:
      TypeError: an entry is no `Fans`, or a parameter is not floating point.
      ValueError: a parameter has no entry or not the axes, or an entry no parameter.
    """
    layout = lay_out_fans(fans, params, "init_semi_orthogonal")
    filled = list(layout.leaves)
    for index in layout.indices():
        leaf, value = layout.leaves[index], layout.values[index]
        shape = jnp.shape(leaf)
        scale = FanRatio(1 / math.sqrt(max(value.count_taps(shape), 1)))
        manifold = Axes(Stiefel(scale), value.in_axes, value.out_axes)
        own_key = jax.random.fold_in(key, zlib.crc32(layout.paths[index].encode()))
        point = manifold.random_point(own_key, shape, jnp.result_type(leaf))
        filled[index] = placed_like(point, leaf)
    return layout.rebuild(filled)


def _as_tuple(axes: int | tuple[int, ...]) -> tuple[int, ...]:
    return (axes,) if isinstance(axes, int) else tuple(axes)


def _size(shape: tuple[int, ...], axes: int | tuple[int, ...]) -> int:
    return math.prod(shape[axis] for axis in _as_tuple(axes))
