"""Geometries of Flax NNX models, from the types of their modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manifoldmuon._internal.text import missing_extra
from manifoldmuon.frameworks import _reading as reading
from manifoldmuon.frameworks._reading import DENSE, REST, TABLE, Choice, Overrides, Role
from manifoldmuon.manifolds import Entry, Euclidean, Layout, Manifold, Stiefel
from manifoldmuon.norms import FanRatio, RMSToRMS

try:
    from flax import nnx
except ImportError as error:
    raise missing_extra("manifoldmuon.frameworks.nnx", "Flax", "flax") from error

__all__ = ["geometry", "lora_geometry"]


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
    wrt: Any = nnx.Param,
) -> dict[str, Entry | None]:
    """Return the geometry of a model, from the types of its modules.

    Each type determines the axes of fan-in, fan-out, heads and taps; they are never guessed from
    shapes. Subclasses and stacks by `nnx.vmap` are read like the modules themselves; the axes of a
    stack are declared (`Manifold.stacked`).

    | module | read as |
    |---|---|
    | `Linear`, `LinearGeneral`, `LoRALinear` | `matrices`: from all input to all output axes |
    | `Einsum` | `matrices`: contracted axes are fan-in, axes shared by all operands are copies |
    | `MultiHeadAttention` | `attention`: projections d to (heads, head_dim), output back |
    | `Conv` | `convolutions`: a patch, all taps and inputs, to the outputs of each group |
    | `ConvTranspose` | `convolutions`: inputs to all taps and outputs |
    | `Embed` | `embedding`: a table, a vector in each row |
    | `LSTMCell`, `GRUCell`, ... | `matrices`: a matrix per gate |
    | norms, `PReLU`, biases, scales of `WeightNorm`, `LoRA` factors (`lora_geometry`) | `rest` |

    `Stiefel(Lipschitz())` gives every layer of `Linear` and `Conv` a Euclidean Lipschitz constant
    of at most 1, at every stride; see `norms.Lipschitz`.

    None, the default of `embedding` and `rest`, leaves parameters to another optimizer, such as
    `optim.muonh(rate, geometry(...), rest=optax.adamw(3e-4))`.

    Args:
      model: an `nnx.Module`; arrays or shapes (`nnx.eval_shape`).
      matrices: manifold of linear maps `(fan_out, fan_in)`, or None.
      attention: manifold of attention projections, or None; by default (`...`) as `matrices`.
      per_head: whether each head is a separate matrix in all four projections, so that heads do
        not influence each other's steps. By default a projection is a single matrix.
      convolutions: manifold of convolution kernels, or None; by default (`...`) as `matrices`. A
        manifold of more than two axes, such as `Euclidean(ConvRMSToRMS())`, gets the kernel tap by
        tap; the norm's `tap_axes` follow the kernel.
      embedding: manifold of tables `(vocabulary, d)`, such as `EmbeddingRows()`, or None.
      rest: manifold of all other parameters, or None.
      overrides: entries that take precedence, by a pattern on the path as in `optim.by_path`, then
        by a type of module, innermost first: `{"head/kernel": None, nnx.LoRA: Stiefel(),
        Mine: {"w": Stiefel().transposed(), "b": None}}`. A manifold gets the layout of the module
        if known; an entry with its own layout keeps it.
      wrt: filter of the trained variables, as in `nnx.Optimizer`.

    Returns:
      Entries by path, for `nnx.state(model, wrt)`: a plain dictionary to print or change.

    Raises:
      TypeError: the type of a module is unknown (the message names paths, types and the override
        to write), or an argument is not a manifold.
      ValueError: an override matches no parameter, a shape does not fit (see
        `optim.resolve_geometry`), the axis of a stack is ambiguous, `Lipschitz()` cannot bound a
        convolution, or `WeightNorm` or `SpectralNorm` rescales a constrained weight.

    Warns:
      UserWarning: the first axis is taken for that of a stack, and others fit as well, as in four
        stacked 4 x 4 kernels.

    Examples:
      >>> from flax import nnx as flax_nnx
      >>> model = flax_nnx.Linear(2, 3, rngs=flax_nnx.Rngs(0))
      >>> geometry(model, mm.manifolds.Stiefel())["bias"] is None
      True
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"frameworks.nnx.geometry: model must be an nnx.Module; got {type(model).__name__}: use"
            " frameworks.linen or frameworks.equinox"
        )
    choices = reading.Choices(
        matrices, attention, per_head, convolutions, embedding, rest, overrides
    )
    params = nnx.state(model, wrt)
    named = [
        ("/".join(map(str, path)), list(_owning_modules(model, path)))
        for path, _ in nnx.to_flat_state(params)
    ]
    single = reading.single_shapes(named, _SHAPES)
    rescaling = nnx.WeightNorm, nnx.SpectralNorm
    return reading.entries(named, _READERS, choices, params, single, rescaling)


