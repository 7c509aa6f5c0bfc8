"""New, rarely needed or unproved parts: held to the same tests, and free to change or go."""

from manifoldmuon.contrib._attention import AttendValues, CausalMask, QueryKey, Softmax
from manifoldmuon.contrib._complex_stiefel import ComplexStiefel
from manifoldmuon.contrib._isospectral import Isospectral
from manifoldmuon.contrib._lipschitz_layers import (
    Householder,
    LocallyConnected,
    TwoTap,
    orthogonal_conv2d,
)
from manifoldmuon.contrib._lipschitz_shapes import NormPool, Shift, SpaceToDepth, SwapAxes
from manifoldmuon.contrib._normuon import normuon, scale_by_neuron_rms
from manifoldmuon.contrib._optax_muon import optax_muon
from manifoldmuon.contrib._qk_clip import with_qk_clip
from manifoldmuon.contrib._quantized import quantized
from manifoldmuon.contrib._smoothness import cross_entropy_smoothness, square_error_smoothness

__all__ = [
    "AttendValues",
    "CausalMask",
    "ComplexStiefel",
    "QueryKey",
    "Softmax",
    "Householder",
    "LocallyConnected",
    "NormPool",
    "Shift",
    "SpaceToDepth",
    "SwapAxes",
    "TwoTap",
    "orthogonal_conv2d",
    "Isospectral",
    "cross_entropy_smoothness",
    "normuon",
    "optax_muon",
    "quantized",
    "scale_by_neuron_rms",
    "square_error_smoothness",
    "with_qk_clip",
]
