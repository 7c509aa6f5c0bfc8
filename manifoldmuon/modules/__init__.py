"""Architectures that know their norm: modules, their algebra, and what optimizers need of them.

A module is built from atoms (which have a weight), bonds (which have none) and the operators of
`Module`. It compiles to plain data: `init(key)`, `apply(params, x)`, `geometry()`, `budgets()`.
"""

from manifoldmuon.modules._algebra import (
    Add,
    Bond,
    Compose,
    Concatenate,
    Identity,
    Module,
    Mul,
    Stack,
)
from manifoldmuon.modules._atoms import Atom, Conv2D, Embed, Linear, Unembed
from manifoldmuon.modules._attention import (
    GPT,
    AttendValues,
    Attention,
    CausalMask,
    FunctionalAttention,
    QueryKey,
    RoPE,
)
from manifoldmuon.modules._bonds import (
    BALANCED,
    GELU,
    Abs,
    AveragePool,
    Flatten,
    LayerNorm,
    MeanSubtract,
    MergeHeads,
    Positions,
    ReLU,
    RMSDivide,
    ScaledReLU,
    Softmax,
    SplitHeads,
)
from manifoldmuon.modules._networks import MLP, ResCNN, ResMLP, residual
from manifoldmuon.modules._plan import Sharpness, WeightSpec, map_weights
from manifoldmuon.modules._slot import Declared, Slot, declare
from manifoldmuon.modules._tied import Tied, tie

__all__ = [
    "Module",
    "Sharpness",
    "WeightSpec",
    "map_weights",
    "Compose",
    "Concatenate",
    "Stack",
    "Tied",
    "tie",
    "Slot",
    "Declared",
    "declare",
    "Atom",
    "Linear",
    "Embed",
    "Unembed",
    "Conv2D",
    "Bond",
    "Identity",
    "Add",
    "Mul",
    "BALANCED",
    "Abs",
    "ReLU",
    "ScaledReLU",
    "GELU",
    "Softmax",
    "MeanSubtract",
    "RMSDivide",
    "LayerNorm",
    "SplitHeads",
    "MergeHeads",
    "AveragePool",
    "Flatten",
    "Positions",
    "RoPE",
    "QueryKey",
    "CausalMask",
    "AttendValues",
    "FunctionalAttention",
    "MLP",
    "residual",
    "ResMLP",
    "ResCNN",
    "Attention",
    "GPT",
]
