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
from manifoldmuon.modules._atom import Atom
from manifoldmuon.modules._attention import (
    AttendValues,
    CausalMask,
    FunctionalAttention,
    QueryKey,
    RoPE,
)
from manifoldmuon.modules._conv import Conv2D
from manifoldmuon.modules._embed import Embed, Unembed
from manifoldmuon.modules._leaf import Leaf
from manifoldmuon.modules._linear import Linear
from manifoldmuon.modules._networks import MLP, ResCNN, ResMLP, residual
from manifoldmuon.modules._normalization import LayerNorm, MeanSubtract, RMSDivide
from manifoldmuon.modules._pointwise import GELU, Abs, ReLU, ScaledReLU, Softmax
from manifoldmuon.modules._reshaping import (
    AveragePool,
    Flatten,
    MergeHeads,
    Positions,
    SplitHeads,
)
from manifoldmuon.modules._sharpness import Sharpness
from manifoldmuon.modules._slot import Declared, Slot, declare
from manifoldmuon.modules._tied import Tied, tie
from manifoldmuon.modules._transformer import GPT, Attention

__all__ = [
    "Module",
    "Sharpness",
    "Leaf",
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
