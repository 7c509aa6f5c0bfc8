"""Certified radii in the norm of the bounds, against known distances."""

import math

import numpy as np
import pytest

from manifoldmuon.bounds import NormBound, bound
from manifoldmuon.modules import Linear, Unembed
from manifoldmuon.robustness import certified_radius
from tests.oracles.bounds import starts, weights_of


@pytest.mark.parametrize("head", [Linear(3, 4), Unembed(3, 4)])
def test_radius_is_below_boundary_distance(head):
    """For linear maps, the distance to the nearest boundary is known exactly."""
    net = head.constrained() @ Linear(4, 4).constrained()
    params = weights_of(net)
    x = starts(0, (50, 4))[0]
    w = np.asarray(params[1], float) @ np.asarray(params[0], float)
    w = w / 4 if isinstance(head, Unembed) else w
    scores = x @ w.T
    order = np.argsort(scores, axis=-1)
    nearest = np.full(50, np.inf)
    for i in range(50):
        top = order[i, -1]
        for j in order[i, :-1]:
            away = np.linalg.norm(w[top] - w[j])
            nearest[i] = min(nearest[i], (scores[i, top] - scores[i, j]) / away / 2)
    everywhere = bound(net, params, input_norm=math.inf)
    radius = certified_radius(everywhere, scores)
    assert np.all(radius <= nearest)  # RMS: the Euclidean distance over sqrt(4)
    assert np.max(radius / nearest) > (0.999 if isinstance(head, Linear) else 0.3)


def test_two_class_radius_is_attained():
    """For the logits of an orthogonal map, the boundary is where both are equal."""
    net = Linear(2, 2)
    eye = np.eye(2)
    radius = certified_radius(bound(net, eye, input_norm=math.inf), np.array([[3.0, 1.0]]))
    assert radius == pytest.approx([1.0])  # from (3, 1) to (2, 2) it is sqrt(2), in RMS 1


EVERYWHERE = NormBound(math.inf)


@pytest.mark.parametrize(
    ("net", "size", "logits", "message"),
    [
        (Linear(2, 2), EVERYWHERE, np.array([[np.inf, 1.0]], np.float16), "logits must be real an"),
        (Linear(2, 2), EVERYWHERE, [[np.nan, 1.0]], "logits must be real and finite"),
        (Linear(2, 2), EVERYWHERE, [[2.0]], "takes two logits or more"),
        (Linear(2, 2), EVERYWHERE, 3.0, "takes two logits or more"),
        (Linear(2, 2), EVERYWHERE, [[3j, 1.0]], "got complex128"),
        (Linear(2, 2), NormBound(4.0), [[3.0, 1.0]], "inputs of every size; got 4"),
        (Linear(2, 2), NormBound(math.inf, 1.0), [[3.0, 1.0]], "inputs of every size; got 1 … inf"),
        ((Linear(2, 2), Linear(2, 2)) @ Linear(2, 2), EVERYWHERE, [[3.0, 1.0]], "not tuples"),
    ],
)
def test_invalid_logits_and_bounds_raise(net, size, logits, message):
    with pytest.raises(ValueError, match=message):
        certified_radius(bound(net, input_norm=size), logits)
