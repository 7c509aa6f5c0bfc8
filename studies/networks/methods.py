"""Training methods: pairs of a parametrisation and an optimizer.

Methods on the modular parametrisation are arms: independent choices of constraint and direction.
"""

import abc
import dataclasses
from typing import Any, ClassVar

import optax

from manifoldmuon.modules import Module
from manifoldmuon.optim import Architecture as Plan
from manifoldmuon.optim import modular, normed
from studies.networks.architectures import Architecture

MOMENTUM = 0.9


@dataclasses.dataclass(frozen=True)
class Method(abc.ABC):
    """A parametrisation and an optimizer.

    Attributes:
      starts_gaussian: whether the initial weights are Gaussian, instead of on the manifolds.
      scaled: whether scores are multiplied: a network of norm 1 cannot scale them itself.
    """

    starts_gaussian: ClassVar[bool] = False
    scaled: ClassVar[bool] = True

    @property
    @abc.abstractmethod
    def exponents(self) -> tuple[int, int]:
        """The lowest and highest learning rate of the grid, as exponents of 2."""

    def grid(self, widen: int) -> list[int]:
        """Return the exponents of the learning rates, with `widen` more octaves at both ends."""
        low, high = self.exponents
        return list(range(low - widen, high + widen + 1))

    @abc.abstractmethod
    def network(self, architecture: Architecture, inputs: int, outputs: int) -> Module:
        """Return the network to train."""

    def first(self, weights: Any, network: Module) -> Any:
        """Return the initial weights, from the common initial weights of the parametrisation."""
        return weights

    @abc.abstractmethod
    def optimizer(self, rate: Any, network: Module) -> optax.GradientTransformation:
        """Return the optimizer for a learning rate (a number or a schedule)."""


@dataclasses.dataclass(frozen=True)
class PlainAdam(Method):
    """The baseline: Adam on the standard parametrisation."""

    starts_gaussian: ClassVar = True
    scaled: ClassVar = False

    @property
    def exponents(self) -> tuple[int, int]:
        return -10, -2

    def network(self, architecture: Architecture, inputs: int, outputs: int) -> Module:
        return architecture.standard(inputs, outputs)

    def optimizer(self, rate: Any, network: Module) -> optax.GradientTransformation:
        return optax.adam(rate)


class Direction(abc.ABC):
    """The direction of an update; budgets determine its size."""

    @abc.abstractmethod
    def optimizer(self, rate: Any, plan: Plan) -> optax.GradientTransformation:
        """Return the optimizer for a learning rate and a plan of manifolds and budgets."""


@dataclasses.dataclass(frozen=True)
class Steepest(Direction):
    """The steepest direction for the momentum, in each leaf's norm."""

    def optimizer(self, rate: Any, plan: Plan) -> optax.GradientTransformation:
        return modular(rate, plan, MOMENTUM)


@dataclasses.dataclass(frozen=True)
class Gradient(Direction):
    """The momentum."""

    def optimizer(self, rate: Any, plan: Plan) -> optax.GradientTransformation:
        return normed(rate, optax.trace(MOMENTUM), plan)


@dataclasses.dataclass(frozen=True)
class AdamDirection(Direction):
    """Adam's update."""

    def optimizer(self, rate: Any, plan: Plan) -> optax.GradientTransformation:
        return normed(rate, optax.scale_by_adam(), plan)


@dataclasses.dataclass(frozen=True)
class Arm(Method):
    """A combination of a constraint and a direction; budgets follow from the masses.

    Attributes:
      constrained: whether weights stay on their manifolds.
      direction: the direction of the updates.
    """

    constrained: bool
    direction: Direction

    @property
    def exponents(self) -> tuple[int, int]:
        return -6, 2

    def network(self, architecture: Architecture, inputs: int, outputs: int) -> Module:
        network = architecture.modular(inputs, outputs)
        return network.constrained() if self.constrained else network

    def optimizer(self, rate: Any, network: Module) -> optax.GradientTransformation:
        return self.direction.optimizer(rate, network)


METHODS: dict[str, Method] = {
    "modular": Arm(False, Steepest()),
    "constrained": Arm(True, Steepest()),
    "normed Adam": Arm(False, AdamDirection()),
    "normed SGD": Arm(False, Gradient()),
    "Adam": PlainAdam(),
}
"""The methods of the transfer study: steepest descent in the modular norm, without and with
constraints, two optimizers normalised to the same budgets, and the baseline."""
