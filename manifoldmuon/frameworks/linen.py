"""Geometries of Flax Linen models, from the types of their modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from manifoldmuon._internal.text import missing_extra
from manifoldmuon._internal.trees.paths import flatten_with_path, path_string, prefixes
from manifoldmuon.frameworks import _reading as reading
from manifoldmuon.frameworks._reading import DENSE, REST, TABLE, Choice, Overrides, axes
from manifoldmuon.manifolds import Entry, Manifold

try:
    import flax.linen as nn
except ImportError as error:
    raise missing_extra("manifoldmuon.frameworks.linen", "Flax", "flax") from error

__all__ = ["geometry"]


def geometry(
    model: Any,
    inputs: Sequence[Any],
    matrices: Manifold | None,
    *,
    attention: Choice = ...,
    per_head: bool = False,
    convolutions: Choice = ...,
    embedding: Manifold | None = None,
    rest: Manifold | None = None,
    overrides: Overrides | None = None,
    options: Mapping[str, Any] | None = None,
) -> dict[str, Entry | None]:
    """Return the geometry of a model, from the types of its modules.

    Known modules are `Dense`, `DenseGeneral`, `Einsum`, `Conv`, `ConvTranspose`, `Embed`,
    attention, recurrent cells, norms and `PReLU`, also under `nn.scan`, `nn.vmap` and `nn.remat`.

    Args:
      model: a Linen module, without parameters.
      inputs: the arguments of `model.init` after the random key, as a tuple: arrays or
        `jax.ShapeDtypeStruct`, of which only shapes are used, and flags such as `True`.
      matrices: see `frameworks.nnx.geometry`, also for the arguments not listed here.
      options: keyword arguments of `model.init`, such as `{"train": False}`.

    Returns:
      Entries by path, for `variables["params"]`. For all `variables` write `{"params": geometry}`.

    Examples:
      >>> from flax import linen
      >>> geometry(linen.Dense(3), (jnp.ones(2),), mm.manifolds.Stiefel())["bias"] is None
      True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            "frameworks.linen.geometry: model must be a Linen module; got"
            f" {type(model).__name__}: use frameworks.nnx or frameworks.equinox"
        )
    choices = reading.Choices(
        matrices, attention, per_head, convolutions, embedding, rest, overrides
    )
    modules: dict[str, list[nn.Module]] = {}  # several after `nn.share_scope`
    single: dict[str, tuple[int, ...]] = {}
    rescaled: dict[str, nn.Module] = {}
    owner: dict[str, str] = {}

    def note(call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        above = "/".join(context.module.path)
        sharing = modules.setdefault(above, [])
        if not any(type(context.module) is type(other) for other in sharing):
            sharing.append(context.module)
        result = call(*args, **kwargs)
        if isinstance(context.module, _RESCALING):  # its layer lies beside it
            inside = "/".join(context.module.layer_instance.path)
            rescaled[inside] = context.module
        # Inside a scan over layers these are the shapes of a single layer.
        for name, x in context.module.variables.get("params", {}).items():
            if hasattr(x, "shape"):
                path = f"{above}/{name}".removeprefix("/")
                single.setdefault(path, x.shape)
                owner[path] = above  # "kernel/scale" of `WeightNorm` is not its layer's
        return result

    with nn.intercept_methods(note):
        params = _shapes(model, inputs, options or {}).get("params", {})
    paths = [path_string(path) for path, _ in flatten_with_path(params)[0]]
    named = []
    for path in paths:
        branch = path.rpartition("/")[0]
        above = [(at, rescaled[at]) for at in prefixes(branch) if at in rescaled]
        at_and_above = prefixes(owner.get(path, branch))
        inside = [(at, module) for at in at_and_above for module in modules.get(at, ())]
        named.append((path, above + inside))
    return reading.entries(named, _READERS, choices, params, single, _RESCALING)


def _shapes(model: Any, inputs: Sequence[Any], options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the shapes of the variables of a model, which may branch on inputs without a shape."""
    leaves, treedef = jax.tree.flatten(tuple(inputs))
    is_array = [hasattr(x, "shape") for x in leaves]

    def init(key: jax.Array, arrays: Sequence[jax.Array]) -> Any:
        left = iter(arrays)
        filled = [next(left) if own else x for own, x in zip(is_array, leaves, strict=True)]
        return model.init(key, *jax.tree.unflatten(treedef, filled), **options)

    arrays = [x for own, x in zip(is_array, leaves, strict=True) if own]
    return jax.eval_shape(init, jax.random.key(0), arrays)


_NORMS = (nn.BatchNorm, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.InstanceNorm, nn.PReLU)

_RESCALING = (nn.WeightNorm, nn.SpectralNorm)


def _conv_lstm(module: nn.ConvLSTMCell, per_head: bool) -> Mapping[str, reading.Role]:
    kernel = axes(module.kernel_size)
    reads = reading.overlap(kernel, module.strides, 1, module.padding)
    gates = reading.convolution(len(kernel), 4, reads)
    return {f"{x}/kernel": gates for x in ("ih", "hh")} | {f"{x}/bias": REST for x in ("ih", "hh")}


_READERS: dict[type, reading.Reader] = {
    nn.Dense: lambda m, _: DENSE,
    nn.DenseGeneral: lambda m, _: {
        "kernel": reading.general(len(axes(m.axis)), len(axes(m.features))),
        "bias": REST,
    },
    nn.Einsum: lambda m, _: reading.einsum(m.einsum_str),
    nn.MultiHeadDotProductAttention: lambda m, per_head: reading.heads(per_head),
    nn.Conv: reading.flax_convolution,
    nn.ConvTranspose: reading.flax_transposed_convolution,
    nn.Embed: lambda m, _: {"embedding": TABLE},
    nn.recurrent.DenseParams: lambda m, _: DENSE,
    nn.ConvLSTMCell: _conv_lstm,
    nn.WeightNorm: lambda m, _: {"*": REST},
    **dict.fromkeys(_NORMS, lambda m, _: {"*": REST}),
}
