"""Rules of attention, in one piece and in its pieces."""

import math
from typing import Any

import numpy as np

from manifoldmuon.certificates._measures import RMS, Heads, Kept, Largest, Size, Total, times
from manifoldmuon.certificates._rule import rule
from manifoldmuon.certificates._transfer import Sizes, Transfer, leaves, read
from manifoldmuon.modules import AttendValues, CausalMask, FunctionalAttention, QueryKey


@rule.register
def _(bond: QueryKey, weights: Any, x: Sizes) -> Transfer:
    """A product: as steep in each factor as the other is large."""
    (q, k), converted = read(x, RMS(), RMS())
    out = Size(times(q.most, k.most), measure=Largest())
    return converted.then(Transfer.of(out, [k.most, q.most], gamma=_CROSS))


@rule.register
def _(bond: CausalMask, weights: Any, x: Size) -> Transfer:
    size, converted = read(x, Largest())
    return converted.then(Transfer.of(size.within(measure=Kept()), 1.0))


@rule.register
def _(bond: AttendValues, weights: Any, x: Sizes) -> Transfer:
    (p, v), converted = read(x, Total(), RMS())
    out = v.within(p.most)
    return converted.then(Transfer.of(out, [v.most, p.most], gamma=_CROSS))


@rule.register
def _(bond: FunctionalAttention, weights: Any, x: Sizes) -> Transfer:
    """Scores, probabilities and values: the product of their bounds, with one gain of its own.

    The output of a token is an average of values: it moves at most as much as they do. In the
    norm over heads, a query moves the output of its own token only, head by head, so that the
    norms over heads of query and of output compare without a factor. Keys and values may be large
    in one head for one token, in another for the next: that costs sqrt(heads).
    """
    measures = {size.measure for size in leaves(x)}
    norm = measures.pop() if len(measures) == 1 else RMS()
    norm = norm if isinstance(norm, Heads) else RMS()
    (q, k, v), converted = read(x, norm, norm, norm)
    heads = norm.count if isinstance(norm, Heads) else 1
    spread = math.sqrt(heads)
    kv, qv = (times(size.most, v.most) for size in (k, q))
    slopes = [heads * kv, heads * qv, spread]
    # Second derivatives head by head: every norm of one head is `spread` times as large at most.
    q1, k1, v1 = (spread * size.most for size in (q, k, v))
    cross = times(1 + times(q1, k1), v1)
    gamma = heads * np.array(
        [
            [times(v1, times(k1, k1)), cross, k1],
            [cross, times(v1, times(q1, q1)), q1],
            [k1, q1, 0.0],
        ]
    )
    return converted.then(Transfer.of(v.within(spread), slopes, gamma=gamma))


_CROSS = np.array([[0.0, 1.0], [1.0, 0.0]])
