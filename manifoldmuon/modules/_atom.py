"""Atoms: modules with one weight."""

import abc
import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from manifoldmuon.manifolds import Manifold
from manifoldmuon.modules._algebra import Module
from manifoldmuon.modules._leaf import Leaf, check_number
from manifoldmuon.modules._sharpness import Sharpness


@dataclasses.dataclass(frozen=True)
class Atom(Module):
    """A module with one weight, on a manifold of choice.

    The scale is carried by the weight: the forward map is plain (`W x`), and a weight of norm 1
    in the manifold's norm maps inputs with entries of size about 1 to outputs of such entries.
    A manifold fits if a direction of its norm 1 has at most norm 1 in the atom's own norm (that
    of `unconstrained()`); that makes the atom well-normed, for inputs of norm at most 1, with
    sensitivity 1. Both hold for weights of norm at most 1, and in proportion beyond.

    The parameters are the array itself. An atom in flat space starts on its default curved
    manifold, and is then trained without constraint.
    """

    sensitivity: ClassVar[float] = 1.0
    sharpness: ClassVar[Sharpness] = Sharpness(0.0, 1.0, 0.0)

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""

    @property
    @abc.abstractmethod
    def manifold(self) -> Manifold:
        """The space of the weight; its directions are measured in its norm."""

    @abc.abstractmethod
    def unconstrained(self) -> Manifold:
        """Flat space with the atom's own norm."""

    @abc.abstractmethod
    def curved(self) -> Manifold:
        """The default constraint: as large as norm 1 allows."""

    def on(self, manifold: Manifold) -> Any:
        """The same atom on another manifold."""
        return dataclasses.replace(self, manifold=manifold)

    @property
    def parts(self) -> tuple[Module, ...]:
        return ()

    def init(self, key: PRNGKeyArray, dtype: Any = jnp.float32) -> Float[Array, "..."]:
        start = self.curved() if self.manifold.flat else self.manifold
        return start.random_point(key, self.shape, dtype)

    def plan(self, target: np.ndarray) -> Leaf:
        # A frozen atom is given nothing by any rule but when it stands alone.
        budget = target if self.mass > 0 else np.zeros_like(target)
        return Leaf(self.manifold, len(self.shape), self.mass, budget)

    def map_atoms(self, function: Any) -> Any:
        return function(self)

    def describe(self) -> str:
        sizes = ", ".join(str(size) for size in self.shape)
        return f"{type(self).__name__}({sizes}) on {type(self.manifold).__name__}"


def check_atom(atom: Atom) -> None:
    """Raises `ValueError` for a size below 1, a bad mass or a manifold that does not fit."""
    name = type(atom).__name__
    if not all(isinstance(size, int) and size >= 1 for size in atom.shape):
        raise ValueError(f"the sizes of {name} must be whole numbers >= 1; got {atom.shape}")
    check_number(f"{name}.mass", atom.mass, least=0.0)
    try:
        atom.manifold.check_shape(atom.shape)
    except ValueError as error:
        raise ValueError(f"{name}.manifold: {error}") from error
    if atom.manifold.ndim > len(atom.shape):
        raise ValueError(f"{name}.manifold takes {atom.manifold.ndim} axes of {atom.shape}")


def expect_features(name: str, x: Any, features: int) -> None:
    """Raises `ValueError` unless the last axis of `x` has `features` entries."""
    if not x.shape or x.shape[-1] != features:
        raise ValueError(
            f"{name} takes an input whose last axis has {features} entries; got {x.shape}"
        )
