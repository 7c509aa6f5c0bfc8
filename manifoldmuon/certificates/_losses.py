"""Losses on top: how smooth the training objective is in the modular norm."""

import abc
import dataclasses
import math

from manifoldmuon.certificates._certificate import Certificate
from manifoldmuon.certificates._measures import RMS, Largest, Measure, Size, factor_between, times
from manifoldmuon.modules._leaf import check_number


class Loss(abc.ABC):
    """An error measure of one example or token, as a frozen value; the loss is its mean."""

    @abc.abstractmethod
    def slope(self, output: Size, value: float | None) -> float:
        """How much the error moves per movement of the output: sigma.

        Args:
          output: the size of the output, in the norm of its movement.
          value: the loss, if that is known at the point in question; None anywhere.
        """

    @abc.abstractmethod
    def curvature(self, output: Size) -> float:
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

    def slope(self, output: Size, value: float | None) -> float:
        factor = factor_between(output, RMS())
        known = math.inf if value is None else math.sqrt(2 * value)
        return factor * min(factor * output.most + self.target_norm, known)

    def curvature(self, output: Size) -> float:
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

    def slope(self, output: Size, value: float | None) -> float:
        wrong = 1.0 if value is None else -math.expm1(-value)
        measure, factor = self._read(output)
        most = 2.0 if measure == Largest() else math.sqrt(2 * self._classes(output))
        return wrong * factor * most

    def curvature(self, output: Size) -> float:
        measure, factor = self._read(output)
        return factor**2 * (1.0 if measure == Largest() else self._classes(output) / 2)

    def _read(self, output: Size) -> tuple[Measure, float]:
        own = output.measure if output.measure == Largest() else RMS()
        return own, factor_between(output, own)

    def _classes(self, output: Size) -> int:
        if output.features is None:
            raise ValueError("the number of classes is not known: the last module does not say it")
        return output.features


@dataclasses.dataclass(frozen=True)
class Smoothness:
    """How smooth a loss is in the modular norm of the weights.

    `||gradient(w) - gradient(w')|| <= bound ||w - w'||` in the dual norm, over all weights that
    the certificate is for, so that a step of norm `||gradient|| / bound` decreases the loss.

    Attributes:
      bound: `sigma alpha + tau L**2`; infinite where the certificate's `reasons` say so.
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


def smoothness(certificate: Certificate, loss: Loss, value: float | None = None) -> Smoothness:
    """The smoothness of a loss in the modular norm (arXiv:2405.14813, proposition 5).

    The paper combines the declared sharpness of a well-normed module with the loss. Here sharpness
    and slope are the certificate's: sizes that grow beyond 1 count, and a bond with a kink (ReLU,
    Abs: declared sharpness 0) makes the bound infinite, since next to a kink the gradient jumps.

    Args:
      certificate: of the network, with one output array.
      loss: `SquareError()` or `CrossEntropy()`.
      value: the loss at the weights in question. It lowers sigma, and what is bounded is then the
        second derivative at these weights; None for a bound at all weights and inputs.

    Raises:
      ValueError: the output is a tuple, or `value` is negative.
    """
    output = certificate.outputs
    if not isinstance(output, Size):
        raise ValueError(f"a loss takes one output array; got the sizes {output}")
    if value is not None:
        check_number("smoothness(value)", value, least=0.0)
    sigma, tau = loss.slope(output, value), loss.curvature(output)
    alpha, slope = certificate.sharpness.alpha, certificate.lipschitz_weights
    bound = times(sigma, alpha) + times(tau, times(slope, slope))
    reasons = certificate.reasons if math.isinf(bound) else ()
    return Smoothness(bound, sigma, tau, alpha, slope, reasons)
