"""New, rarely needed or unproved parts: tested like all others, but free to change or go."""

from manifoldmuon.contrib._complex_stiefel import ComplexStiefel
from manifoldmuon.contrib._lipschitz_layers import (
    Householder,
    LocallyConnected,
    TwoTap,
    orthogonal_conv2d,
)
from manifoldmuon.contrib._lipschitz_shapes import NormPool, Shift, SpaceToDepth, SwapAxes
from manifoldmuon.contrib._normuon import normuon, scale_by_neuron_rms
from manifoldmuon.contrib._qk_clip import with_qk_clip
from manifoldmuon.contrib._quantized import quantized

__all__ = [
    "ComplexStiefel",
    "Householder",
    "LocallyConnected",
    "NormPool",
    "Shift",
    "SpaceToDepth",
    "SwapAxes",
    "TwoTap",
    "orthogonal_conv2d",
    "normuon",
    "quantized",
    "scale_by_neuron_rms",
    "with_qk_clip",
]
