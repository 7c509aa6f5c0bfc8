"""The arms of the ablation: a constraint, a direction and a mass, each chosen by itself."""

import abc
import dataclasses
from typing import Any, ClassVar

import jax
import optax

from manifoldmuon.lab.studies._architectures import Architecture
from manifoldmuon.lab.studies._methods import MOMENTUM, Method
from manifoldmuon.modules import Module
from manifoldmuon.optim import modular, normed
from manifoldmuon.optim._modular import Architecture as Plan


class Direction(abc.ABC):
    """Where an update points; its size is always that of the budgets."""

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
    """One combination.

    Attributes:
      constrained: whether weights stay on their manifolds.
      direction: of the updates.
      shared_out: whether budgets follow from the masses, or are all the same.
    """

    constrained: bool
    direction: Direction
    shared_out: bool
    exponents: ClassVar = (-6, 4)

    def network(self, architecture: Architecture, inputs: int, outputs: int) -> Module:
        network = architecture.modular(inputs, outputs)
        return network.constrained() if self.constrained else network

    def optimizer(self, rate: Any, network: Module) -> optax.GradientTransformation:
        return self.direction.optimizer(rate, network if self.shared_out else Uniform(network))


CONSTRAINTS = {"manifold": True, "flat": False}
DIRECTIONS = {"steepest": Steepest(), "gradient": Gradient(), "Adam": AdamDirection()}
MASSES = {"modular": True, "uniform": False}

ARMS: dict[tuple[str, ...], Method] = {
    (constraint, direction, mass): Arm(CONSTRAINTS[constraint], DIRECTIONS[direction], MASSES[mass])
    for constraint in CONSTRAINTS
    for direction in DIRECTIONS
    for mass in MASSES
}
