"""Uses of a network's bounds: smoothness of its losses, robustness of its labels."""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any

import numpy as np
from jaxtyping import Float

from manifoldmuon._internal.arguments import check_number
from manifoldmuon.bounds._network import Bounds
from manifoldmuon.bounds._sizes import L2, RMS, LInf, Measure, NormBound, factor_between, times


class Loss(abc.ABC):
    """An error measure of one example or token, as a frozen value; the loss is its mean."""

    @abc.abstractmethod
    def slope(self, output: NormBound, value: float | None) -> float:
        """How much the error moves per movement of the output: sigma.

        Args:
          output: the size of the output, in the norm of its movement.
          value: the loss, if that is known at the point in question; None anywhere.
        """

    @abc.abstractmethod
    def curvature(self, output: NormBound) -> float:
        """The second derivative of the error in the output: tau."""


@dataclasses.dataclass(frozen=True)
class SquareError(Loss):
    """`||f - y||_RMS**2 / 2`: sigma is the norm of the residual, `sqrt(2 loss)`, and tau 1.

    Attributes:
      target_norm: the largest RMS norm of a target.
    """

    target_norm: float = 1.0

    def __post_init__(self):
        check_number("SquareError.target_norm", self.target_norm, least=0.0)

    def slope(self, output: NormBound, value: float | None) -> float:
        factor = factor_between(output, RMS())
        known = math.inf if value is None else math.sqrt(2 * value)
        return factor * min(factor * output.upper + self.target_norm, known)

    def curvature(self, output: NormBound) -> float:
        return factor_between(output, RMS()) ** 2


@dataclasses.dataclass(frozen=True)
class CrossEntropy(Loss):
    """`-log softmax(f)[label]` over d classes.

    With p the probabilities, the gradient `p - e` has length at most `sqrt(2) (1 - p[label])`
    and entries that sum to `2 (1 - p[label])` in magnitude; the second derivative along a
    movement is its variance under p. In the RMS norm of the logits, `sqrt(d)` shorter than their
    length, sigma is `sqrt(2 d)` and tau `d / 2`; in the largest logit they are 2 and 1. At a
    known loss, `1 - p[label] = 1 - exp(-loss)`.
    """

    def slope(self, output: NormBound, value: float | None) -> float:
        wrong = 1.0 if value is None else -math.expm1(-value)
        measure, factor = self._read(output)
        most = 2.0 if measure == LInf() else math.sqrt(2 * self._classes(output))
        return wrong * factor * most

    def curvature(self, output: NormBound) -> float:
        measure, factor = self._read(output)
        return factor**2 * (1.0 if measure == LInf() else self._classes(output) / 2)

    def _read(self, output: NormBound) -> tuple[Measure, float]:
        own = output.measure if output.measure == LInf() else RMS()
        return own, factor_between(output, own)

    def _classes(self, output: NormBound) -> int:
        if output.features is None:
            raise ValueError("the number of classes is not known: the last module does not say it")
        return output.features


@dataclasses.dataclass(frozen=True)
class Smoothness:
    """How smooth a loss is in the modular norm of the weights.

    `||gradient(w) - gradient(w')|| <= bound ||w - w'||` in the dual norm, over all weights that
    the bounds are for, so that a step of norm `||gradient|| / bound` decreases the loss.

    Attributes:
      bound: `sigma alpha + tau L**2`; infinite where the bounds' `reasons` say so.
      sigma: the slope of the error in the output.
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


def smoothness(bounds: Bounds, loss: Loss, value: float | None = None) -> Smoothness:
    """The smoothness of a loss in the modular norm (arXiv:2405.14813, proposition 5).

    The paper combines the declared sharpness of a well-normed module with the loss. Here sharpness
    and slope are those of the bounds: sizes that grow beyond 1 count, and a bond with a kink (ReLU,
    Abs: declared sharpness 0) makes the bound infinite, since next to a kink the gradient jumps.

    Args:
      bounds: of the network, with one output array.
      loss: `SquareError()` or `CrossEntropy()`.
      value: the loss at the weights in question. It lowers sigma, and what is bounded is then the
        second derivative at these weights; None for a bound at all weights and inputs.

    Raises:
      ValueError: the output is a tuple, or `value` is negative.
    """
    output = bounds.outputs
    if not isinstance(output, NormBound):
        raise ValueError(f"a loss takes one output array; got the sizes {output}")
    if value is not None:
        check_number("smoothness(value)", value, least=0.0)
    sigma, tau = loss.slope(output, value), loss.curvature(output)
    alpha, slope = bounds.sharpness.alpha, bounds.lipschitz_weights
    bound = times(sigma, alpha) + times(tau, times(slope, slope))
    reasons = bounds.reasons if math.isinf(bound) else ()
    return Smoothness(bound, sigma, tau, alpha, slope, reasons)


def certified_radius(
    bounds: Bounds, logits: Any, input_norms: Any = None
) -> Float[np.ndarray, "..."]:
    """A movement of the input that is shorter than this cannot change the largest logit.

    The margin between the two largest logits, over how much a movement of length 1 may change
    it: `sqrt(2 d) L` for d logits measured by RMS, `sqrt(2) L` for those measured by their length,
    `2 L` for those measured by the largest, with `L = bounds.lipschitz_inputs`.

    The radius is in the norm of the bounds' input: RMS over the last axis, in the largest token or
    pixel, or the Euclidean length where the bounds are for `NormBound(..., measure=L2(...))`. For
    radii class by class, in units of pixels, see `robustness.certify`.

    Args:
      bounds: of the network, with one input and one output array.
      logits: `(..., d)`, of the inputs in question, by the same weights.
      input_norms: `(...)`, the norms of these inputs, or `(..., places)`, those of each token or
        pixel, of which there may be several axes. Needed if the bounds are for inputs of a bounded
        size: the radius then ends where the bound ends. Where a least size was declared, an input
        of several tokens needs the norm of each: the smallest decides.

    Returns:
      `(...)` in float64, not negative.

    Raises:
      ValueError: `input_norms` is needed and missing, or input or output is a tuple.
    """
    inner, outer = bounds.inputs, bounds.outputs
    if not isinstance(inner, NormBound) or not isinstance(outer, NormBound):
        raise ValueError("a radius takes one input array and one output array, not tuples")
    scores = np.asarray(logits, np.float64)
    runner_up, winner = np.moveaxis(np.partition(scores, -2, axis=-1)[..., -2:], -1, 0)
    if outer.measure == LInf():
        gain = 2.0
    elif isinstance(outer.measure, L2):
        gain = math.sqrt(2)
    else:
        gain = math.sqrt(2 * scores.shape[-1]) * factor_between(outer, RMS())
    slope = gain * bounds.lipschitz_inputs
    margin = winner - runner_up
    radius = np.where(margin > 0, margin / slope if slope else math.inf, 0.0)
    if inner.upper == math.inf and inner.lower == 0:
        return radius
    if input_norms is None:
        raise ValueError(
            "the bounds are for inputs of a bounded size: say input_norms, or bound with "
            "input_norm=math.inf if its bounds are finite there"
        )
    norms = np.asarray(input_norms, np.float64)
    places = tuple(range(radius.ndim, norms.ndim))
    room = inner.upper - norms.max(axis=places)
    if inner.lower:
        room = np.minimum(room, norms.min(axis=places) - inner.lower)
    return np.asarray(np.minimum(radius, np.maximum(room, 0.0)))
