"""The ways of training that the learning-rate study compares."""

import abc
import dataclasses
from typing import Any, ClassVar

import optax

from manifoldmuon.lab.studies._architectures import Architecture
from manifoldmuon.modules import Module
from manifoldmuon.optim import modular, normed

MOMENTUM = 0.9


@dataclasses.dataclass(frozen=True)
class Method(abc.ABC):
    """A parametrisation and an optimizer.

    Attributes:
      exponents: the grid of learning rates in powers of two: the lowest and the highest.
      starts_gaussian: whether the first weights are Gaussian, instead of on the manifolds.
      scaled: whether scores are multiplied: a network of norm 1 cannot raise them by itself.
    """

    exponents: ClassVar[tuple[int, int]]
    starts_gaussian: ClassVar[bool] = False
    scaled: ClassVar[bool] = True

    def grid(self, widen: int) -> list[int]:
        """The learning rates in powers of two, so many octaves longer at both ends."""
        low, high = self.exponents
        return list(range(low - widen, high + widen + 1))

    def network(self, architecture: Architecture, inputs: int, outputs: int) -> Module:
        """The network that is trained."""
        return architecture.modular(inputs, outputs)

    @abc.abstractmethod
    def optimizer(self, rate: Any, network: Module) -> optax.GradientTransformation:
        """The optimizer for a learning rate, a number or a schedule."""


@dataclasses.dataclass(frozen=True)
class Modular(Method):
    """Steepest descent in the modular norm."""

    exponents: ClassVar = (-6, 2)

    def optimizer(self, rate: Any, network: Module) -> optax.GradientTransformation:
        return modular(rate, network, MOMENTUM)


@dataclasses.dataclass(frozen=True)
class Constrained(Modular):
    """The same with every weight on its manifold."""

    exponents: ClassVar = (-6, 2)

    def network(self, architecture: Architecture, inputs: int, outputs: int) -> Module:
        return architecture.modular(inputs, outputs).constrained()


@dataclasses.dataclass(frozen=True)
class NormedAdam(Method):
    """Adam's updates, brought to their target norms."""

    exponents: ClassVar = (-6, 2)

    def optimizer(self, rate: Any, network: Module) -> optax.GradientTransformation:
        return normed(rate, optax.scale_by_adam(), network)


@dataclasses.dataclass(frozen=True)
class NormedSGD(Method):
    """Momentum, brought to its target norms."""

    exponents: ClassVar = (-6, 2)

    def optimizer(self, rate: Any, network: Module) -> optax.GradientTransformation:
        return normed(rate, optax.trace(MOMENTUM), network)


@dataclasses.dataclass(frozen=True)
class PlainAdam(Method):
    """The baseline: Adam on the standard parametrisation."""

    exponents: ClassVar = (-10, -2)
    starts_gaussian: ClassVar = True
    scaled: ClassVar = False

    def network(self, architecture: Architecture, inputs: int, outputs: int) -> Module:
        return architecture.standard(inputs, outputs)

    def optimizer(self, rate: Any, network: Module) -> optax.GradientTransformation:
        return optax.adam(rate)


METHODS: dict[str, Method] = {
    "modular": Modular(),
    "constrained": Constrained(),
    "normed Adam": NormedAdam(),
    "normed SGD": NormedSGD(),
    "Adam": PlainAdam(),
}
