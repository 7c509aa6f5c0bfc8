"""Roles and layouts of weights in all frameworks, and the resulting entries of a geometry.

A reader gives the role and layout of each parameter of a module type. Paths, owners and types come
from `nnx`, `linen` and `equinox`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import EllipsisType
from typing import Any, NamedTuple, cast

import jax.numpy as jnp

from manifoldmuon._internal.arguments import one_of, shown
from manifoldmuon._internal.trees.paths import ByPath, flatten_with_path, path_string
from manifoldmuon.manifolds import Entry, LaidOut, Layout, Manifold
from manifoldmuon.norms import ConvRMSToRMS, Lipschitz
from manifoldmuon.optim import resolve_geometry

Choice = Manifold | None | EllipsisType
Overrides = Mapping[Any, Entry | Mapping[str, Entry | None] | None]


class Role(NamedTuple):
    """Role of a parameter in its module.

    Attributes:
      choice: name of the field of `Choices` with its manifold.
      layout: layout as a matrix; None if the axes are in the manifold's order.
      kernel: layout with taps, for a manifold of kernels (of more than two axes).
      overlap: `overlap` of `norms.Lipschitz`, for a convolution; None if unknown.
    """

    choice: str
    layout: Layout | None = None
    kernel: Layout | None = None
    overlap: int | None = 1


REST = Role("rest")
TABLE = Role("embedding")

Single = tuple[int | None, ...]
"""The shape of a parameter without stacking; None for a length that the module does not know."""

Shapes = Callable[[Any], Mapping[str, Single]]
"""`shapes(module)`: shapes of the module's own parameters by name."""

Reader = Callable[[Any, bool], Mapping[str, Role]]
"""`reader(module, per_head)`: roles by path below the module; `*` matches its own parameters."""


@dataclasses.dataclass(frozen=True)
class Choices:
    """The arguments of `geometry` that all frameworks share; see `frameworks.nnx.geometry`."""

    matrices: Manifold | None
    attention: Choice
    per_head: bool
    convolutions: Choice
    embedding: Manifold | None
    rest: Manifold | None
    overrides: Overrides | None

    def __post_init__(self):
        for field in ("matrices", "attention", "convolutions", "embedding", "rest"):
            value = getattr(self, field)
            if value is ... and field in ("attention", "convolutions"):
                object.__setattr__(self, field, self.matrices)
            elif isinstance(value, LaidOut):
                raise TypeError(
                    f"geometry: {field} must be a Manifold; got {shown(value)}: the layout follows"
                    " from the module"
                )
            elif value is not None:
                one_of(Manifold)(f"geometry: {field}", value)
        one_of(bool)("geometry: per_head", self.per_head)
        if not isinstance(self.overrides, Mapping | None):
            raise TypeError(f"geometry: overrides must be a dictionary; got {self.overrides!r}")


def matrix(layout: Layout) -> Role:
    """Return the role of a linear map, such as `Layout(-2, -1)` for a kernel (in, out)."""
    return Role("matrices", layout)


KERNEL = matrix(Layout(-2, -1))
DENSE = {"kernel": KERNEL, "bias": REST}


def general(ins: int, outs: int) -> Role:
    """Return a single linear map with the kernel (..., *in, *out)."""
    return matrix(Layout(tuple(range(-ins - outs, -outs)), tuple(range(-outs, 0))))


def heads(per_head: bool) -> dict[str, Role]:
    """Return Flax's attention: projections (d, heads, head_dim), `out` (heads, head_dim, d)."""
    inward = Role("attention", Layout(-3, -1) if per_head else Layout(-3, (-2, -1)))
    outward = Role("attention", Layout(-2, -1) if per_head else Layout((-3, -2), -1))
    kernels = {f"{name}/kernel": inward for name in ("query", "key", "value")}
    biases = {f"{name}/bias": REST for name in ("query", "key", "value", "out")}
    return kernels | biases | {"out/kernel": outward}


