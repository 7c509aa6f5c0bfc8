"""Training methods: pairs of a parametrisation and an optimizer."""

import dataclasses
from collections.abc import Callable
from typing import Any

import optax

from manifoldmuon.modules import Module
from manifoldmuon.optim import modular, normed
from studies.networks.architectures import Architecture

MOMENTUM = 0.9


@dataclasses.dataclass(frozen=True)
class Method:
    """A parametrisation and an optimizer.

    Attributes:
      optimizer: maps a learning rate (a number or a schedule) and the network to the optimizer.
      constrained: whether weights stay on their manifolds.
      standard: whether the parametrisation is the standard one, with Gaussian weights, instead of
        the modular one, whose networks have norm 1 and cannot scale their scores themselves.
      exponents: the lowest and highest learning rate of the grid, as exponents of 2.
    """

    optimizer: Callable[[Any, Module], optax.GradientTransformation]
    constrained: bool = False
    standard: bool = False
    exponents: tuple[int, int] = (-6, 2)

    def grid(self, widen: int) -> list[int]:
        """Return the exponents of the learning rates, with `widen` more octaves at both ends."""
        low, high = self.exponents
        return list(range(low - widen, high + widen + 1))

    def network(self, architecture: Architecture, inputs: int, outputs: int) -> Module:
        """Return the network to train."""
        if self.standard:
            return architecture.standard(inputs, outputs)
        network = architecture.modular(inputs, outputs)
        return network.constrained() if self.constrained else network


def _steepest(rate: Any, network: Module) -> optax.GradientTransformation:
    return modular(rate, network, MOMENTUM)


METHODS: dict[str, Method] = {
    "modular": Method(_steepest),
    "constrained": Method(_steepest, constrained=True),
    "normed Adam": Method(lambda rate, network: normed(rate, optax.scale_by_adam(), network)),
    "normed SGD": Method(lambda rate, network: normed(rate, optax.trace(MOMENTUM), network)),
    "Adam": Method(lambda rate, _: optax.adam(rate), standard=True, exponents=(-10, -2)),
}
"""Steepest descent in the modular norm, without and with constraints, two optimizers normalised to
the same budgets, and the baseline: Adam on the standard parametrisation."""
