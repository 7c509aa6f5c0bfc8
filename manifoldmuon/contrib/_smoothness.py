"""Smoothness of losses in the weights, from the bounds of a network."""

from __future__ import annotations

import math
from typing import NamedTuple

from manifoldmuon._internal.arguments import check_number
from manifoldmuon.bounds import RMS, Bounds, LInf, LipschitzBounds, NormBound


class Smoothness(NamedTuple):
    """Smoothness of a loss in the modular norm of the weights.

    `||gradient(w) - gradient(w')|| <= bound ||w - w'||` in the dual norm, over all weights that
    the bounds are for, so that a step of norm `||gradient|| / bound` decreases the loss.

    Attributes:
      bound: `sigma alpha + tau L**2`; infinite where the bounds' `reasons` say so.
      sigma: the slope of the error of one example in the output.
      tau: its curvature.
      alpha: the second derivative of the network in its weights.
      lipschitz_weights: L, the first; the paper's proposition has it at 1.
      reasons: why the bound is infinite; empty where it is finite.
    """

    bound: float
    sigma: float
    tau: float
    alpha: float
    lipschitz_weights: float
    reasons: tuple[str, ...]


def square_error_smoothness(
    bounds: Bounds, target_norm: float = 1.0, value: float | None = None
) -> Smoothness:
    """Return the smoothness of the mean of `||f - y||_RMS**2 / 2`.

    Sigma is the norm of the residual, `sqrt(2 loss)`, and tau 1. The rest is as in
    `cross_entropy_smoothness`.

    Args:
      bounds: of the network, with one output array.
      target_norm: the largest RMS norm of a target.
      value: the loss at the weights in question; None for a bound at all weights and inputs.

    Returns:
      A `Smoothness`: the bound, what it is made of, and the reasons where it is infinite.

    Raises:
      ValueError: the output is a tuple, or a number is negative.

    Examples:
      >>> bounds = mm.bounds.bound(mm.modules.Linear(2, 3))
      >>> round(square_error_smoothness(bounds).bound, 6)
      1.0
    """
    check_number("square_error_smoothness(target_norm)", target_norm, within="[0, inf)")
    output, factor = _output("square_error_smoothness", bounds, value)
    residual = factor * output.upper + target_norm
    residual = residual if value is None else min(residual, math.sqrt(2 * value))
    return _smoothness(bounds, factor * residual, factor**2)


def cross_entropy_smoothness(bounds: Bounds, value: float | None = None) -> Smoothness:
    """Return the smoothness of the mean of `-log softmax(f)[label]` over d classes.

    The modular norm's proposition 5 (arXiv:2405.14813) combines the declared sharpness of a
    well-normed module with the loss. Here sharpness and slope are those of the bounds: sizes that
    grow beyond 1 count, and a bond with a kink (ReLU, Abs: declared sharpness 0) makes the bound
    infinite, since next to a kink the gradient jumps. In the RMS norm of the logits sigma is
    `sqrt(2 d)` and tau `d / 2`, in the largest logit 2 and 1; at a known loss, sigma is smaller by
    the factor `1 - exp(-loss)`.

    Args:
      bounds: of the network, with one output array.
      value: the loss at the weights in question. What is bounded is then the second derivative at
        these weights; None for a bound at all weights and inputs.

    Returns:
      A `Smoothness`, as of `square_error_smoothness`.

    Raises:
      ValueError: the output is a tuple, its length is not known, or `value` is negative.

    Examples:
      >>> bounds = mm.bounds.bound(mm.modules.Linear(2, 3))
      >>> round(cross_entropy_smoothness(bounds).bound, 6)
      1.0
    """
    output, factor = _output("cross_entropy_smoothness", bounds, value)
    wrong = 1.0 if value is None else -math.expm1(-value)
    if output.measure == LInf():
        return _smoothness(bounds, 2.0 * wrong, 1.0)
    if output.features is None:
        raise ValueError("the number of classes is not known: the last module does not say it")
    sigma, tau = factor * math.sqrt(2 * output.features), factor**2 * output.features / 2
    return _smoothness(bounds, wrong * sigma, tau)


def _output(name: str, bounds: Bounds, value: float | None) -> tuple[NormBound, float]:
    """Return the size of the output, and its RMS norm at most per its own."""
    if not isinstance(bounds.outputs, NormBound):
        raise ValueError(f"a loss takes one output array; got the sizes {bounds.outputs}")
    if value is not None:
        check_number(f"{name}(value)", value, within="[0, inf)")
    read = LipschitzBounds.convert_norm(bounds.outputs, RMS())
    return bounds.outputs, read.slopes.item()


def _smoothness(bounds: Bounds, sigma: float, tau: float) -> Smoothness:
    alpha, slope = bounds.sharpness.alpha, bounds.lipschitz_weights
    # Zero times infinity is zero: what does not move has no effect.
    bound = (sigma * alpha if sigma and alpha else 0.0) + tau * slope**2
    return Smoothness(bound, sigma, tau, alpha, slope, bounds.reasons if math.isinf(bound) else ())
