"""Rules of the atoms."""

import math

from manifoldmuon.certificates._measures import RMS, Largest, OneHot, Size, times
from manifoldmuon.certificates._rule import rule
from manifoldmuon.certificates._transfer import Transfer, read
from manifoldmuon.certificates._weights import Weight
from manifoldmuon.modules import Conv2D, Embed, Linear, Unembed


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
