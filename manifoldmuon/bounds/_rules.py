"""Bounding rules for the package's modules: atoms, combinations and bonds."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from manifoldmuon import modules
from manifoldmuon.bounds._lipschitz_bounds import LipschitzBounds, Sizes
from manifoldmuon.bounds._network import bound_part, propagate
from manifoldmuon.bounds._norm_bounds import L2, RMS, LInf, NormBound, OneHot, times, times_down
from manifoldmuon.bounds._weights import WeightRegion

read_length, convert_norm = LipschitzBounds.read_length, LipschitzBounds.convert_norm


@propagate.register(modules.Linear)
@propagate.register(modules.Conv2D)
def bound_linear(atom: Any, weights: WeightRegion, x: NormBound) -> LipschitzBounds:
    """Bound a matrix product, or a convolution as a sum over its taps.

    The bound of a convolution holds at every stride and padding.
    """
    taps, (m, n) = isinstance(atom, modules.Conv2D), atom.shape[-2:]
    read = read_length(x, axes=3 if taps else 1, features=n)
    size = read.outputs
    most, least = weights.spectral_norm(atom.shape, blockwise=not taps)
    # Convert singular values to RMS norms.
    ratio = math.sqrt(n / m) if size.norm == RMS() else 1.0
    gain, step = ratio * most, ratio * weights.step_norm(atom.shape, blockwise=not taps)
    # No lower bound for wide matrices (they have a kernel) or for sums over taps.
    low = times_down(ratio * least, size.lower) if m >= n and not taps else 0.0
    high = times(gain, size.upper)
    out = NormBound(high, min(low, high), size.norm, m)
    return read.then_of(out, gain, weights=times(step, size.upper))


@propagate.register
def bound_embed(atom: modules.Embed, weights: WeightRegion, x: NormBound) -> LipschitzBounds:
    longest, shortest, step = (
        length / math.sqrt(atom.dim)
        for length in (*weights.rows(atom.shape), weights.step_rows(atom.shape))
    )
    out = NormBound(longest, shortest, RMS(), atom.dim)
    return convert_norm(x, OneHot()).then_of(out, longest, weights=step)


@propagate.register
def bound_unembed(atom: modules.Unembed, weights: WeightRegion, x: NormBound) -> LipschitzBounds:
    read, root = convert_norm(x, RMS()), math.sqrt(atom.dim)
    size = read.outputs
    size.expect_features(atom.dim)
    gain, step = weights.rows(atom.shape)[0] / root, weights.step_rows(atom.shape) / root
    out = size.within(gain, norm=LInf(), features=atom.vocabulary)
    return read.then_of(out, gain, weights=times(step, size.upper))


@propagate.register
def bound_bias(atom: modules.Bias, weights: WeightRegion, x: NormBound) -> LipschitzBounds:
    """Bound a shift: infinite in `L2` over several axes, as the number of positions is unknown."""
    read, row = read_length(x, features=atom.features), (1, atom.features)
    size = read.outputs
    root = math.sqrt(atom.features) if size.norm == RMS() else 1.0
    positions = math.inf if size.is_length(2) else 1.0
    length, step = (
        times(positions, radius / root) for radius in (weights.rows(row)[0], weights.step_rows(row))
    )
    reason = f"a bias at an unknown number of positions has no bound in the norm {size.norm}"
    out = NormBound(size.upper + length, max(size.lower - length, 0.0), size.norm, atom.features)
    return read.then_of(out, 1.0, weights=step, reasons=(reason,) if math.isinf(step) else ())


@propagate.register
def bound_compose(module: modules.Compose, weights: Any, x: Sizes) -> LipschitzBounds:
    return _in_sequence(zip(module.parts, weights, strict=True), x)


@propagate.register
def bound_stack(module: modules.Stack, weights: Any, x: Sizes) -> LipschitzBounds:
    copies = (jax.tree.map(lambda w, i=i: w.copy(i), weights) for i in range(module.copies))
    return _in_sequence(((module.module, copy) for copy in copies), x)


@propagate.register
def bound_concatenate(module: modules.Concatenate, weights: Any, x: Sizes) -> LipschitzBounds:
    pairs = zip(module.parts, weights, strict=True)
    parts = tuple(bound_part(child, inner, x) for child, inner in pairs)
    branches = [child.transfer for child in parts]
    return LipschitzBounds(
        tuple(branch.outputs for branch in branches),
        np.concatenate([branch.slopes for branch in branches]),
        np.concatenate([branch.weights for branch in branches]),
        tuple(reason for branch in branches for reason in branch.reasons),
        parts,
    )


@propagate.register
def bound_tied(module: modules.Tied, weights: Any, x: Sizes) -> LipschitzBounds:
    """Bound the untied module: every occurrence moves by the shared budget, and effects add up."""
    child = bound_part(module.module, module.untied(weights), x)
    return dataclasses.replace(child.transfer, parts=(child,))


def _in_sequence(layers: Iterable[tuple[modules.Module, Any]], x: Sizes) -> LipschitzBounds:
    whole, bounds = LipschitzBounds.identity(x), []
    for module, weights in layers:
        bounds.append(bound_part(module, weights, whole.outputs))
        whole = whole.then(bounds[-1].transfer)
    return dataclasses.replace(whole, parts=tuple(bounds))


@propagate.register
def bound_identity(bond: modules.Identity, weights: Any, x: Sizes) -> LipschitzBounds:
    return LipschitzBounds.identity(x)


@propagate.register
def bound_mul(bond: modules.Mul, weights: Any, x: Sizes) -> LipschitzBounds:
    factor = abs(bond.factor)
    for size in jax.tree.leaves(x):
        size.expect_numbers()
    same = LipschitzBounds.identity(jax.tree.map(lambda size: size.scaled(factor), x))
    return dataclasses.replace(same, slopes=factor * same.slopes)


@propagate.register
def bound_add(bond: modules.Add, weights: Any, x: Sizes) -> LipschitzBounds:
    """Bound a sum by the triangle inequality, from above and from below.

    Terms measured in different norms are added in the RMS norm, which every norm bounds.
    """
    if isinstance(x, NormBound):
        raise ValueError(f"expected a tuple of terms; got the size {x}")
    terms = [jax.tree.leaves(term) for term in x]
    columns = list(zip(*terms, strict=True))
    used = [{size.norm for size in column} for column in columns]
    norms = [distinct.pop() if len(distinct) == 1 else RMS() for distinct in used]
    read = convert_norm(x, *(norms * len(terms)))
    for one, other in itertools.chain(*(itertools.combinations(c, 2) for c in columns)):
        one.expect_features(other.features)
    width = len(columns)
    sums = iter([_sum_bounds(jax.tree.leaves(read.outputs)[k::width]) for k in range(width)])
    added = LipschitzBounds.identity(jax.tree.map(lambda size: next(sums), x[0]))
    return read.then(dataclasses.replace(added, slopes=np.tile(added.slopes, len(terms))))


def _sum_bounds(terms: list[NormBound]) -> NormBound:
    most = float(sum(term.upper for term in terms))
    ahead = [term.lower - (most - term.upper) for term in terms] if math.isfinite(most) else []
    known = [term.features for term in terms if term.features is not None]
    return NormBound(most, max([0.0, *ahead]), terms[0].norm, known[0] if known else None)


def _by_entries(out: NormBound, slope: float = 1.0) -> LipschitzBounds:
    """Return the bounds of a module that maps single vectors, in any norm of numbers."""
    out.expect_numbers()
    return LipschitzBounds.of(out, slope)


@propagate.register
def bound_abs(bond: modules.Abs, weights: Any, x: NormBound) -> LipschitzBounds:
    return _by_entries(x)


@propagate.register
def bound_relu(bond: modules.ReLU, weights: Any, x: NormBound) -> LipschitzBounds:
    return _by_entries(x.within())


@propagate.register
def bound_group_sort(bond: modules.GroupSort, weights: Any, x: NormBound) -> LipschitzBounds:
    """Bound a permutation of entries that never increases the distance of two inputs."""
    x.expect_features(divisor=bond.size)
    return _by_entries(x)


@propagate.register
def bound_gelu(bond: modules.GELU, weights: Any, x: NormBound) -> LipschitzBounds:
    return _by_entries(x.within(), bond.LIPSCHITZ)


@propagate.register
def bound_mean_subtract(bond: modules.MeanSubtract, weights: Any, x: NormBound) -> LipschitzBounds:
    """Bound an orthogonal projection; of the largest magnitudes an outlier may nearly double."""
    slope = 1.0 if isinstance(x.norm, L2 | RMS) else 2.0
    return _by_entries(x.within(slope), slope)


@propagate.register
def bound_rms_divide(bond: modules.RMSDivide, weights: Any, x: NormBound) -> LipschitzBounds:
    """Bound the slope by 1 over the least norm of an input."""
    read = convert_norm(x, RMS())
    least = read.outputs.lower
    reason = "RMSDivide may get inputs near zero, where it has no largest slope"
    out = NormBound(1.0, 1.0 if least else 0.0, features=read.outputs.features)
    slope = 1 / least if least else math.inf
    return read.then_of(out, slope, reasons=() if least else (reason,))


@propagate.register
def bound_split_heads(bond: modules.SplitHeads, weights: Any, x: NormBound) -> LipschitzBounds:
    """Bound an isometry: the output is measured over all heads, see `RMS`."""
    read = convert_norm(x, RMS())
    read.outputs.expect_features(divisor=bond.heads)
    features = read.outputs.features and read.outputs.features // bond.heads
    out = dataclasses.replace(read.outputs, norm=RMS(bond.heads), features=features)
    return read.then_of(out, 1.0)


@propagate.register
def bound_merge_heads(bond: modules.MergeHeads, weights: Any, x: NormBound) -> LipschitzBounds:
    """Bound the inverse of `SplitHeads`; heads measured separately merge to at most the largest."""
    if isinstance(x.norm, RMS) and x.norm.heads > 1:
        features = x.features and x.norm.heads * x.features
        return LipschitzBounds.of(dataclasses.replace(x, norm=RMS(), features=features), 1.0)
    read = convert_norm(x, RMS())
    return read.then_of(dataclasses.replace(read.outputs, features=None), 1.0)


@propagate.register
def bound_average_pool(bond: modules.AveragePool, weights: Any, x: NormBound) -> LipschitzBounds:
    """Bound the slope by 1: loose for `L2`, by the root of the number of averaged pixels."""
    read = read_length(x, axes=3)
    return read.then_of(read.outputs.within(), 1.0)


@propagate.register
def bound_flatten(bond: modules.Flatten, weights: Any, x: NormBound) -> LipschitzBounds:
    """Keep the bounds: the RMS of all entries is between the parts' least and largest RMS."""
    read = read_length(x, axes=bond.axes)
    norm = read.outputs.norm
    if isinstance(norm, L2):
        norm = L2(norm.axes - bond.axes + 1)
    return read.then_of(dataclasses.replace(read.outputs, norm=norm, features=None), 1.0)


