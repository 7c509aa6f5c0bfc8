"""Weight sharing: a single leaf for several atoms, with a budget for all of them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from manifoldmuon._internal.arguments import check_number
from manifoldmuon.modules._budgets import Sharpness, WeightSpec
from manifoldmuon.modules._module import Module

Place = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Tied(Module):
    """A module in which several atoms share a weight.

    The paper's modules never share weights; this rule follows from its theory. An atom of untied
    budget `b_i` and mass fraction `p_i` adds at most `p_i ||dw|| / b_i` to the change of the
    output. The shared leaf may use the total mass of its atoms, `sum_i p_i`, so that its budget is
    the harmonic mean of the atoms' budgets, weighted by mass:

    `budget = sum_i p_i / sum_i (p_i / b_i)`.

    With this budget the module is well-normed. An atom that never reaches the output adds its mass
    and no effect. To tie several groups, tie again: indices stay the same.

    Attributes:
      module: the untied module.
      places: indices of the atoms in the tree of parameters, at least two: integers, or tuples of
        integers for nested atoms. The weight is kept at the first index; the others become `()`.
        The atoms agree in shape, manifold and number of copies, and are all frozen or none.

    Examples:
      >>> net = Tied(Unembed(65, 16) @ Linear(16, 16) @ Embed(16, 65), (0, 2))
      >>> jax.tree.map(jnp.shape, net.init(jax.random.key(0)))
      ((65, 16), (16, 16), ())
    """

    module: Module
    places: tuple[int | Place, ...]
    wraps: ClassVar[bool] = True

    def __post_init__(self):
        for index in (index for path in self._paths for index in path):
            check_number("an index of Tied.places", index, within="[0, inf)", whole=True)
        if len(set(self._paths)) < max(len(self.places), 2):
            raise ValueError(f"Tied takes two different places at least; got {self.places}")
        specs = self._specs(self.module.weights())
        for path, spec in zip(self._paths, specs, strict=True):
            if not isinstance(spec, WeightSpec):
                raise ValueError(f"there is no atom's weight at {path} in\n{self.module}")
        shared_weight(f"tied at {self.places}", specs)
        params = jax.eval_shape(lambda: self.module.init(jax.random.key(0)))
        shapes = [_subtree(params, path).shape for path in self._paths]
        if len({*shapes}) > 1:
            raise ValueError(f"tied weights must agree in shape; got {shapes}")

    @property
    def _paths(self) -> list[Place]:
        return [path if isinstance(path, tuple) else (path,) for path in self.places]

    @property
    def mass(self) -> float:
        return self.module.mass

    @property
    def sensitivity(self) -> float:
        return self.module.sensitivity

    @property
    def sharpness(self) -> Sharpness:
        alpha, beta, gamma = self.module.sharpness
        specs = self._specs(self.module.weights())
        budget = _mean_budget(specs)
        places = [np.where(spec.budget > 0, spec.budget, np.inf) for spec in specs]
        # The longest step of tied norm 1, in the untied norm.
        longest = max([1.0, *(float(np.max(budget / path)) for path in places)])
        return Sharpness(longest**2 * alpha, longest * beta, gamma)

    @property
    def parts(self) -> tuple[Module, ...]:
        return (self.module,)

    def init(self, key: PRNGKeyArray, dtype: Any = jnp.float32) -> Any:
        return self._thin(self.module.init(key, dtype))

    def apply(self, params: Any, x: Any) -> Any:
        return self.module.apply(self.untied(params), x)

    def untied(self, params: Any) -> Any:
        """Return the parameters of the untied module: the shared weight at every index."""
        first, *others = self._paths
        shared = _subtree(params, first)
        return functools.reduce(lambda tree, p: _put(tree, p, shared), others, params)

    def plan(self, budget: np.ndarray) -> Any:
        plan = self.module.plan(budget)
        shared = shared_weight(f"tied at {self.places}", self._specs(plan))
        return self._thin(_put(plan, self._paths[0], shared))

    def map_atoms(self, function: Any) -> "Tied":
        return Tied(self.module.map_atoms(function), self.places)

    def describe(self) -> str:
        return "Tied at " + ", ".join("/".join(map(str, path)) for path in self._paths)

    def _specs(self, plan: Any) -> list[Any]:
        """Return the `WeightSpec` at each index; another value if no atom is there."""
        return [_subtree(plan, path) for path in self._paths]

    def _thin(self, tree: Any) -> Any:
        return functools.reduce(lambda t, path: _put(t, path, ()), self._paths[1:], tree)


def shared_weight(where: str, specs: list[WeightSpec]) -> WeightSpec:
    """Return the common `WeightSpec` of a shared weight; `where` is for error messages."""
    if len(specs) == 1:
        return specs[0]
    kinds = {(spec.space, spec.ndim, spec.budget.shape) for spec in specs}
    if len(kinds) > 1:
        listed = ", ".join(f"{spec.space} with copies {spec.budget.shape}" for spec in specs)
        raise ValueError(f"weights {where} must agree in manifold and copies; got {listed}")
    masses = [spec.mass for spec in specs]
    if 0 in masses and any(masses):
        raise ValueError(f"weights {where} are frozen together or not at all; masses {masses}")
    return dataclasses.replace(specs[0], budget=_mean_budget(specs), mass=sum(masses))


def _mean_budget(specs: list[WeightSpec]) -> np.ndarray:
    """Compute the harmonic mean of budgets, weighted by mass; 0 if no use reaches the output."""
    mass = sum(spec.mass for spec in specs)
    effect = sum(
        np.where(spec.budget > 0, spec.mass / np.where(spec.budget > 0, spec.budget, 1), 0)
        for spec in specs
    )
    return np.where(effect > 0, mass / np.where(effect > 0, effect, 1), 0)


def _subtree(tree: Any, path: Place) -> Any:
    for index in path:
        if not isinstance(tree, tuple) or not 0 <= index < len(tree):
            return None
        tree = tree[index]
    return tree


def _put(tree: Any, path: Place, value: Any) -> Any:
    if not path:
        return value
    index, *rest = path
    return (*tree[:index], _put(tree[index], tuple(rest), value), *tree[index + 1 :])
