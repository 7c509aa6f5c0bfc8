"""Geometries of Haiku models, from the types of their modules."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from manifoldmuon._internal.text import missing_extra
from manifoldmuon.frameworks import _reading as reading
from manifoldmuon.frameworks._reading import KERNEL, REST, TABLE, Choice, Entry, Overrides, Role
from manifoldmuon.manifolds import Layout, Manifold

try:
    import haiku as hk
except ImportError as error:
    raise missing_extra("manifoldmuon.frameworks.haiku", "Haiku", "haiku") from error

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
) -> dict[str, Entry]:
    """Return the geometry of a model, from the types of its modules.

    Known modules are `Linear`, convolutions, `Embed`, `MultiHeadAttention`, `LSTM`, `GRU`,
    convolutional LSTMs, norms and `Bias`, also in a `layer_stack`.

    Args:
      model: the result of `hk.transform` or `hk.transform_with_state`.
      inputs: the arguments of `model.init` after the random key, as a tuple: arrays or
        `jax.ShapeDtypeStruct`. Nothing is computed.
      matrices: see `frameworks.nnx.geometry`, also for the arguments not listed here.
      options: keyword arguments of `model.init`, such as `{"is_training": True}`.

    Returns:
      Entries by path, for the parameters.

    Examples:
      >>> import haiku as hk
      >>> model = hk.transform(lambda x: hk.Linear(3)(x))
      >>> geometry(model, (jnp.ones(2),), mm.manifolds.Stiefel())["linear/b"] is None
      True
    """
    choices = reading.Choices(
        matrices, attention, per_head, convolutions, embedding, rest, overrides
    )
    modules: dict[str, hk.Module] = {}
    lifted: list[str] = []

    def note(call: Any, args: Any, kwargs: Any, context: hk.MethodContext) -> Any:
        # The modules of a `layer_stack` do not know the name under which it lifts them.
        lifts = (
            type(context.module).__name__ == "LiftingModule" and context.method_name != "__init__"
        )
        if lifts:
            lifted.append(context.module.module_name)
        result = call(*args, **kwargs)  # call first: `__init__` sets the name
        if lifts:
            lifted.pop()
        elif hk.running_init():  # false in the stack's own loop
            modules.setdefault("/".join([*lifted, context.module.module_name]), context.module)
        return result

    with hk.intercept_methods(note):
        init = functools.partial(model.init, **(options or {}))
        made: Any = jax.eval_shape(init, jax.random.key(0), *inputs)
    params = made[0] if isinstance(model, hk.TransformedWithState) else made
    paths = [f"{module}/{name}" for module, arrays in params.items() for name in arrays]
    named = [(path, reading.owners_by_name(path, modules)) for path in paths]
    return reading.entries(named, _READERS, choices, params, {})  # stacks are leading axes


def _heads(module: hk.MultiHeadAttention, per_head: bool) -> Mapping[str, Role]:
    count = module.num_heads if per_head else 1
    inward = Role("attention", Layout(-2, -1, out_blocks=count))
    outward = Role("attention", Layout(-2, -1, in_blocks=count))
    names = ("query", "key", "value")
    weights = {f"{name}/w": inward for name in names}
    biases = {f"{name}/b": REST for name in (*names, "linear")}
    return {**weights, **biases, "linear/w": outward}


def _convolution(module: hk.ConvND, per_head: bool) -> Mapping[str, Role]:
    m = module
    reads = reading.overlap(m.kernel_shape, m.stride, m.kernel_dilation, mask=m.mask)
    kernel = reading.convolution(m.num_spatial_dims, m.feature_group_count, reads)
    return {"w": kernel, "b": REST}


def _transposed_convolution(module: hk.ConvNDTranspose, per_head: bool) -> Mapping[str, Role]:
    reads = reading.overlap(module.kernel_shape, module.stride, 1, mask=module.mask)
    return {"w": reading.transposed_convolution(module.num_spatial_dims, True, reads), "b": REST}


def _conv_lstm(module: Any, per_head: bool) -> Mapping[str, Role]:
    taps = module.num_spatial_dims
    shape = module.kernel_shape
    reads = reading.overlap((shape,) * taps if isinstance(shape, int) else shape, 1, 1)
    gates, layers = reading.convolution(taps, 4, reads), ("input_to_hidden", "hidden_to_hidden")
    return {f"{x}/w": gates for x in layers} | {f"{x}/b": REST for x in layers}


def _gates(count: int) -> Role:
    return reading.matrix(Layout(-2, -1, out_blocks=count))


_NORMS = (hk.LayerNorm, hk.RMSNorm, hk.BatchNorm, hk.GroupNorm, hk.InstanceNorm, hk.Bias)

_READERS: dict[type, reading.Reader] = {
    hk.Linear: lambda m, _: {"w": KERNEL, "b": REST},
    hk.MultiHeadAttention: _heads,
    hk.Embed: lambda m, _: {"embeddings": TABLE},
    hk.LSTM: lambda m, _: {"linear/w": _gates(4), "linear/b": REST},
    hk.GRU: lambda m, _: {"w_i": _gates(3), "w_h": _gates(3), "b": REST},
    **dict.fromkeys((hk.Conv1DLSTM, hk.Conv2DLSTM, hk.Conv3DLSTM), _conv_lstm),
    hk.ConvND: _convolution,
    hk.ConvNDTranspose: _transposed_convolution,
    **dict.fromkeys(_NORMS, lambda m, _: {"*": REST}),
}
