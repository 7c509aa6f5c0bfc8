"""New, rarely needed or unproved parts: tested like all others, but free to change or go."""

from manifoldmuon.contrib._complex_stiefel import ComplexStiefel
from manifoldmuon.contrib._lipschitz_layers import (
    LocallyConnected,
    Shift,
    SpaceToDepth,
    TwoTap,
    orthogonal_conv2d,
)
from manifoldmuon.contrib._normuon import normuon, scale_by_neuron_rms
from manifoldmuon.contrib._qk_clip import with_qk_clip
from manifoldmuon.contrib._quantized import quantized

__all__ = [
    "ComplexStiefel",
    "LocallyConnected",
    "Shift",
    "SpaceToDepth",
    "TwoTap",
    "orthogonal_conv2d",
    "normuon",
    "quantized",
    "scale_by_neuron_rms",
    "with_qk_clip",
]
