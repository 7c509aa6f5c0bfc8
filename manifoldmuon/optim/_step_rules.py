"""Step lengths that follow from the loss and its slope along a direction of norm 1."""

import abc
import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon.optim._agd import step_length


class StepRule(abc.ABC):
    """How far to go along a direction of (modular) norm 1, as a frozen value without arrays."""

    @abc.abstractmethod
    def length(self, slope: Float[Array, ""], value: Float[Array, ""]) -> Float[Array, ""]:
        """The learning rate.

        Args:
          slope: `<gradient, direction>`, positive; the dual norm of the gradient where the
            direction is the steepest.
          value: the loss.
        """


@dataclasses.dataclass(frozen=True)
class SquareLossSmoothness(StepRule):
    """`slope / (alpha sqrt(2 value) + 1)`, for the loss `|f - y|_RMS^2 / 2`, batch mean.

    A network whose second derivative in the weights is at most `alpha` (`module.sharpness.alpha`)
    makes this loss `sigma alpha + tau`-smooth in the modular norm, with `sigma = sqrt(2 loss)`
    and `tau = 1` (modular norm, arXiv:2405.14813, proposition 5); steepest descent in a norm has
    this step. It holds as far as the network's declared sensitivities and sharpness do: for
    weights and inputs of norm at most 1, and not across the kinks of a ReLU.

    Attributes:
      alpha: the sharpness of the network in its weights, 0 or more.
    """

    alpha: float

    def __post_init__(self):
        if not (math.isfinite(self.alpha) and self.alpha >= 0):
            raise ValueError(
                f"SquareLossSmoothness.alpha must be a finite number, 0 or more; got {self.alpha!r}"
            )

    def length(self, slope: Float[Array, ""], value: Float[Array, ""]) -> Float[Array, ""]:
        return slope / (self.alpha * jnp.sqrt(2 * value) + 1)


@dataclasses.dataclass(frozen=True)
class DeepTrust(StepRule):
    """`log((1 + sqrt(1 + 4 slope)) / 2)`: the step of automatic gradient descent, in any norm.

    It minimises `-eta slope + (exp(eta) - 1)^2 / 2` (arXiv:2304.05187, theorem 2), for networks
    that are a product of layers of norm 1, the square loss `|f - y|_RMS^2 / 2`, and budgets that
    add up to 1. With a spectral norm for each layer the paper's second assumption, that gradients
    have rank one, is not needed.
    """

    def length(self, slope: Float[Array, ""], value: Float[Array, ""]) -> Float[Array, ""]:
        return step_length(slope)
