"""Rules of what has weights: the atoms, and the combinations of modules."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from manifoldmuon.bounds._network import bound_part, rule
from manifoldmuon.bounds._sizes import L2, RMS, LInf, NormBound, OneHot, expect_features, times
from manifoldmuon.bounds._transfer import (
    LipschitzBounds,
    Sizes,
    convert_norm,
    identity,
    side_by_side,
)
from manifoldmuon.bounds._weights import Weight
from manifoldmuon.modules import (
    Bias,
    Compose,
    Concatenate,
    Conv2D,
    Embed,
    Householder,
    Linear,
    LocallyConnected,
    Module,
    Stack,
    Tied,
    TwoTap,
    Unembed,
)


@rule.register(Linear)
@rule.register(LocallyConnected)
def _(atom: Linear | LocallyConnected, weights: Weight, x: NormBound) -> LipschitzBounds:
    m, n = atom.shape[-2:]
    size, converted = _read_length(x, n)
    most, least = weights.spectral_norm(atom.shape, blockwise=True)
    # From singular values to RMS norms.
    ratio = math.sqrt(n / m) if size.measure == RMS() else 1.0
    gain, step = ratio * most, ratio * weights.step_norm(atom.shape, blockwise=True)
    # A wide matrix has a kernel: nothing is known of how small its output may be.
    low = times(ratio * least, size.lower) if m >= n else 0.0
    high = times(gain, size.upper)
    out = NormBound(high, min(low, high), size.measure, m)
    return converted.then(LipschitzBounds.of(out, gain, weights=times(step, size.upper), beta=step))


@rule.register
def _(atom: Conv2D, weights: Weight, x: NormBound) -> LipschitzBounds:
    """The output is a sum over the taps, at every stride and padding."""
    size, converted = _read_length(x, atom.in_channels, least_axes=3)
    rms = size.measure == RMS()
    ratio = math.sqrt(atom.in_channels / atom.out_channels) if rms else 1.0
    gain = ratio * weights.spectral_norm(atom.shape)[0]
    step = ratio * weights.step_norm(atom.shape)
    out = size.within(gain, features=atom.out_channels)
    return converted.then(LipschitzBounds.of(out, gain, weights=times(step, size.upper), beta=step))


@rule.register
def _(atom: Embed, weights: Weight, x: NormBound) -> LipschitzBounds:
    _, converted = convert_norm(x, OneHot())
    root = math.sqrt(atom.dim)
    longest, shortest = weights.rows(atom.shape)
    step = weights.step_rows(atom.shape) / root
    gain = longest / root
    out = NormBound(gain, shortest / root, RMS(), atom.dim)
    return converted.then(LipschitzBounds.of(out, gain, weights=step, beta=step))


@rule.register
def _(atom: Unembed, weights: Weight, x: NormBound) -> LipschitzBounds:
    size, converted = convert_norm(x, RMS())
    expect_features(size, atom.dim)
    root = math.sqrt(atom.dim)
    gain, step = weights.rows(atom.shape)[0] / root, weights.step_rows(atom.shape) / root
    out = size.within(gain, measure=LInf(), features=atom.vocabulary)
    return converted.then(LipschitzBounds.of(out, gain, weights=times(step, size.upper), beta=step))


@rule.register
def _(atom: Bias, weights: Weight, x: NormBound) -> LipschitzBounds:
    """In the length over several axes, it is added once for each place, whose number is open."""
    size, converted = _read_length(x, atom.features)
    row = (1, atom.features)
    root = math.sqrt(atom.features) if size.measure == RMS() else 1.0
    places = math.inf if isinstance(size.measure, L2) and size.measure.axes > 1 else 1.0
    length, step = (
        times(places, found / root) for found in (weights.rows(row)[0], weights.step_rows(row))
    )
    reason = f"a bias is as long as there are places in the norm '{size.measure}'"
    out = NormBound(size.upper + length, max(size.lower - length, 0.0), size.measure, atom.features)
    moved = LipschitzBounds.of(
        out, 1.0, weights=step, reasons=(reason,) if math.isinf(step) else ()
    )
    return converted.then(moved)


@rule.register
def _(atom: Householder, weights: Weight, x: NormBound) -> LipschitzBounds:
    """Each pair is kept, or sent through `I - 2 v v^T`; both agree where one becomes the other."""
    size, converted = _read_length(x, atom.features)
    longest, shortest = weights.rows(atom.shape)
    gain = max(1.0, 2 * longest**2 - 1)
    out = size if longest == shortest == 1 else size.within(gain)
    step = times(4 * longest, weights.step_rows(atom.shape))
    turned = LipschitzBounds.of(
        out,
        gain,
        weights=times(step, size.upper),
        beta=math.inf,
        gamma=math.inf,
        reasons=("Householder has a kink, and no second derivative there",),
    )
    return converted.then(dataclasses.replace(turned, alpha=np.full(1, math.inf)))


@rule.register
def _(atom: TwoTap, weights: Weight, x: NormBound) -> LipschitzBounds:
    """An eigenvector of `U U^T`, of eigenvalue p, becomes `1 - p` of itself here and p there.

    In length that is at most `|1 - p| + p`. In the largest norm of a pixel, here and there are two
    pixels: the root of `2 ((1 - p)**2 + p**2)`. Both are convex in p, so that its ends decide.
    """
    size, converted = _read_length(x, atom.channels, least_axes=-atom.axis)
    most = weights.spectral_norm(atom.shape)[0]
    p, turn = most**2, weights.step_norm(atom.shape)
    if size.measure == RMS():
        gain = math.sqrt(2) * max(1.0, math.hypot(1 - p, p))
    else:
        gain = max(1.0, 2 * p - 1)
    # What is moved differs from what stays: twice the movement of U U^T.
    step = 4 * most * turn
    out = size.within(gain, features=atom.channels)
    moved = LipschitzBounds.of(out, gain, weights=times(step, size.upper), beta=step)
    alpha = np.full(1, times(4 * turn**2, size.upper))
    return converted.then(dataclasses.replace(moved, alpha=alpha))


@rule.register
def _(module: Compose, weights: Any, x: Sizes) -> LipschitzBounds:
    return _in_sequence(zip(module.parts, weights, strict=True), x)


@rule.register
def _(module: Stack, weights: Any, x: Sizes) -> LipschitzBounds:
    return _in_sequence(((module.module, _copy(weights, i)) for i in range(module.copies)), x)


@rule.register
def _(module: Concatenate, weights: Any, x: Sizes) -> LipschitzBounds:
    pairs = zip(module.parts, weights, strict=True)
    parts = tuple(bound_part(part, inner, x) for part, inner in pairs)
    return dataclasses.replace(side_by_side([part.transfer for part in parts]), parts=parts)


@rule.register
def _(module: Tied, weights: Any, x: Sizes) -> LipschitzBounds:
    """Every place moves with the one budget; that the effects add up is the rule for sums."""
    part = bound_part(module.module, module.untied(weights), x)
    return dataclasses.replace(part.transfer, parts=(part,))


def _read_length(x: Sizes, features: int, least_axes: int = 1) -> tuple[Any, LipschitzBounds]:
    """In length, if the input has one that covers as many axes; in the RMS norm otherwise."""
    length = isinstance(x, NormBound) and x.is_length(least_axes)
    size, converted = convert_norm(x, x.measure if length else RMS())
    expect_features(size, features)
    return size, converted


def _in_sequence(parts: Iterable[tuple[Module, Any]], x: Sizes) -> LipschitzBounds:
    whole, found = identity(x), []
    for module, weights in parts:
        found.append(bound_part(module, weights, whole.outputs))
        whole = whole.then(found[-1].transfer)
    return dataclasses.replace(whole, parts=tuple(found))


def _copy(weights: Any, index: int) -> Any:
    return jax.tree.map(
        lambda weight: weight.copy(index), weights, is_leaf=lambda x: isinstance(x, Weight)
    )