def einsum(text: str | None) -> Mapping[str, Role]:
    """Return kernel and bias of `input,kernel->output`: contracted axes are the fan-in.

    Axes shared by input, kernel and output are copies. Other texts give no kernel.
    """
    roles = {"bias": REST}
    if text and text.count(",") == 1 and "->" in text:
        sides, output = text.replace(" ", "").split("->")
        given, kernel = sides.split(",")
        numbered = [(axis - len(kernel), letter) for axis, letter in enumerate(kernel)]
        ins = tuple(i for i, x in numbered if x in given and x not in output)
        outs = tuple(i for i, x in numbered if x in output and x not in given)
        alone = [x for x in kernel if x == "." or (x not in given and x not in output)]
        if ins and outs and not alone:
            roles["kernel"] = matrix(Layout(ins, outs, ndim=len(kernel)))
    return roles


def axes(given: int | Sequence[int]) -> tuple[int, ...]:
    return (given,) if isinstance(given, int) else tuple(given)


def convolution(taps: int, groups: int, reads: int | None) -> Role:
    """Return a kernel (*taps, in, out): a matrix from patches (taps in) to out, or tap by tap.

    `groups` are equal parts of the outputs: groups of channels, or the gates of a recurrent cell.
    """
    spatial = tuple(range(-taps - 2, -2))
    whole = Layout((*spatial, -2), -1, out_blocks=groups)
    return Role("convolutions", whole, Layout(-2, -1, spatial, out_blocks=groups), reads)


def transposed_convolution(taps: int, flipped: bool, reads: int | None) -> Role:
    """Return a kernel (*taps, in, out), flipped (*taps, out, in): from in to (taps out)."""
    spatial, ins, outs = tuple(range(-taps - 2, -2)), -2, -1
    if flipped:
        ins, outs = outs, ins
    return Role("convolutions", Layout(ins, (*spatial, outs)), Layout(ins, outs, spatial), reads)


def flax_convolution(module: Any, per_head: bool) -> Mapping[str, Role]:
    """Return kernel and bias of Flax's `Conv`."""
    kernel, m = axes(module.kernel_size), module
    reads = overlap(kernel, m.strides, m.kernel_dilation, m.padding, m.mask)
    return {"kernel": convolution(len(kernel), m.feature_group_count, reads), "bias": REST}


def flax_transposed_convolution(module: Any, per_head: bool) -> Mapping[str, Role]:
    """Return kernel and bias of Flax's `ConvTranspose`."""
    kernel, m = axes(module.kernel_size), module
    reads = overlap(kernel, m.strides, m.kernel_dilation, mask=m.mask)
    return {"kernel": transposed_convolution(len(kernel), m.transpose_kernel, reads), "bias": REST}


