"""Certified radii in the norm of the bounds, against known distances."""

import math

import numpy as np
import pytest

from benchmarks._bounds import starts, weights_of
from manifoldmuon.bounds import NormBound, bound
from manifoldmuon.modules import Flatten, Linear, RMSDivide, Unembed
from manifoldmuon.robustness import certified_radius


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


def test_radius_ends_with_input_range():
    found = bound(Linear(2, 2), np.eye(2), input_norm=NormBound(4.0, 1.0))
    logits = np.array([[30.0, 10.0], [30.0, 10.0], [1.0, 1.0], [30.0, 10.0]])
    radius = certified_radius(found, logits, input_norms=[3.5, 1.2, 2.0, 5.0])
    np.testing.assert_allclose(radius, [0.5, 0.2, 0.0, 0.0])
    with pytest.raises(ValueError, match="say input_norms"):
        certified_radius(found, logits)
    with pytest.raises(ValueError, match="not tuples"):
        certified_radius(bound((Linear(2, 2), Linear(2, 2)) @ Linear(2, 2)), logits)


@pytest.mark.parametrize(
    ("logits", "norms", "message"),
    [
        (np.array([[np.inf, 1.0]], np.float16), 1.0, "logits must be real and finite"),
        ([[np.nan, 1.0]], 1.0, "logits must be real and finite"),
        ([[2.0]], 1.0, "takes two logits or more"),
        (3.0, 1.0, "takes two logits or more"),
        ([[3j, 1.0]], 1.0, "got complex128"),
        ([[3.0, 1.0]], [-1.0], "input_norms must not be negative"),
        ([[3.0, 1.0]], [np.nan], "input_norms must be real and finite"),
        ([[3.0, 1.0]], [np.inf], "input_norms must be real and finite"),
    ],
)
def test_invalid_logits_and_norms_raise(logits, norms, message):
    found = bound(Linear(2, 2), np.eye(2), input_norm=NormBound(4.0))
    with pytest.raises(ValueError, match=message):
        certified_radius(found, logits, norms)


def test_smallest_token_limits_radius_with_lower_bound():
    """Tokens have norms 1 and 3: within 0.05 both stay above 0.95, within 2.05 only the larger."""
    net = Linear(2, 8) @ Flatten(2) @ RMSDivide()
    found = bound(net, ((), (), 0.1 * np.eye(2, 8)), input_norm=NormBound(6.0, 0.95))
    logits = np.array([9.0, 0.0])
    assert certified_radius(found, logits, [1.0, 3.0]) == pytest.approx(0.05)
    assert certified_radius(found, logits[None], [[1.0, 3.0]]) == pytest.approx(0.05)
    assert certified_radius(found, logits, 3.0) == pytest.approx(2.05)
