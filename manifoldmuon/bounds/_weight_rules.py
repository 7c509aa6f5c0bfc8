"""Rules of what has weights: the atoms, and the combinations of modules."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax

from manifoldmuon.bounds._network import bound_part, rule
from manifoldmuon.bounds._sizes import RMS, Largest, OneHot, Size, times
from manifoldmuon.bounds._transfer import Sizes, Transfer, identity, read, side_by_side
from manifoldmuon.bounds._weights import Weight
from manifoldmuon.modules import (
    Compose,
    Concatenate,
    Conv2D,
    Embed,
    Linear,
    Module,
    Stack,
    Tied,
    Unembed,
)


@rule.register
def _(atom: Linear, weights: Weight, x: Size) -> Transfer:
    size, converted = read(x, RMS())
    m, n = atom.shape
    most, least = weights.stretch(atom.shape)
    ratio = math.sqrt(n / m)  # from singular values to RMS norms
    gain, step = ratio * most, ratio * weights.step_stretch(atom.shape)
    # A wide matrix has a kernel: nothing is known of how small its output may be.
    low = times(ratio * least, size.least) if m >= n else 0.0
    high = times(gain, size.most)
    out = Size(high, min(low, high), RMS(), m)
    return converted.then(Transfer.of(out, gain, weights=times(step, size.most), beta=step))


@rule.register
def _(atom: Conv2D, weights: Weight, x: Size) -> Transfer:
    """A pixel of the output is a sum over the taps, at every stride and padding."""
    size, converted = read(x, RMS())
    ratio = math.sqrt(atom.in_channels / atom.out_channels)
    gain = ratio * weights.stretch(atom.shape)[0]
    step = ratio * weights.step_stretch(atom.shape)
    out = size.within(gain, features=atom.out_channels)
    return converted.then(Transfer.of(out, gain, weights=times(step, size.most), beta=step))


@rule.register
def _(atom: Embed, weights: Weight, x: Size) -> Transfer:
    size, converted = read(x, OneHot())
    root = math.sqrt(atom.dim)
    longest, shortest = weights.rows(atom.shape)
    step = weights.step_rows(atom.shape) / root
    gain = longest / root
    out = Size(gain, shortest / root, RMS(), atom.dim)
    return converted.then(Transfer.of(out, gain, weights=times(step, size.most), beta=step))


@rule.register
def _(atom: Unembed, weights: Weight, x: Size) -> Transfer:
    size, converted = read(x, RMS())
    root = math.sqrt(atom.dim)
    gain, step = weights.rows(atom.shape)[0] / root, weights.step_rows(atom.shape) / root
    out = size.within(gain, measure=Largest(), features=atom.vocabulary)
    return converted.then(Transfer.of(out, gain, weights=times(step, size.most), beta=step))


@rule.register
def _(module: Compose, weights: Any, x: Sizes) -> Transfer:
    return _in_sequence(zip(module.parts, weights, strict=True), x)


@rule.register
def _(module: Stack, weights: Any, x: Sizes) -> Transfer:
    return _in_sequence(((module.module, _copy(weights, i)) for i in range(module.copies)), x)


@rule.register
def _(module: Concatenate, weights: Any, x: Sizes) -> Transfer:
    pairs = zip(module.parts, weights, strict=True)
    parts = tuple(bound_part(part, inner, x) for part, inner in pairs)
    return dataclasses.replace(side_by_side([part.transfer for part in parts]), parts=parts)


@rule.register
def _(module: Tied, weights: Any, x: Sizes) -> Transfer:
    """Every place moves with the one budget; that the effects add up is the rule for sums."""
    part = bound_part(module.module, module.untied(weights), x)
    return dataclasses.replace(part.transfer, parts=(part,))


def _in_sequence(parts: Iterable[tuple[Module, Any]], x: Sizes) -> Transfer:
    whole, found = identity(x), []
    for module, weights in parts:
        found.append(bound_part(module, weights, whole.outputs))
        whole = whole.then(found[-1].transfer)
    return dataclasses.replace(whole, parts=tuple(found))


def _copy(weights: Any, index: int) -> Any:
    return jax.tree.map(
        lambda weight: weight.copy(index), weights, is_leaf=lambda x: isinstance(x, Weight)
    )
