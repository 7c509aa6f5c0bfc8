"""Nonlinearities that act entry by entry."""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon.modules._algebra import Bond
from manifoldmuon.modules._leaf import check_number

BALANCED = math.sqrt(0.5)
"""How much a ReLU shrinks a perturbation where half of its inputs are negative."""


@dataclasses.dataclass(frozen=True)
class Abs(Bond):
    """The magnitude of every entry. Its second derivative is zero but for the kink."""

    sensitivity: ClassVar[float] = 1.0
    gamma: ClassVar[float] = 0.0

    def forward(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return jnp.abs(x)


@dataclasses.dataclass(frozen=True)
class ReLU(Bond):
    """`max(x, 0)`. Its second derivative is zero but for the kink.

    The published sensitivity 1/sqrt(2) (modular norm, arXiv:2405.14813, appendix B.2) is that of
    inputs with balanced signs; the bound that holds for every input is 1, as in the later Modula
    package.

    Attributes:
      sensitivity: what is declared: 1/sqrt(2), or 1 for a bound at every input.
    """

    sensitivity: float = BALANCED
    gamma: ClassVar[float] = 0.0

    def __post_init__(self):
        check_number("ReLU.sensitivity", self.sensitivity, least=0.0)

    def forward(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return jnp.maximum(x, 0)


@dataclasses.dataclass(frozen=True)
class ScaledReLU(Bond):
    """`sqrt(2) max(x, 0)`: keeps the RMS norm of inputs with balanced signs.

    Attributes:
      sensitivity: what is declared: 1, or sqrt(2) for a bound at every input.
    """

    sensitivity: float = 1.0
    gamma: ClassVar[float] = 0.0

    def __post_init__(self):
        check_number("ScaledReLU.sensitivity", self.sensitivity, least=0.0)

    def forward(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return math.sqrt(2) * jnp.maximum(x, 0)


@dataclasses.dataclass(frozen=True)
class GELU(Bond):
    """`x P(N(0,1) <= x)`, the Gaussian error linear unit, in its exact form.

    The published sensitivity is that of `ReLU`; a Gaussian input shrinks a perturbation to 0.675
    of its size. The bound that holds for every input is `GELU.LIPSCHITZ` (1.1289), so that
    `GELU(GELU.LIPSCHITZ) / GELU.LIPSCHITZ` has sensitivity 1 everywhere. The sharpness is the
    largest second derivative, sqrt(2/pi), in the maximum norm.

    Attributes:
      sensitivity: what is declared.
    """

    sensitivity: float = BALANCED
    gamma: ClassVar[float] = math.sqrt(2 / math.pi)
    # At x = sqrt(2), where the second derivative (2 - x**2) exp(-x**2 / 2) / sqrt(2 pi) vanishes.
    LIPSCHITZ: ClassVar[float] = 0.5 * (1 + math.erf(1.0)) + math.exp(-1.0) / math.sqrt(math.pi)

    def __post_init__(self):
        check_number("GELU.sensitivity", self.sensitivity, least=0.0)

    def forward(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return jax.nn.gelu(x, approximate=False)


@dataclasses.dataclass(frozen=True)
class Softmax(Bond):
    """`softmax(scale * x)` over the last axis.

    From the largest entry of a perturbation to the sum of the output's, the sensitivity is the
    scale, attained where two entries share the probability; the sharpness is its square, attained
    where four do. Entries of minus infinity get probability zero.

    Attributes:
      scale: the inverse temperature; not negative.
    """

    scale: float = 1.0

    def __post_init__(self):
        check_number("Softmax.scale", self.scale, least=0.0)

    @property
    def sensitivity(self) -> float:
        return self.scale

    @property
    def gamma(self) -> float:
        return self.scale**2

    def forward(self, x: Any) -> Any:
        return jax.nn.softmax(self.scale * x, axis=-1)
