"""Rules of the bonds."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from manifoldmuon.bounds._network import rule
from manifoldmuon.bounds._sizes import (
    L1,
    L2,
    RMS,
    Heads,
    LInf,
    MaskedLInf,
    NormBound,
    OneHot,
    expect_features,
    times,
)
from manifoldmuon.bounds._transfer import (
    LipschitzBounds,
    Sizes,
    convert_norm,
    identity,
    leaves,
    map_sizes,
)
from manifoldmuon.modules import (
    GELU,
    Abs,
    Add,
    AttendValues,
    AveragePool,
    CausalMask,
    Flatten,
    FunctionalAttention,
    GroupSort,
    Identity,
    MeanSubtract,
    MergeHeads,
    Mul,
    NormPool,
    Positions,
    QueryKey,
    ReLU,
    RMSDivide,
    RoPE,
    ScaledReLU,
    Shift,
    Softmax,
    SpaceToDepth,
    SplitHeads,
    SwapAxes,
)


@rule.register
def _(bond: Identity, weights: Any, x: Sizes) -> LipschitzBounds:
    return identity(x)


@rule.register
def _(bond: Mul, weights: Any, x: Sizes) -> LipschitzBounds:
    factor = abs(bond.factor)
    _refuse(x, OneHot, MaskedLInf)
    same = identity(map_sizes(lambda size: size.scaled(factor), x))
    return dataclasses.replace(same, slopes=factor * same.slopes)


@rule.register
def _(bond: Add, weights: Any, x: Sizes) -> LipschitzBounds:
    """The norm of a sum is at most the sum of norms, and at least one of them less the others."""
    if isinstance(x, NormBound):
        raise ValueError(f"expected a tuple of terms; got the size {x}")
    terms = [leaves(term) for term in x]
    columns = list(zip(*terms, strict=True))
    norms = [_common([size.measure for size in column]) for column in columns]
    _, converted = convert_norm(x, *(norms * len(terms)))
    read_terms = leaves(converted.outputs)
    for first, *others in columns:
        for other in others:
            expect_features(first, other.features)
    width = len(columns)
    sums = [_sum(read_terms[k::width]) for k in range(width)]
    flat = iter(sums)
    adds = np.tile(np.eye(width), len(terms))
    count = adds.shape[1]
    empty = np.zeros(width), np.zeros(width), np.zeros((width, count))
    outputs = map_sizes(lambda size: next(flat), x[0])
    return converted.then(LipschitzBounds(outputs, adds, *empty, np.zeros((width, count, count))))


@rule.register
def _(bond: Abs, weights: Any, x: NormBound) -> LipschitzBounds:
    _refuse(x, OneHot, MaskedLInf)
    return LipschitzBounds.of(x, 1.0, gamma=math.inf, reasons=(_KINK.format("Abs"),))


@rule.register
def _(bond: ReLU, weights: Any, x: NormBound) -> LipschitzBounds:
    """Not the declared sensitivity: where all entries are positive, nothing shrinks."""
    _refuse(x, OneHot, MaskedLInf)
    return LipschitzBounds.of(x.within(), 1.0, gamma=math.inf, reasons=(_KINK.format("ReLU"),))


@rule.register
def _(bond: ScaledReLU, weights: Any, x: NormBound) -> LipschitzBounds:
    _refuse(x, OneHot, MaskedLInf)
    root, reason = math.sqrt(2), _KINK.format("ScaledReLU")
    return LipschitzBounds.of(x.within(root), root, gamma=math.inf, reasons=(reason,))


@rule.register
def _(bond: GELU, weights: Any, x: NormBound) -> LipschitzBounds:
    """The second derivative of one entry is at most `gamma`: in the RMS norm, that of a spike.

    `RMS(a b) <= max|a| RMS(b)`, and `max|a| <= sqrt(d) RMS(a)`.
    """
    _refuse(x, OneHot, MaskedLInf)
    if isinstance(x.measure, LInf | L1 | L2):  # a square's length is at most its largest
        return LipschitzBounds.of(x.within(), bond.LIPSCHITZ, gamma=bond.gamma)
    heads = x.measure.count if isinstance(x.measure, Heads) else 1
    spike = math.inf if x.features is None else math.sqrt(heads * x.features)
    reasons = ("the length of GELU's last axis is not known",) if spike == math.inf else ()
    return LipschitzBounds.of(x.within(), bond.LIPSCHITZ, gamma=spike * bond.gamma, reasons=reasons)


@rule.register
def _(bond: Softmax, weights: Any, x: NormBound) -> LipschitzBounds:
    kept = x if x.measure == MaskedLInf() else None
    size, converted = (kept, identity(kept)) if kept else convert_norm(x, LInf())
    out = NormBound(1.0, 1.0, L1(), size.features)
    return converted.then(LipschitzBounds.of(out, bond.scale, gamma=bond.scale**2))


@rule.register
def _(bond: MeanSubtract, weights: Any, x: NormBound) -> LipschitzBounds:
    """A projection over the last axis; over others an outlier among pixels may nearly double."""
    _refuse(x, OneHot, MaskedLInf)
    orthogonal = bond.axis in (-1, (-1,)) and isinstance(x.measure, RMS | Heads)
    orthogonal |= isinstance(x.measure, L2) and _within(bond.axis, x.measure)
    slope = 1.0 if orthogonal else 2.0
    return LipschitzBounds.of(x.within(slope), slope)


@rule.register
def _(bond: RMSDivide, weights: Any, x: NormBound) -> LipschitzBounds:
    """As steep as the smallest input is small."""
    size, converted = convert_norm(x, RMS())
    if bond.axis not in (-1, (-1,)):
        reason = f"{bond!r} divides by the norm over other axes than the last"
        out, least = NormBound(math.inf, features=size.features), 0.0
    elif size.lower == 0:
        reason = "RMSDivide may get inputs near zero, where it has no largest slope"
        out, least = NormBound(1.0, features=size.features), 0.0
    else:
        reason, least = "", size.lower
        out = NormBound(1.0, 1.0, features=size.features)
    slope = 1 / least if least else math.inf
    gamma = times(bond.gamma, slope) * slope
    reasons = (reason,) if reason else ()
    return converted.then(LipschitzBounds.of(out, slope, gamma=gamma, reasons=reasons))


@rule.register
def _(bond: SplitHeads, weights: Any, x: NormBound) -> LipschitzBounds:
    """An isometry, if the norm is taken over all heads; see `Heads`."""
    size, converted = convert_norm(x, RMS())
    expect_features(size, divisor=bond.heads)
    features = None if size.features is None else size.features // bond.heads
    out = dataclasses.replace(size, measure=Heads(bond.heads), features=features)
    return converted.then(LipschitzBounds.of(out, 1.0))


@rule.register
def _(bond: MergeHeads, weights: Any, x: NormBound) -> LipschitzBounds:
    """Undoes `SplitHeads`; of heads that were measured one by one, the largest."""
    if isinstance(x.measure, Heads):
        features = None if x.features is None else x.measure.count * x.features
        return LipschitzBounds.of(dataclasses.replace(x, measure=RMS(), features=features), 1.0)
    size, converted = convert_norm(x, RMS())
    return converted.then(LipschitzBounds.of(dataclasses.replace(size, features=None), 1.0))


@rule.register
def _(bond: AveragePool, weights: Any, x: NormBound) -> LipschitzBounds:
    """Of lengths it is steeper than need be: by the root of how many pixels make a mean."""
    if x.is_length(3):
        return LipschitzBounds.of(x.within(), 1.0)
    size, converted = convert_norm(x, RMS())
    return converted.then(LipschitzBounds.of(size.within(), 1.0))


@rule.register
def _(bond: Flatten, weights: Any, x: NormBound) -> LipschitzBounds:
    """The root mean square of all is between the least and the largest of the parts."""
    if isinstance(x.measure, L2) and x.is_length(bond.axes):
        flat = L2(x.measure.axes - bond.axes + 1)
        return LipschitzBounds.of(dataclasses.replace(x, measure=flat, features=None), 1.0)
    size, converted = convert_norm(x, RMS())
    return converted.then(LipschitzBounds.of(dataclasses.replace(size, features=None), 1.0))


@rule.register
def _(bond: GroupSort, weights: Any, x: NormBound) -> LipschitzBounds:
    """A permutation of entries, which never moves two inputs apart."""
    _refuse(x, OneHot, MaskedLInf)
    expect_features(x, divisor=bond.size)
    return LipschitzBounds.of(x, 1.0, gamma=math.inf, reasons=(_KINK.format("GroupSort"),))


@rule.register
def _(bond: SpaceToDepth, weights: Any, x: NormBound) -> LipschitzBounds:
    features = None if x.features is None else bond.side**2 * x.features
    if x.is_length(3):
        return LipschitzBounds.of(dataclasses.replace(x, features=features), 1.0)
    size, converted = convert_norm(x, RMS())
    return converted.then(LipschitzBounds.of(dataclasses.replace(size, features=features), 1.0))


@rule.register
def _(bond: NormPool, weights: Any, x: NormBound) -> LipschitzBounds:
    """In the largest RMS norm of a pixel, all pixels of a block may move at once."""
    reason = ("NormPool has a kink at a block of zeros",)
    if x.is_length(3):
        return LipschitzBounds.of(x, 1.0, gamma=math.inf, reasons=reason)
    size, converted = convert_norm(x, RMS())
    side = float(bond.side)
    pooled = LipschitzBounds.of(size.within(side), side, gamma=math.inf, reasons=reason)
    return converted.then(pooled)


@rule.register
def _(bond: SwapAxes, weights: Any, x: NormBound) -> LipschitzBounds:
    """Of vectors measured one by one, only the entries' magnitudes are known behind it."""
    if x.is_length(2):
        return LipschitzBounds.of(dataclasses.replace(x, features=None), 1.0)
    size, converted = convert_norm(x, LInf())
    return converted.then(LipschitzBounds.of(dataclasses.replace(size, features=None), 1.0))


