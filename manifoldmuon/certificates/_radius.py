"""How far an input may move before the prediction can change."""

import math
from typing import Any

import numpy as np
from jaxtyping import Float

from manifoldmuon.certificates._certificate import Certificate
from manifoldmuon.certificates._measures import RMS, Largest, Size, factor_between


def certified_radius(
    certificate: Certificate, logits: Any, input_norms: Any = None
) -> Float[np.ndarray, "..."]:
    """A movement of the input that is shorter than this cannot change the largest logit.

    The margin between the two largest logits, over how much a movement of length 1 may change
    it: `sqrt(2 d) L` for d logits measured by RMS, `2 L` for logits measured by the largest, with
    `L = certificate.lipschitz_inputs`.

    The radius is in the norm of the certificate's input: RMS over the last axis, in the largest
    token or pixel. Times the root of the length of that axis it is a Euclidean distance.

    Args:
      certificate: of the network, with one input and one output array.
      logits: `(..., d)`, of the inputs in question, by the same weights.
      input_norms: `(...)`, the norms of these inputs. Needed if the certificate is for inputs of
        a bounded size: the radius then ends where the bound ends.

    Returns:
      `(...)` in float64, not negative.

    Raises:
      ValueError: `input_norms` is needed and missing, or input or output is a tuple.
    """
    inner, outer = certificate.inputs, certificate.outputs
    if not isinstance(inner, Size) or not isinstance(outer, Size):
        raise ValueError("a radius takes one input array and one output array, not tuples")
    scores = np.asarray(logits, np.float64)
    runner_up, winner = np.moveaxis(np.partition(scores, -2, axis=-1)[..., -2:], -1, 0)
    if outer.measure == Largest():
        gain = 2.0
    else:
        gain = math.sqrt(2 * scores.shape[-1]) * factor_between(outer, RMS())
    slope = gain * certificate.lipschitz_inputs
    margin = winner - runner_up
    radius = np.where(margin > 0, margin / slope if slope else math.inf, 0.0)
    if inner.most == math.inf and inner.least == 0:
        return radius
    if input_norms is None:
        raise ValueError(
            "the certificate is for inputs of a bounded size: say input_norms, or certify with "
            "input_norm=math.inf if its bounds are finite there"
        )
    norms = np.asarray(input_norms, np.float64)
    room = inner.most - norms
    if inner.least:
        room = np.minimum(room, norms - inner.least)
    return np.minimum(radius, np.maximum(room, 0.0))
