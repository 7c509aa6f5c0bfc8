"""Geometries of Equinox models, from the types of their modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from manifoldmuon._internal.text import missing_extra
from manifoldmuon._internal.trees.paths import path_string
from manifoldmuon.frameworks import _reading as reading
from manifoldmuon.frameworks._reading import REST, TABLE, Choice, Overrides, Role
from manifoldmuon.manifolds import Entry, Layout, Manifold

try:
    import equinox as eqx
except ImportError as error:
    raise missing_extra("manifoldmuon.frameworks.equinox", "Equinox", "equinox") from error

__all__ = ["geometry"]


def geometry(
    model: Any,
    matrices: Manifold | None,
    *,
    attention: Choice = ...,
    per_head: bool = False,
    convolutions: Choice = ...,
    embedding: Manifold | None = None,
    rest: Manifold | None = None,
    overrides: Overrides | None = None,
    where: Callable[[Any], bool] = eqx.is_inexact_array,
) -> dict[str, Entry | None]:
    """Return the geometry of a model, from the types of its modules.

    Known modules are `Linear`, `Conv`, `ConvTranspose` (without groups), `Embedding`,
    `MultiheadAttention`, `GRUCell`, `LSTMCell`, norms, `WeightNorm` and `PReLU`, also inside other
    modules.

    Args:
      model: any pytree with Equinox modules. Leaves refused by `where` are left out, also leaves
        that `eqx.partition` has replaced by None.
      matrices: see `frameworks.nnx.geometry`, also for the arguments not listed here.
      where: filter of the trained leaves, as in `eqx.filter`.

    Returns:
      Entries by path, for `eqx.filter(model, where)`.

    Examples:
      >>> import equinox as eqx
      >>> model = eqx.nn.Linear(2, 3, key=jax.random.key(0))
      >>> geometry(model, mm.manifolds.Stiefel())["bias"] is None
      True
    """
    choices = reading.Choices(
        matrices, attention, per_head, convolutions, embedding, rest, overrides
    )
    params = eqx.filter(model, where)
    pairs = jax.tree_util.tree_leaves_with_path(params)
    if not pairs:
        raise ValueError(
            "frameworks.equinox.geometry: `where` keeps no leaf of the model. For a model of shapes"
            " give where=lambda x: isinstance(x, jax.ShapeDtypeStruct)"
        )
    named = [(path_string(path), list(_owners(model, path))) for path, _ in pairs]
    single = reading.single_shapes(named, _SHAPES)
    rescaling = eqx.nn.WeightNorm, eqx.nn.SpectralNorm
    return reading.entries(named, _READERS, choices, params, single, rescaling)


def _owners(model: Any, path: tuple[Any, ...]) -> Any:
    """Yield path and module of each module above a leaf, outermost first."""
    node = model
    for depth, key in enumerate(path):
        if isinstance(node, eqx.Module):
            yield path_string(path[:depth]), node
        node = _child(node, key)


def _child(node: Any, key: Any) -> Any:
    if isinstance(key, jax.tree_util.GetAttrKey):
        return getattr(node, key.name)
    return node[key.idx if isinstance(key, jax.tree_util.SequenceKey) else key.key]


def _heads(module: eqx.nn.MultiheadAttention, per_head: bool) -> Mapping[str, Role]:
    count = module.num_heads if per_head else 1
    inward = Role("attention", Layout(out_blocks=count))
    outward = Role("attention", Layout(in_blocks=count))
    names = ("query_proj", "key_proj", "value_proj")
    weights = {f"{name}/weight": inward for name in names}
    biases = {f"{name}/bias": REST for name in (*names, "output_proj")}
    return {**weights, **biases, "output_proj/weight": outward}


def _convolution(module: eqx.nn.Conv) -> Role:
    """Return a kernel (out, in, *taps)."""
    taps, groups = module.num_spatial_dims, module.groups
    spatial, out = tuple(range(-taps, 0)), -taps - 2
    whole = Layout((-taps - 1, *spatial), out, out_blocks=groups)
    kernel = Layout(-taps - 1, out, spatial, out_blocks=groups)
    return Role("convolutions", whole, kernel, _overlap(module))


def _overlap(module: eqx.nn.Conv | eqx.nn.ConvTranspose) -> int | None:
    padding = module.padding_mode
    if padding == "CIRCULAR" and not isinstance(module.padding, str):
        reach = zip(module.padding, module.kernel_size, module.dilation, strict=True)
        if any(sum(pads) > (taps - 1) * apart for pads, taps, apart in reach):
            return None  # the output is larger than the image, so patches repeat
    if padding == "CIRCULAR" and isinstance(module, eqx.nn.ConvTranspose):
        return None
    return reading.overlap(module.kernel_size, module.stride, module.dilation, padding)


def _transposed_convolution(module: eqx.nn.ConvTranspose) -> Mapping[str, Role]:
    taps, roles = module.num_spatial_dims, {"bias": REST}
    if module.groups == 1:
        spatial = tuple(range(-taps, 0))
        whole = Layout(-taps - 1, (-taps - 2, *spatial))
        kernel = Layout(-taps - 1, -taps - 2, spatial)
        roles["weight"] = Role("convolutions", whole, kernel, _overlap(module))
    return roles


def _gates(count: int) -> Mapping[str, Role]:
    gates = reading.matrix(Layout(out_blocks=count))
    return {"weight_ih": gates, "weight_hh": gates, "bias": REST, "bias_n": REST}


_NORMS = (eqx.nn.LayerNorm, eqx.nn.RMSNorm, eqx.nn.GroupNorm, eqx.nn.BatchNorm, eqx.nn.PReLU)

_READERS: dict[type, reading.Reader] = {
    eqx.nn.Linear: lambda m, _: {"weight": reading.matrix(Layout()), "bias": REST},
    eqx.nn.MultiheadAttention: _heads,
    eqx.nn.Conv: lambda m, _: {"weight": _convolution(m), "bias": REST},
    eqx.nn.ConvTranspose: lambda m, _: _transposed_convolution(m),
    eqx.nn.Embedding: lambda m, _: {"weight": TABLE},
    eqx.nn.GRUCell: lambda m, _: _gates(3),
    eqx.nn.LSTMCell: lambda m, _: _gates(4),
    eqx.nn.WeightNorm: lambda m, _: {"g": REST},
    **dict.fromkeys(_NORMS, lambda m, _: {"*": REST}),
}


def _cell(module: eqx.nn.GRUCell | eqx.nn.LSTMCell) -> dict[str, tuple[int, ...]]:
    gates = 3 if isinstance(module, eqx.nn.GRUCell) else 4
    widths = {"weight_ih": module.input_size, "weight_hh": module.hidden_size}
    return {name: (gates * module.hidden_size, width) for name, width in widths.items()}


def _width(features: Any) -> int:
    return 1 if features == "scalar" else features


def _kernel(module: eqx.nn.Conv | eqx.nn.ConvTranspose) -> dict[str, tuple[int, ...]]:
    ins = module.in_channels // module.groups
    return {"weight": (module.out_channels, ins, *module.kernel_size)}


# Shapes of parameters in an unstacked module.
_SHAPES: dict[type, reading.Shapes] = {
    eqx.nn.Linear: lambda m: {"weight": (_width(m.out_features), _width(m.in_features))},
    eqx.nn.Conv: _kernel,
    eqx.nn.ConvTranspose: _kernel,
    eqx.nn.Embedding: lambda m: {"weight": (m.num_embeddings, m.embedding_size)},
    eqx.nn.GRUCell: _cell,
    eqx.nn.LSTMCell: _cell,
}
