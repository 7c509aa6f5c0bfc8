"""Architectures that know their norm: modules, their algebra, manifolds and learning budgets.

A module is built from atoms (with a weight), bonds (without weights) and the operators of
`Module`. It compiles to plain data: `init(key)`, `apply(params, x)`, `geometry()`, `budgets()`.
"""

from manifoldmuon.modules._atoms import Atom, Bias, Conv2D, Embed, Linear, Unembed
from manifoldmuon.modules._attention import (
    FunctionalAttention,
    MergeHeads,
    Positions,
    RoPE,
    SplitHeads,
)
from manifoldmuon.modules._bonds import (
    GELU,
    Abs,
    AveragePool,
    Flatten,
    GroupSort,
    MeanSubtract,
    ReLU,
    RMSDivide,
)
from manifoldmuon.modules._budgets import Sharpness, WeightSpec
from manifoldmuon.modules._external import ExternalModule, Param
from manifoldmuon.modules._module import (
    Add,
    Bond,
    Compose,
    Concatenate,
    Identity,
    Module,
    Mul,
    Stack,
)
from manifoldmuon.modules._networks import attention, gpt, mlp, res_cnn, res_mlp, residual
from manifoldmuon.modules._tied import Tied

__all__ = [
    "Module",
    "Sharpness",
    "WeightSpec",
    "Compose",
    "Concatenate",
    "Stack",
    "Tied",
    "Param",
    "ExternalModule",
    "Atom",
    "Linear",
    "Bias",
    "Embed",
    "Unembed",
    "Conv2D",
    "Bond",
    "Identity",
    "Add",
    "Mul",
    "Abs",
    "ReLU",
    "GELU",
    "GroupSort",
    "MeanSubtract",
    "RMSDivide",
    "AveragePool",
    "Flatten",
    "SplitHeads",
    "MergeHeads",
    "Positions",
    "RoPE",
    "FunctionalAttention",
    "mlp",
    "residual",
    "res_mlp",
    "res_cnn",
    "attention",
    "gpt",
]
