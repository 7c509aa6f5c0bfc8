"""The ways of training that are compared: a parametrisation and an optimizer each.

Those on the modular parametrisation are arms: a constraint, a direction and a mass, each chosen by
itself.
"""

import abc
import dataclasses
from typing import Any, ClassVar

import jax
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
      starts_gaussian: whether the first weights are Gaussian, instead of on the manifolds.
      scaled: whether scores are multiplied: a network of norm 1 cannot raise them by itself.
    """

    starts_gaussian: ClassVar[bool] = False
    scaled: ClassVar[bool] = True

    @property
    @abc.abstractmethod
    def exponents(self) -> tuple[int, int]:
        """The grid of learning rates in powers of two: the lowest and the highest."""

    def grid(self, widen: int) -> list[int]:
        """The learning rates in powers of two, so many octaves longer at both ends."""
        low, high = self.exponents
        return list(range(low - widen, high + widen + 1))

    @abc.abstractmethod
    def network(self, architecture: Architecture, inputs: int, outputs: int) -> Module:
        """The network that is trained."""

    def first(self, weights: Any, network: Module) -> Any:
        """The first weights, given those that all methods of a parametrisation start from."""
        return weights

    @abc.abstractmethod
    def optimizer(self, rate: Any, network: Module) -> optax.GradientTransformation:
        """The optimizer for a learning rate, a number or a schedule."""


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
    """The direction of an update; its size is always that of the budgets."""

    @abc.abstractmethod
    def optimizer(self, rate: Any, plan: Plan) -> optax.GradientTransformation:
        """The optimizer for a learning rate and a plan of manifolds and budgets."""


@dataclasses.dataclass(frozen=True)
class Steepest(Direction):
    """The steepest direction of each leaf's norm, for the momentum."""

    def optimizer(self, rate: Any, plan: Plan) -> optax.GradientTransformation:
        return modular(rate, plan, MOMENTUM)


@dataclasses.dataclass(frozen=True)
class Gradient(Direction):
    """The momentum itself."""

    def optimizer(self, rate: Any, plan: Plan) -> optax.GradientTransformation:
        return normed(rate, optax.trace(MOMENTUM), plan)


@dataclasses.dataclass(frozen=True)
class AdamDirection(Direction):
    """Adam's update."""

    def optimizer(self, rate: Any, plan: Plan) -> optax.GradientTransformation:
        return normed(rate, optax.scale_by_adam(), plan)


@dataclasses.dataclass(frozen=True)
class Uniform:
    """A network's manifolds with one budget for every leaf.

    Attributes:
      network: whose manifolds.
    """

    network: Module

    def geometry(self) -> Any:
        """The manifolds."""
        return self.network.geometry()

    def budgets(self) -> float:
        """The same for all; they add up to 1."""
        return 1 / len(jax.tree.leaves(self.network.masses()))


@dataclasses.dataclass(frozen=True)
class Arm(Method):
    """One combination of a constraint, a direction and a mass.

    Attributes:
      constrained: whether weights stay on their manifolds.
      direction: of the updates.
      shared_out: whether budgets follow from the masses, or are all the same.
      highest: learning rate of the grid, in powers of two.
    """

    constrained: bool
    direction: Direction
    shared_out: bool = True
    highest: int = 2

    @property
    def exponents(self) -> tuple[int, int]:
        return -6, self.highest

    def network(self, architecture: Architecture, inputs: int, outputs: int) -> Module:
        network = architecture.modular(inputs, outputs)
        return network.constrained() if self.constrained else network

    def optimizer(self, rate: Any, network: Module) -> optax.GradientTransformation:
        return self.direction.optimizer(rate, network if self.shared_out else Uniform(network))


METHODS: dict[str, Method] = {
    "modular": Arm(False, Steepest()),
    "constrained": Arm(True, Steepest()),
    "normed Adam": Arm(False, AdamDirection()),
    "normed SGD": Arm(False, Gradient()),
    "Adam": PlainAdam(),
}
"""The methods of the transfer study: steepest descent in the modular norm, the same with every
weight on its manifold, two optimizers brought to their target norms, and the baseline."""

CONSTRAINTS = {"manifold": True, "flat": False}
DIRECTIONS = {"steepest": Steepest(), "gradient": Gradient(), "Adam": AdamDirection()}
MASSES = {"modular": True, "uniform": False}

ARMS: dict[tuple[str, ...], Method] = {
    (constraint, direction, mass): Arm(
        CONSTRAINTS[constraint], DIRECTIONS[direction], MASSES[mass], highest=4
    )
    for constraint in CONSTRAINTS
    for direction in DIRECTIONS
    for mass in MASSES
}
"""The methods of the ablation: every combination."""
