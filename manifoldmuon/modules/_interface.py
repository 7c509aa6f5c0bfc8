"""The interface of a module: declared properties, and the data derived for optimizers."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from manifoldmuon._internal.arguments import check_fields, check_number
from manifoldmuon._internal.text import Printed
from manifoldmuon.modules._budgets import Sharpness, WeightSpec
from manifoldmuon.modules._tree import printed_tree


@dataclasses.dataclass(frozen=True)
class Interface(Printed, abc.ABC):
    """A `Module` without its operators."""

    # Intervals of numeric fields, see `check_fields`. Defaults: `[0, inf)` for mass and
    # sensitivity, `[1, inf)` for fields annotated as `int`, which mostly are sizes.
    ranges: ClassVar[Mapping[str, str]] = {}
    # The module's entry in a certificate: a kind of layer that the verifier knows, then names of
    # fields; empty if the verifier knows no such layer. See `robustness.describe`.
    entry: ClassVar[tuple[str, ...]] = ()
    # Whether the parameters are the single part's parameters, without a tuple around them.
    wraps: ClassVar[bool] = False
    # Whether the module is a convolution, which is slow inside loops on CPUs.
    convolves: ClassVar[bool] = False

    def __post_init__(self):
        sizes = {f.name: "[1, inf)" for f in dataclasses.fields(self) if f.type == "int"}
        check_fields(
            self, **{"mass": "[0, inf)", "sensitivity": "[0, inf)", **sizes, **self.ranges}
        )

    @property
    @abc.abstractmethod
    def mass(self) -> float:
        """Relative share of the learning among neighbouring modules; >= 0."""

    @property
    @abc.abstractmethod
    def sensitivity(self) -> float:
        """Declared movement of the output per movement of the input; >= 0."""

    @property
    @abc.abstractmethod
    def sharpness(self) -> Sharpness:
        """Bounds on the second derivatives."""

    @property
    @abc.abstractmethod
    def parts(self) -> tuple["Interface", ...]:
        """The modules inside this module, in the order of its parameters; empty for a leaf."""

    @abc.abstractmethod
    def init(self, key: PRNGKeyArray, dtype: Any = jnp.float32) -> Any:
        """Return random parameters on their manifolds.

        Args:
          key: a JAX random key.
          dtype: the dtype of all weights.

        Returns:
          Nested tuples of arrays: an array for an atom, `()` for a module without weights, a tuple
          over `parts` for several modules. `Stack` and `Tied` keep the structure of their part.
        """

    @abc.abstractmethod
    def apply(self, params: Any, x: Any) -> Any:
        """Compute the output, a pure function of the parameters and the input.

        Args:
          params: as `init` returns them.
          x: the input: an array or a tuple, with any leading batch axes.

        Raises:
          ValueError: the input does not fit.
        """

    @abc.abstractmethod
    def plan(self, budget: np.ndarray) -> Any:
        """Return a `WeightSpec` for every weight, given a budget for the whole module.

        Args:
          budget: a number for each copy of the module; shape `()` outside a stack.
        """

    @abc.abstractmethod
    def map_atoms(self, function: Callable[[Any], Any]) -> Any:
        """Return the module with each atom (each module with its own weight) replaced.

        Args:
          function: maps an atom to a module of the same input, output and sensitivity.
        """

    def describe(self) -> str:
        """Return the module's label in the printed tree."""
        return repr(self)

    def weights(self) -> Any:
        """Return a `WeightSpec` for every weight, as a tree: the compiled architecture."""
        return self.plan(np.ones(()))

    def map_weights(self, function: Callable[..., Any], *trees: Any) -> Any:
        """Map `function(spec, ...)` over `weights` and trees of the same structure.

        Raises:
          ValueError: a tree has another structure.
        """
        specs, structure = jax.tree.flatten(self.weights())
        for tree in trees:
            if (found := jax.tree.structure(tree)) != structure:
                wanted, got = (str(s).removeprefix("PyTreeDef(")[:-1] for s in (structure, found))
                raise ValueError(
                    f"expected a tree of the structure that init returns, {wanted}; got {got}"
                )
        mapped = map(function, specs, *map(jax.tree.leaves, trees))
        return jax.tree.unflatten(structure, mapped)

    def geometry(self) -> Any:
        """Return the manifold of every weight, in the structure of the parameters."""
        return self.map_weights(lambda spec: spec.space)

    def budgets(self) -> Any:
        """Return the budget of every weight, in the structure of the parameters.

        Budgets flow down from 1: a step with these norms at its leaves has modular norm 1 and
        changes the output by at most 1. They are static numbers. The steepest step of modular norm
        1 multiplies the steepest direction of each leaf by its budget (see `optim.modular`).

        Returns:
          A Python float for each leaf. If the sensitivity of a stacked module is not 1, its copies
          have different budgets: a NumPy array with a number for each copy, then axes of length 1,
          which broadcasts against the weight.
        """
        return self.map_weights(WeightSpec.plain_budget)

    def masses(self) -> Any:
        """Return the mass of every weight, summed over copies; the total is the module's mass."""
        return self.map_weights(lambda spec: spec.mass)

    def norm(self, weights: Any) -> Float[Array, ""]:
        """Return the modular norm of a tree of weights or updates.

        It is `max_k ||w_k|| / budget_k`, each weight in its manifold's norm, without frozen
        weights.

        Raises:
          ValueError: the tree has another structure.
        """
        norms = jax.tree.leaves(self.map_weights(WeightSpec.relative_norm, weights))
        return jnp.max(jnp.stack([jnp.zeros(()), *norms]))

    def tare(self, absolute: float | None = None, relative: float | None = None) -> Any:
        """Return the module with all masses multiplied by the same factor.

        Args:
          absolute: the new total mass; 1 if neither argument is given.
          relative: the factor, in place of `absolute`.

        Raises:
          ValueError: both arguments are given, a value is negative, or the mass is zero and
            `absolute` is not.
        """
        if absolute is not None and relative is not None:
            raise ValueError("tare takes absolute or relative, not both")
        if relative is None:
            absolute = 1.0 if absolute is None else absolute
            check_number("tare(absolute)", absolute, within="[0, inf)")
            if self.mass == 0 and absolute != 0:
                raise ValueError(f"no factor brings a mass of 0 to {absolute}; give an atom a mass")
            relative = absolute / self.mass if self.mass else 1.0
        factor = relative
        check_number("tare(relative)", factor, within="[0, inf)")
        return self.map_atoms(lambda atom: dataclasses.replace(atom, mass=atom.mass * factor))

    def constrained(self) -> Any:
        """Return the same architecture with every atom on its default constraint."""
        return self.map_atoms(lambda atom: atom.on(atom.constraint()))

    def unconstrained(self) -> Any:
        """Return the same architecture with every atom in flat space under its own norm."""
        return self.map_atoms(lambda atom: atom.on(atom.free_space()))

    def __str__(self) -> str:
        """Return the module as a printed tree, the input at the top.

        Atoms show their share of the total mass and their budget in the whole, as a range from the
        first copy of a stack to the last if these differ.
        """
        return printed_tree(self, self.weights())