@rule.register
def _(bond: Shift, weights: Any, x: NormBound) -> LipschitzBounds:
    """Five pixels meet in one, each with a group of channels: at most the norms of all five."""
    if x.is_length(3) or isinstance(x.measure, LInf):
        return LipschitzBounds.of(x, 1.0)
    size, converted = convert_norm(x, RMS())
    root = math.sqrt(5)
    return converted.then(LipschitzBounds.of(size.within(root), root))


@rule.register
def _(bond: Positions, weights: Any, x: NormBound) -> LipschitzBounds:
    """Places are whole numbers that do not depend on the tokens."""
    size, converted = convert_norm(x, OneHot())
    return converted.then(LipschitzBounds.of(size, 0.0))


@rule.register
def _(bond: RoPE, weights: Any, x: NormBound) -> LipschitzBounds:
    """Planes turn: an isometry of every head."""
    expect_features(x, divisor=2)
    if isinstance(x.measure, Heads):
        return LipschitzBounds.of(x, 1.0)
    size, converted = convert_norm(x, RMS())
    return converted.then(LipschitzBounds.of(size, 1.0))


@rule.register
def _(bond: QueryKey, weights: Any, x: Sizes) -> LipschitzBounds:
    """A product: as steep in each factor as the other is large."""
    (q, k), converted = convert_norm(x, RMS(), RMS())
    expect_features(q, k.features)
    out = NormBound(times(q.upper, k.upper), measure=LInf())
    return converted.then(LipschitzBounds.of(out, [k.upper, q.upper], gamma=_CROSS))