def overlap(
    kernel: Sequence[int], stride: Any, dilation: Any, padding: Any = "ZEROS", mask: Any = None
) -> int | None:
    """Return the maximum number of patches per pixel of a convolution; None if unknown.

    For a transposed convolution these are the patches of its adjoint. Patch p has the pixel
    `stride p + dilation t` at tap t. So along each axis a pixel is in as many patches as there are
    taps congruent modulo `stride / gcd(stride, dilation)`. With circular padding all taps count: if
    the stride does not divide the image, taps that are not congruent may meet the same pixel.

    The kernel's number of taps is a sequence over the axes; stride and dilation are a number, a
    sequence, or None for 1. A padding that repeats pixels gives None, and so does a mask of the
    kernel, which may increase the norm.
    """
    if mask is not None or padding in ("REFLECT", "REPLICATE"):
        return None
    strides, dilations = (
        (x or 1,) * len(kernel) if isinstance(x, int | None) else x for x in (stride, dilation)
    )
    count = 1
    for taps, by, apart in zip(kernel, strides, dilations, strict=True):
        step = 1 if padding == "CIRCULAR" else by // math.gcd(by, apart)
        count *= -(-taps // step)
    return count


def entries(
    parameters: Iterable[tuple[str, Iterable[tuple[str, Any]]]],
    readers: Mapping[type, Reader],
    choices: Choices,
    params: Any,
    single: Mapping[str, Single],
    rescaling: tuple[type, ...] = (),
) -> dict[str, Entry | None]:
    """Return the entry of every parameter by path, checked against its shape.

    Args:
      parameters: each parameter's path, and path and module of its owners, outermost first.
      readers: the reader of each module type; a subclass uses the reader of its nearest base.
      choices: the user's arguments.
      params: the tree of parameters or shapes.
      single: known shapes by path, in an unstacked copy of the module.
      rescaling: types of modules that rescale the weights below them in the forward pass.
    """
    shapes = {path_string(path): jnp.shape(x) for path, x in flatten_with_path(params)[0]}
    overrides = choices.overrides or {}
    paths = ByPath(tuple((k, v) for k, v in overrides.items() if not isinstance(k, type)))
    types = {key: value for key, value in overrides.items() if isinstance(key, type)}
    resolved: dict[str, Entry | None] = {}
    unknown, used = [], set()
    for path, owners in parameters:
        owners = [(path.removeprefix(above).removeprefix("/"), owner) for above, owner in owners]
        role = _read(owners, readers, choices.per_head)
        if (rule := paths.first_match(path)) is not None:
            key, entry = paths.rules[rule]
        elif (hit := _find_type(owners, types)) is not None:
            key, entry = hit
        elif role is not None:
            key, entry = None, getattr(choices, role.choice)
            if role.choice != "rest" and entry is not None and entry.constrained:
                _refuse_rescaled(path, owners, rescaling, entry)
        else:
            unknown.append((path, *owners[-1]) if owners else (path, path, None))
            continue
        used.add(key)
        resolved[path] = _place(entry, role, path, shapes[path], single.get(path))
    if unknown:
        raise TypeError(_unknown(unknown))
    if idle := [getattr(key, "__name__", key) for key in overrides if key not in used]:
        raise ValueError(
            f"geometry: the overrides {idle} match no parameter, or an earlier override matches"
            f" first; the parameters are {list(resolved)}"
        )
    resolve_geometry(resolved, params)
    return resolved


def _read(
    owners: list[tuple[str, Any]], readers: Mapping[type, Reader], per_head: bool
) -> Role | None:
    """Return the role from the outermost module that knows the parameter, or None."""
    for index, (below, owner) in enumerate(owners):
        kind = next((kind for kind in type(owner).__mro__ if kind in readers), None)
        known = {} if kind is None else readers[kind](owner, per_head)
        own = index == len(owners) - 1
        if (role := known.get(below, known.get("*") if own else None)) is not None:
            return role
    return None


def single_shapes(
    parameters: Iterable[tuple[str, Sequence[tuple[str, Any]]]], shapes: Mapping[type, Shapes]
) -> dict[str, Single]:
    """Return the shape of each parameter in an unstacked copy of its innermost module, if known."""
    single = {}
    for path, owners in parameters:
        owner = owners[-1][1] if owners else None
        kind = next((kind for kind in type(owner).__mro__ if kind in shapes), None)
        known = {} if kind is None else shapes[kind](owner)
        if (name := path.rpartition("/")[2]) in known:
            single[path] = known[name]
    return single


def _in_stack(path: str, role: Role, shape: tuple[int, ...], single: Single) -> Role:
    """Return a role with its layout in a stack of modules, along any axis.

    `nnx.vmap(out_axes=1)` and Linen's `variable_axes={"params": 1}` stack along an inner axis,
    which would pass for fan-in. If the first axis can be that of the stack, the default of both, it
    is taken, with a warning if others can.
    """
    if role == REST:
        return role
    size = len(shape)
    hint = f"give the layout: overrides={{{path!r}: manifold.with_axes(in_axes, out_axes)}}"
    options = [
        kept
        for kept in itertools.combinations(range(size), len(single))
        if all(x in (None, shape[i]) for i, x in zip(kept, single, strict=True))
    ]
    if tuple(range(size - len(single), size)) in options:
        if len(options) > 1 and None not in single:
            warnings.warn(
                f"geometry: {path!r} has shape {shape}, and a single copy of its module {single}:"
                f" the first axis is taken for that of the stack; if it is another, {hint}",
                stacklevel=5,
            )
        return role
    if len(options) != 1 or role.layout is None:
        raise ValueError(
            f"geometry: {path!r} has shape {shape}; a single copy of its module has {single}: stack"
            f" copies along the first axis, or {hint}"
        )

    def shift_axes(layout: Layout | None) -> Layout | None:
        if layout is None:
            return None
        groups = {name: getattr(layout, name) for name in ("in_axes", "out_axes", "taps")}
        shifted = {k: tuple([options[0][axis] - size for axis in v]) for k, v in groups.items()}
        return dataclasses.replace(layout, ndim=0, **shifted)

    return role._replace(layout=shift_axes(role.layout), kernel=shift_axes(role.kernel))


def _find_type(owners: list[tuple[str, Any]], types: Mapping[type, Any]) -> Any:
    """Return key and entry of the override by type for the innermost module, or None."""
    for below, owner in reversed(owners):
        for kind in type(owner).__mro__:
            if kind in types:
                value = types[kind]
                if not isinstance(value, Mapping):
                    return kind, value
                if below in value:
                    return kind, value[below]
    return None


def _place(
    entry: Any, role: Role | None, path: str, shape: tuple[int, ...], single: Single | None
) -> Any:
    """Return a manifold in the layout of a role, stacks declared; other entries do not change."""
    if not isinstance(entry, Manifold) or role is None:
        return entry
    if single is not None:
        role = _in_stack(path, role, shape, single)
    placed: Manifold | LaidOut = entry
    if role.layout is not None:
        placed = _lay_out(entry, role, path)
    return placed.stacked(max(len(shape) - placed.ndim, 0))


def _lay_out(entry: Manifold, role: Role, path: str) -> LaidOut:
    layout, scale, norm = cast(Layout, role.layout), getattr(entry, "scale", None), entry.norm
    if entry.ndim > 2:
        if role.kernel is None:
            raise ValueError(
                f"geometry: {path!r} is a matrix, but {entry} takes kernels: write"
                f" convolutions={entry}, and choose a manifold of matrices for the rest"
            )
        layout = role.kernel
        if isinstance(norm, ConvRMSToRMS):
            norm = dataclasses.replace(norm, tap_axes=len(axes(layout.taps)))
            entry = dataclasses.replace(cast(Any, entry), step_norm=norm)
    if isinstance(scale, Lipschitz):
        if role.overlap is None:
            raise ValueError(
                f"geometry: Lipschitz() does not bound {path!r}: its convolution pads with pixels"
                " or masks its kernel; pad with zeros, or override its entry"
            )
        scale = dataclasses.replace(scale, overlap=role.overlap)
        entry = dataclasses.replace(cast(Any, entry), scale=scale)
    return LaidOut(entry, layout)


def _refuse_rescaled(
    path: str, owners: list[tuple[str, Any]], rescaling: tuple[type, ...], entry: Manifold
) -> None:
    if rescalers := [owner for _, owner in owners if isinstance(owner, rescaling)]:
        raise ValueError(
            f"geometry: {type(rescalers[0]).__name__} rescales {path!r} in the forward pass, so"
            f" that {entry} does not bound the weight that acts: take the wrapper out, or leave the"
            f" weight free: overrides={{{path!r}: None}}"
        )


def _unknown(unknown: list[tuple[str, str, Any]]) -> str:
    named = [
        f"{path!r}" + (f" (of {type(owner).__name__})" if owner is not None else "")
        for path, _, owner in unknown
    ]
    path, below, owner = unknown[0]
    hint = f"overrides={{{path!r}: manifold}}, None for the rest"
    if owner is not None:
        hint += f", or for the type overrides={{{type(owner).__name__}: {{{below!r}: manifold}}}}"
    return f"geometry: the types of modules do not say what these are: {', '.join(named)}; {hint}"
