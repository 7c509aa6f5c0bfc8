"""What combinations of several modules have in common."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from manifoldmuon.modules._interface import ModuleInterface


@dataclasses.dataclass(frozen=True)
class Several(ModuleInterface):
    """Several modules, apart from how they combine; see `Compose` and `Concatenate`."""

    modules: tuple[Any, ...]

    @property
    def parts(self) -> tuple[Any, ...]:
        return self.modules

    @property
    def mass(self) -> float:
        return float(sum(part.mass for part in self.modules))

    def init(self, key: PRNGKeyArray, dtype: Any = jnp.float32) -> tuple[Any, ...]:
        keys = jax.random.split(key, len(self.modules))
        return tuple(part.init(k, dtype) for part, k in zip(self.modules, keys, strict=True))

    def map_atoms(self, function: Any) -> Any:
        return type(self)(tuple(part.map_atoms(function) for part in self.modules))

    def describe(self) -> str:
        return type(self).__name__