@rule.register
def _(bond: CausalMask, weights: Any, x: NormBound) -> LipschitzBounds:
    size, converted = convert_norm(x, LInf())
    return converted.then(LipschitzBounds.of(size.within(measure=MaskedLInf()), 1.0))


@rule.register
def _(bond: AttendValues, weights: Any, x: Sizes) -> LipschitzBounds:
    (p, v), converted = convert_norm(x, L1(), RMS())
    out = v.within(p.upper)
    return converted.then(LipschitzBounds.of(out, [v.upper, p.upper], gamma=_CROSS))


@rule.register
def _(bond: FunctionalAttention, weights: Any, x: Sizes) -> LipschitzBounds:
    """Scores, probabilities and values: the product of their bounds, with one gain of its own.

    The output of a token is an average of values: it moves at most as much as they do. In the
    norm over heads, a query moves the output of its own token only, head by head, so that the
    norms over heads of query and of output compare without a factor. Keys and values may be large
    in one head for one token, in another for the next: that costs sqrt(heads).
    """
    measures = {size.measure for size in leaves(x)}
    norm = measures.pop() if len(measures) == 1 else RMS()
    norm = norm if isinstance(norm, Heads) else RMS()
    (q, k, v), converted = convert_norm(x, norm, norm, norm)
    expect_features(q, k.features)
    heads = norm.count if isinstance(norm, Heads) else 1
    spread = math.sqrt(heads)
    kv, qv = (times(size.upper, v.upper) for size in (k, q))
    slopes = [heads * kv, heads * qv, spread]
    # Second derivatives head by head: every norm of one head is `spread` times as large at most.
    q1, k1, v1 = (spread * size.upper for size in (q, k, v))
    cross = times(1 + times(q1, k1), v1)
    gamma = heads * np.array(
        [
            [times(v1, times(k1, k1)), cross, k1],
            [cross, times(v1, times(q1, q1)), q1],
            [k1, q1, 0.0],
        ]
    )
    return converted.then(LipschitzBounds.of(v.within(spread), slopes, gamma=gamma))


def _within(axis: int | tuple[int, ...], measure: L2) -> bool:
    axes = (axis,) if isinstance(axis, int) else axis
    return all(-measure.axes <= place < 0 for place in axes)


_CROSS = np.array([[0.0, 1.0], [1.0, 0.0]])


_KINK = "{} has a kink, and no second derivative there"


def _common(measures: list[Any]) -> Any:
    """The norm to add in: the terms' own, or RMS, which every norm bounds."""
    return measures[0] if len(set(measures)) == 1 else RMS()


def _sum(terms: list[NormBound]) -> NormBound:
    most = float(sum(term.upper for term in terms))
    ahead = [term.lower - (most - term.upper) for term in terms] if math.isfinite(most) else []
    least = max([0.0, *ahead])
    known = [term.features for term in terms if term.features is not None]
    return NormBound(most, least, terms[0].measure, known[0] if known else None)


def _refuse(x: Sizes, *measures: type) -> None:
    """Raises `ValueError` where numbers of this kind cannot be computed with."""
    for size in leaves(x):
        if isinstance(size.measure, measures):
            raise ValueError(f"values measured as '{size.measure}' cannot be computed with here")
