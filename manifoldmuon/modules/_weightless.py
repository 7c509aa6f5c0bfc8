"""What all modules without weights have in common."""

import abc
import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from manifoldmuon.modules._interface import ModuleInterface
from manifoldmuon.modules._sharpness import Sharpness


@dataclasses.dataclass(frozen=True)
class Weightless(ModuleInterface):
    """A module without weights, apart from its operators; see `Bond`."""

    @property
    @abc.abstractmethod
    def sensitivity(self) -> float: ...

    @property
    @abc.abstractmethod
    def gamma(self) -> float:
        """The bound on the second derivative, where there is one; 0 for piecewise linear maps."""

    @abc.abstractmethod
    def forward(self, x: Any) -> Any:
        """The output."""

    @property
    def mass(self) -> float:
        return 0.0

    @property
    def sharpness(self) -> Sharpness:
        return Sharpness(0.0, 0.0, self.gamma)

    @property
    def parts(self) -> tuple[ModuleInterface, ...]:
        return ()

    def init(self, key: PRNGKeyArray, dtype: Any = jnp.float32) -> tuple[()]:
        return ()

    def apply(self, params: Any, x: Any) -> Any:
        return self.forward(x)

    def plan(self, target: np.ndarray) -> tuple[()]:
        return ()

    def map_atoms(self, function: Any) -> "Weightless":
        return self

    def describe(self) -> str:
        return repr(self)
