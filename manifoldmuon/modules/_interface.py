"""The interface of a module: what it declares, and what follows for optimizers."""

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

    # The intervals of fields that are numbers, see `check_fields`. Of mass and sensitivity it is
    # `[0, inf)`, and of fields annotated as `int`, which mostly are sizes, `[1, inf)`.
    ranges: ClassVar[Mapping[str, str]] = {}
    # How a certificate names the module, if it can: a kind of layer that the verifier knows, and
    # the fields that go with it; see `robustness.describe`.
    entry: ClassVar[tuple[str, ...]] = ()
    # Whether the one part's parameters are the module's own, not the only entry of a tuple.
    wraps: ClassVar[bool] = False
    # Whether it is a convolution, which CPUs compute slowly inside of loops.
    convolves: ClassVar[bool] = False

    def __post_init__(self):
        sizes = {f.name: "[1, inf)" for f in dataclasses.fields(self) if f.type == "int"}
        check_fields(
            self, **{"mass": "[0, inf)", "sensitivity": "[0, inf)", **sizes, **self.ranges}
        )

    @property
    @abc.abstractmethod
    def mass(self) -> float:
        """How much of the learning the module asks for, relative to its neighbours; >= 0."""

    @property
    @abc.abstractmethod
    def sensitivity(self) -> float:
        """How much the output moves per movement of the input, as declared; >= 0."""

    @property
    @abc.abstractmethod
    def sharpness(self) -> Sharpness:
        """Bounds on the second derivatives."""

    @property
    @abc.abstractmethod
    def parts(self) -> tuple["Interface", ...]:
        """Modules that this one is built from, in the order of its parameters; empty for a leaf."""

    @abc.abstractmethod
    def init(self, key: PRNGKeyArray, dtype: Any = jnp.float32) -> Any:
        """Return random parameters on their manifolds.

        Args:
          key: a JAX random key.
          dtype: of every weight.

        Returns:
          Nested tuples of arrays: one entry for each of `parts`, `()` for what has no weights,
          and for a single atom the array itself.
        """

    @abc.abstractmethod
    def apply(self, params: Any, x: Any) -> Any:
        """Return the output: a pure function of the parameters and the input.

        Args:
          params: as `init` returns them.
          x: the input: an array or a tuple, with any leading batch axes.

        Raises:
          ValueError: the input does not fit.
        """

    @abc.abstractmethod
    def plan(self, budget: np.ndarray) -> Any:
        """Return a `WeightSpec` for every weight, for a budget of the module as a whole.

        Args:
          budget: one number for each copy of the module; shape `()` outside of a stack.
        """

    @abc.abstractmethod
    def map_atoms(self, function: Callable[[Any], Any]) -> Any:
        """Return the module with each atom (what has weights of its own) replaced.

        Args:
          function: takes an atom, and returns a module of the same input, output and sensitivity.
        """

    def describe(self) -> str:
        """Return the label of the module on its line of the printed tree."""
        return repr(self)

    def weights(self) -> Any:
        """Return a `WeightSpec` for every weight, as a tree: the compiled architecture."""
        return self.plan(np.ones(()))

    def map_weights(self, function: Callable[..., Any], *trees: Any) -> Any:
        """Return the tree of `function(spec, ...)` over `weights` and trees of their structure.

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

        Budgets flow down from 1: a step whose leaves have these norms has modular norm 1,
        and changes the output by at most 1. They are static numbers: the steepest step of modular
        norm 1 is these times each leaf's own steepest direction (see `optim.modular`).

        Returns:
          A Python float for each leaf. The copies of a stack whose sensitivity is not 1 have
          different budgets: there it is a NumPy array of one number for each copy, with axes of
          length one behind, so that it broadcasts against the weight.
        """
        return self.map_weights(WeightSpec.plain_budget)

    def masses(self) -> Any:
        """Return the mass of every weight, copies taken together; they sum to the module's."""
        return self.map_weights(lambda spec: spec.mass)

    def norm(self, weights: Any) -> Float[Array, ""]:
        """Return the modular norm of a tree of weights or updates.

        It is `max_k ||w_k|| / budget_k`, each norm being the manifold's own. Frozen weights do
        not count.

        Raises:
          ValueError: the tree has another structure.
        """
        norms = jax.tree.leaves(self.map_weights(WeightSpec.relative_norm, weights))
        return jnp.max(jnp.stack([jnp.zeros(()), *norms]))

    def tare(self, absolute: float | None = None, relative: float | None = None) -> Any:
        """Return the module with every mass inside multiplied by the same number.

        Args:
          absolute: the new total mass.
          relative: the factor. Exactly one of the two is given; neither means `absolute=1`.

        Raises:
          ValueError: both are given, or one is negative, or the mass is zero and `absolute` is
            not.
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
        """The tree of the module, the input at the top.

        Atoms show their part of the total mass, and their budget in the whole (from the first copy
        to the last, where the copies of a stack differ).
        """
        return printed_tree(self, self.weights())
