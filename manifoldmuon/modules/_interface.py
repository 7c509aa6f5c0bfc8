"""Interface of a module: what it declares, and what is derived from that."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from manifoldmuon._internal.arguments import check_number
from manifoldmuon.modules._plan import Sharpness, WeightSpec, map_weights


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
        """Modules that this one is built from, in the order of its parameters; empty for a leaf."""

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
        """A `WeightSpec` for every weight, when the module's own target norm is `target`.

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
        """Label of the module on its line of the printed tree."""

    def geometry(self) -> Any:
        """The manifold of every weight, in the structure of the parameters."""
        return map_weights(lambda spec: spec.space, self.weights())

    def budgets(self) -> Any:
        """The target norm of every weight, in the structure of the parameters.

        Target norms flow down from 1: a step whose leaves have these norms has modular norm 1,
        and changes the output by at most 1. They are static numbers: the steepest step of modular
        norm 1 is these times each leaf's own steepest direction (see `optim.modular`).

        Returns:
          A Python float for each leaf. The copies of a stack whose sensitivity is not 1 have
          different budgets: there it is a NumPy array of one number for each copy, with axes of
          length one behind, so that it broadcasts against the weight.
        """
        return map_weights(WeightSpec.plain_budget, self.weights())

    def masses(self) -> Any:
        """The mass of every weight, copies taken together; their sum is the module's mass."""
        return map_weights(lambda spec: spec.mass, self.weights())

    def norm(self, weights: Any) -> Float[Array, ""]:
        """The modular norm of a tree of weights or updates.

        It is `max_k ||w_k|| / budget_k`, each norm being the manifold's own. Frozen weights do
        not count.

        Raises:
          ValueError: the tree has another structure.
        """
        norms = jax.tree.leaves(map_weights(WeightSpec.relative_norm, self.weights(), weights))
        return jnp.max(jnp.stack([jnp.zeros(()), *norms]))

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
        """The same architecture with every atom on its default constraint."""
        return self.map_atoms(lambda atom: atom.on(atom.constraint()))

    def unconstrained(self) -> Any:
        """The same architecture with every atom in flat space under its own norm."""
        return self.map_atoms(lambda atom: atom.on(atom.free_space()))

    def weights(self) -> Any:
        """Return a `WeightSpec` for every weight, as a tree: the compiled architecture."""
        return self.plan(np.ones(()))

    def __str__(self) -> str:
        """The tree of the module, the input at the top.

        Atoms show their share of the total mass, and their target norm in the whole (from the first
        copy to the last, where the copies of a stack differ).
        """
        rows = [_HEADER, *_rows(self, self.weights(), "", "", self.mass)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER))]
        lines = (
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows
        )
        return "\n".join(line.rstrip() for line in lines)


_HEADER = ("module", "mass", "sensitivity", "sharpness", "share of learning", "target norm")


def _rows(module: Any, plan: Any, first: str, rest: str, whole: float) -> list[tuple[str, ...]]:
    sharpness = "({:.3g}, {:.3g}, {:.3g})".format(*module.sharpness)
    row = (first + module.describe(), f"{module.mass:.4g}", f"{module.sensitivity:.4g}", sharpness)
    if not module.parts:
        return [(*row, *_learning(module, plan, whole))]
    rows = [(*row, "", "")]
    plans = (plan,) if module.wraps else plan
    for i, (part, inner) in enumerate(zip(module.parts, plans, strict=True)):
        last = i == len(module.parts) - 1
        branch, below = ("└─ ", "   ") if last else ("├─ ", "│  ")
        rows += _rows(part, inner, rest + branch, rest + below, whole)
    return rows


def _learning(module: Any, plan: Any, whole: float) -> tuple[str, str]:
    leaves = jax.tree.leaves(plan)
    if not leaves:
        return ("", "") if not module.mass else ("tied", "")
    mass = sum(leaf.mass for leaf in leaves)
    if not mass:
        return "frozen", "0"
    ends = dict.fromkeys(f"{b:.4g}" for leaf in leaves for b in leaf.budget.flat[[0, -1]])
    return f"{mass / whole:.1%}", " … ".join(ends)