@propagate.register
def bound_positions(bond: modules.Positions, weights: Any, x: NormBound) -> LipschitzBounds:
    """Bound the slope by 0: positions do not depend on the tokens."""
    read = convert_norm(x, OneHot())
    return read.then_of(read.outputs, 0.0)


@propagate.register
def bound_rope(bond: modules.RoPE, weights: Any, x: NormBound) -> LipschitzBounds:
    """Bound an isometry of every head: a rotation of planes."""
    x.expect_features(divisor=2)
    return convert_norm(x, x.norm if isinstance(x.norm, RMS) else RMS())


@propagate.register
def bound_attention(bond: modules.FunctionalAttention, weights: Any, x: Sizes) -> LipschitzBounds:
    """Bound attention by the norms of its queries, keys and values.

    The output of a token is an average of values and moves at most as much as they do. A query
    moves only the output of its own token, head by head, so that the norms over heads of query and
    output compare without a factor. Keys and values may be large in different heads for different
    tokens, which costs a factor of sqrt(heads) each.
    """
    used = {size.norm for size in jax.tree.leaves(x)}
    norm = used.pop() if len(used) == 1 else RMS()
    norm = norm if isinstance(norm, RMS) else RMS()
    read = convert_norm(x, norm, norm, norm)
    q, k, v = read.outputs
    q.expect_features(k.features)
    spread = math.sqrt(norm.heads)
    kv, qv = (times(size.upper, v.upper) for size in (k, q))
    slopes = [norm.heads * kv, norm.heads * qv, spread]
    return read.then_of(v.within(spread), slopes)
