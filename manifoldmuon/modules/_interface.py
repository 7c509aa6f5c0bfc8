"""The interface of a module: what it declares, and what follows from that by itself."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from manifoldmuon.modules._leaf import Leaf, check_number, map_leaves
from manifoldmuon.modules._sharpness import Sharpness


@dataclasses.dataclass(frozen=True)
class ModuleInterface(abc.ABC):
    """A module without its operators; see `Module`."""

    # Whether the one part's parameters are the module's own, not the only entry of a tuple.
    wraps: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def mass(self) -> float:
        """The share of learning that the module asks for, relative to its neighbours; >= 0."""

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
    def parts(self) -> tuple["ModuleInterface", ...]:
        """What the module is built from, in the order of its parameters; empty for a leaf."""

    @abc.abstractmethod
    def init(self, key: PRNGKeyArray, dtype: Any = jnp.float32) -> Any:
        """Random parameters on their manifolds.

        Args:
          key: a JAX random key.
          dtype: of every weight.

        Returns:
          Nested tuples of arrays: one entry for each of `parts`, `()` for what has no weights,
          and for a single atom the array itself.
        """

    @abc.abstractmethod
    def apply(self, params: Any, x: Any) -> Any:
        """The output. A pure function of the parameters and the input.

        Args:
          params: as `init` returns them.
          x: the input: an array or a tuple, with any leading batch axes.

        Raises:
          ValueError: the input does not fit.
        """

    @abc.abstractmethod
    def plan(self, target: np.ndarray) -> Any:
        """A `Leaf` for every weight, when the module's own target norm is `target`.

        Args:
          target: one number for each copy of the module; shape `()` outside of a stack.
        """

    @abc.abstractmethod
    def map_atoms(self, function: Callable[[Any], Any]) -> Any:
        """The same module with each atom (what has weights of its own) replaced.

        Args:
          function: takes an atom, and returns a module of the same input, output and sensitivity.
        """

    @abc.abstractmethod
    def describe(self) -> str:
        """What stands for the module on its line of the printed tree."""

    def geometry(self) -> Any:
        """The manifold of every weight, in the structure of the parameters."""
        return map_leaves(lambda leaf: leaf.manifold, self._compiled())

    def budgets(self) -> Any:
        """The target norm of every weight, in the structure of the parameters.

        Target norms flow down from 1: a step whose leaves have these norms has modular norm 1,
        and changes the output by at most 1. They are static numbers: `dualize` is these times
        each leaf's own steepest direction.

        Returns:
          A Python float for each leaf. The copies of a stack whose sensitivity is not 1 have
          different budgets: there it is a NumPy array of one number for each copy, with axes of
          length one behind, so that it broadcasts against the weight.
        """
        return map_leaves(Leaf.plain_budget, self._compiled())

    def masses(self) -> Any:
        """The mass of every weight, copies taken together; their sum is the module's mass."""
        return map_leaves(lambda leaf: leaf.mass, self._compiled())

    def norm(self, weights: Any) -> Float[Array, ""]:
        """The modular norm of a tree of weights or updates.

        It is `max_k ||w_k|| / budget_k`, each norm being the manifold's own. Frozen weights do
        not count.

        Raises:
          ValueError: the tree has another structure.
        """
        norms = jax.tree.leaves(map_leaves(Leaf.relative_norm, self._compiled(), weights))
        return jnp.max(jnp.stack([jnp.zeros(()), *norms]))

    def dualize(self, grads: Any, params: Any = None) -> Any:
        """The steepest direction in the modular norm: an ascending step of norm 1.

        Args:
          grads: the gradients of a loss.
          params: the weights; needed where a manifold is curved.

        Returns:
          A tree of the same structure, shapes and dtypes.

        Raises:
          ValueError: another structure, or a curved manifold without `params`.
        """
        plan = self._compiled()
        if params is None:
            return map_leaves(lambda leaf, grad: leaf.dualize(grad, None), plan, grads)
        return map_leaves(Leaf.dualize, plan, grads, params)

    def normalize(self, updates: Any) -> Any:
        """Each leaf of an update of any origin, brought to its target norm.

        Normed descent: what makes the learning rate of a base optimizer such as Adam transfer
        across width and depth. Zero stays zero.

        Raises:
          ValueError: the tree has another structure.
        """
        return map_leaves(Leaf.normalize, self._compiled(), updates)

    def project(self, params: Any) -> Any:
        """Each weight's nearest point of its manifold; flat weights stay."""
        return map_leaves(lambda leaf, w: leaf.manifold.project(w), self._compiled(), params)

    def regularize(self, params: Any, strength: Any) -> Any:
        """Weight decay: flat weights multiplied by `1 - strength`, curved ones left alone.

        Args:
          params: the weights.
          strength: a number, commonly learning rate times decay; may be traced.
        """
        return map_leaves(lambda leaf, w: leaf.regularize(w, strength), self._compiled(), params)

    def tare(self, absolute: float | None = None, relative: float | None = None) -> Any:
        """A module with every mass inside multiplied by the same number.

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
            check_number("tare(absolute)", absolute, least=0.0)
            if self.mass == 0 and absolute != 0:
                raise ValueError(f"no factor brings a mass of 0 to {absolute}; give an atom a mass")
            relative = absolute / self.mass if self.mass else 1.0
        factor = relative
        check_number("tare(relative)", factor, least=0.0)
        return self.map_atoms(lambda atom: dataclasses.replace(atom, mass=atom.mass * factor))

    def constrained(self) -> Any:
        """The same architecture with every atom on its default curved manifold."""
        return self.map_atoms(lambda atom: atom.on(atom.curved()))

    def flat(self) -> Any:
        """The same architecture with every atom in flat space under its own norm."""
        return self.map_atoms(lambda atom: atom.on(atom.unconstrained()))

    def _compiled(self) -> Any:
        return self.plan(np.ones(()))