def lora_geometry(model: Any) -> dict[str, Entry | None]:
    """Return the geometry of a model's LoRA adapters: one orthonormal factor, one free.

    `lora_a`, random at the start, is on `Stiefel(FanRatio())`, so that no factor can grow while the
    other shrinks; `lora_b`, zero at the start, is free, with steps in the RMS-to-RMS norm (see
    `manifolds.low_rank`). Train it with `nnx.Optimizer(model, optim.manifold_muon(rate, geometry),
    wrt=nnx.LoRAParam)`. Before, project the random factors, which changes no output while `lora_b`
    is zero: `nnx.update(model, optim.project_tree(geometry, nnx.state(model, nnx.LoRAParam)))`.

    Args:
      model: an `nnx.Module` with `nnx.LoRA` or `nnx.LoRALinear` layers, stacks included.

    Returns:
      Entries by path, for `nnx.state(model, nnx.LoRAParam)`.

    Raises:
      TypeError: a `LoRAParam` is not in an `nnx.LoRA`; name it by `optim.by_path`.
      ValueError: the model has no adapters; see `geometry`.

    Examples:
      >>> from flax import nnx as flax_nnx
      >>> model = flax_nnx.LoRALinear(8, 6, lora_rank=2, rngs=flax_nnx.Rngs(0))
      >>> lora_geometry(model)["lora/lora_a"].manifold
      Stiefel(scale=FanRatio())
    """
    factors = {"lora_a": Stiefel(FanRatio()), "lora_b": Euclidean(RMSToRMS())}
    return geometry(model, None, overrides={nnx.LoRA: factors}, wrt=nnx.LoRAParam)


def _owning_modules(model: Any, path: tuple[Any, ...]) -> Any:
    """Yield path and module of each module above a variable, outermost first."""
    node = model
    for depth, key in enumerate(path):
        if isinstance(node, nnx.Module) and not isinstance(node, nnx.List | nnx.Dict):
            yield "/".join(map(str, path[:depth])), node
        node = _attribute_or_item(node, key)


def _attribute_or_item(node: Any, key: Any) -> Any:
    return getattr(node, key) if isinstance(key, str) and hasattr(node, key) else node[key]


def _recurrent_gates(count: int) -> Mapping[str, Role]:
    """Return the two fused layers of a recurrent cell, split by gate."""
    gates = reading.matrix(Layout(-2, -1, out_blocks=count))
    layers = ("dense_i", "dense_h")
    return {f"{x}/kernel": gates for x in layers} | {f"{x}/bias": REST for x in layers}


_NORMS = (nnx.BatchNorm, nnx.LayerNorm, nnx.RMSNorm, nnx.GroupNorm, nnx.InstanceNorm, nnx.PReLU)

_READERS: dict[type, reading.Reader] = {
    nnx.Linear: lambda m, _: DENSE,
    nnx.LinearGeneral: lambda m, _: {
        "kernel": reading.general(len(m.in_features), len(m.out_features)),
        "bias": REST,
    },
    nnx.Einsum: lambda m, _: reading.einsum(m.einsum_str),
    nnx.MultiHeadAttention: lambda m, per_head: reading.heads(per_head),
    nnx.Conv: reading.flax_convolution,
    nnx.ConvTranspose: reading.flax_transposed_convolution,
    nnx.Embed: lambda m, _: {"embedding": TABLE},
    nnx.LoRA: lambda m, _: dict.fromkeys(("lora_a", "lora_b"), Role("rest", Layout(-2, -1))),
    nnx.OptimizedLSTMCell: lambda m, _: _recurrent_gates(4),
    nnx.GRUCell: lambda m, _: _recurrent_gates(3),
    nnx.WeightNorm: lambda m, _: {"*": REST},
    **dict.fromkeys(_NORMS, lambda m, _: {"*": REST}),
}

# Shapes of parameters in an unstacked module.
_SHAPES: dict[type, reading.Shapes] = {
    nnx.Linear: lambda m: {"kernel": (m.in_features, m.out_features)},
    nnx.LinearGeneral: lambda m: {"kernel": (*m.in_features, *m.out_features)},
    nnx.Einsum: lambda m: {"kernel": tuple(m.kernel_shape)},
    nnx.Conv: lambda m: {"kernel": tuple(m.kernel_shape)},
    nnx.ConvTranspose: lambda m: {"kernel": tuple(m.kernel_shape)},
    nnx.Embed: lambda m: {"embedding": (m.num_embeddings, m.features)},
    nnx.LoRA: lambda m: {"lora_a": (m.in_features, None), "lora_b": (None, m.out_features)},
}
