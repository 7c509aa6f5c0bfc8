"""Modules: pieces of an architecture that know their norm, and the algebra that combines them."""

from __future__ import annotations

import abc
import dataclasses
import functools
import numbers
import operator
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from manifoldmuon._internal.arguments import check_fields, check_number
from manifoldmuon._internal.mesh import match_varying_axes
from manifoldmuon._internal.text import Printed
from manifoldmuon.modules._budgets import (
    LINEAR,
    Sharpness,
    WeightSpec,
    plan_copies,
    plan_in_sequence,
    plan_side_by_side,
    sharpness_in_sequence,
    sharpness_side_by_side,
)
from manifoldmuon.modules._tree import printed_tree


@dataclasses.dataclass(frozen=True)
class Module(Printed, abc.ABC):
    """A piece of an architecture that knows its own norm (modular norm, arXiv:2405.14813).

    A frozen, hashable value without arrays. It declares a mass and a sensitivity, and is
    well-normed: `||df/dw dw|| <= ||dw||` in the modular norm, `||df/dx dx|| <= sensitivity ||dx||`.
    Modules combine into modules:

    | written | is |
    |---|---|
    | `g @ f` | `g` after `f`; a Python tuple of modules reads the same input, side by side |
    | `f + g`, `f - g` | `Add() @ (f, g)` |
    | `a * f`, `f / a`, `-f` | `Mul(a) @ f` |
    | `f ** n` | `n` independent copies of `f`, one after the other |

    Mass, sensitivity, sharpness, budgets and norm of the whole follow from the parts, and
    composition and concatenation are associative in all of them. Compositions are flattened, and
    identities in them dropped, so that the parameters of `h @ g @ f` are the tuple of those of
    `f`, `g` and `h`, in the order in which the data flows.

    Examples:
      >>> net = Linear(2, 8) @ ReLU() @ Linear(8, 4)
      >>> net.mass, net.sensitivity, net.budgets()
      (2.0, 1.0, (0.5, (), 0.5))
    """

    # NumPy's scalars must leave `a * module` to the module.
    __array_ufunc__: ClassVar[None] = None
    # The intervals of fields that are numbers, see `check_fields`. Of mass and sensitivity it is
    # `[0, inf)`, and of fields annotated as `int`, which mostly are sizes, `[1, inf)`.
    ranges: ClassVar[Mapping[str, str]] = {}
    # How a certificate names the module, if it can: a kind of layer that the verifier knows, and
    # the fields that go with it; see `robustness.describe`.
    entry: ClassVar[tuple[str, ...]] = ()
    # Whether the one part's parameters are the module's own, not the only entry of a tuple.
    wraps: ClassVar[bool] = False

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
    def parts(self) -> tuple["Module", ...]:
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

    def __matmul__(self, other: Any) -> "Module":
        return _either(lambda: compose(as_module(other), self), other)

    def __rmatmul__(self, other: Any) -> "Module":
        return _either(lambda: compose(self, as_module(other)), other)

    def __add__(self, other: Any) -> "Module":
        return _either(lambda: Add() @ (self, as_module(other)), other)

    def __radd__(self, other: Any) -> "Module":
        return _either(lambda: Add() @ (as_module(other), self), other)

    def __sub__(self, other: Any) -> "Module":
        return _either(lambda: self + -as_module(other), other)

    def __neg__(self) -> "Module":
        return -1.0 * self

    def __mul__(self, factor: Any) -> "Module":
        return Mul(float(factor)) @ self if isinstance(factor, numbers.Real) else NotImplemented

    def __rmul__(self, factor: Any) -> "Module":
        return self * factor

    def __truediv__(self, divisor: Any) -> "Module":
        return self * (1 / divisor) if isinstance(divisor, numbers.Real) else NotImplemented

    def __pow__(self, copies: Any) -> "Module":
        if isinstance(copies, bool) or not isinstance(copies, numbers.Integral):
            return NotImplemented
        if copies < 0:
            raise ValueError(f"a power is a whole number of copies, 0 or more; got {copies!r}")
        return Stack(self, int(copies)) if copies else Identity()


def as_module(value: Any) -> Module:
    """Return a module as it is, and a tuple of modules (or of such tuples) as `Concatenate`.

    Raises:
      TypeError: it is neither.
    """
    if isinstance(value, Module):
        return value
    if isinstance(value, tuple) and value:
        return Concatenate(tuple(as_module(part) for part in value))
    raise TypeError(f"expected a module or a non-empty tuple of modules; got {value!r}")


def compose(first: Module, second: Module) -> Module:
    """Return `second` after `first`, flattened; `Identity` is dropped."""
    parts = (*_sequence(first), *_sequence(second))
    return parts[0] if len(parts) == 1 else Compose(parts) if parts else Identity()


def _sequence(module: Module) -> tuple[Module, ...]:
    if isinstance(module, Identity):
        return ()
    return module.modules if isinstance(module, Compose) else (module,)


def _either(build: Any, other: Any) -> Any:
    return build() if isinstance(other, Module | tuple) else NotImplemented


@dataclasses.dataclass(frozen=True)
class _Several(Module):
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


@dataclasses.dataclass(frozen=True)
class Compose(_Several):
    """Modules one after the other; made by `@`.

    Attributes:
      modules: in the order in which they are applied: the reverse of how `@` is written.

    Examples:
      >>> len((Linear(2, 8) @ ReLU() @ Linear(8, 4)).modules)
      3
    """

    @property
    def sensitivity(self) -> float:
        return float(np.prod([part.sensitivity for part in self.parts]))

    @property
    def sharpness(self) -> Sharpness:
        return sharpness_in_sequence((p.mass, p.sensitivity, p.sharpness) for p in self.parts)

    def apply(self, params: Any, x: Any) -> Any:
        for part, weights in zip(self.parts, params, strict=True):
            x = part.apply(weights, x)
        return x

    def plan(self, budget: np.ndarray) -> tuple[Any, ...]:
        return plan_in_sequence(self.parts, budget)


@dataclasses.dataclass(frozen=True)
class Concatenate(_Several):
    """Modules side by side, each on the same input; written as a tuple.

    The output is the tuple of their outputs, and its norm the sum of their norms.

    Attributes:
      modules: what reads the input.

    Examples:
      >>> (Add() @ (Identity(), Abs())).sensitivity
      2.0
    """

    @property
    def sensitivity(self) -> float:
        return float(sum(part.sensitivity for part in self.parts))

    @property
    def sharpness(self) -> Sharpness:
        return sharpness_side_by_side(self.parts)

    def apply(self, params: Any, x: Any) -> tuple[Any, ...]:
        pairs = zip(self.parts, params, strict=True)
        return tuple(part.apply(weights, x) for part, weights in pairs)

    def plan(self, budget: np.ndarray) -> tuple[Any, ...]:
        return plan_side_by_side(self.parts, budget)


@dataclasses.dataclass(frozen=True)
class Stack(Module):
    """Independent copies of a module, one after the other; written `module ** copies`.

    The weights are stacked along a new leading axis, the first applied first, and `apply` is a
    `jax.lax.scan`: it compiles in a time that does not depend on the number of copies. The output
    must have the shape and dtype of the input. `unroll` gives the same architecture without a
    scan.

    Attributes:
      module: what is copied.
      copies: how many; at least 1.

    Examples:
      >>> (Linear(8, 8) ** 3).init(jax.random.key(0)).shape
      (3, 8, 8)
    """

    module: Module
    copies: int
    wraps: ClassVar[bool] = True

    @property
    def mass(self) -> float:
        return self.copies * self.module.mass

    @property
    def sensitivity(self) -> float:
        return float(self.module.sensitivity**self.copies)

    @property
    def sharpness(self) -> Sharpness:
        one = self.module.mass, self.module.sensitivity, self.module.sharpness
        return sharpness_in_sequence([one] * self.copies)

    @property
    def parts(self) -> tuple[Module, ...]:
        return (self.module,)

    def init(self, key: PRNGKeyArray, dtype: Any = jnp.float32) -> Any:
        one = functools.partial(self.module.init, dtype=dtype)
        return jax.lax.map(one, jax.random.split(key, self.copies))

    def apply(self, params: Any, x: Any) -> Any:
        def step(carried, weights):
            return self.module.apply(weights, carried), None

        return jax.lax.scan(step, match_varying_axes(x, params), params, length=self.copies)[0]

    def plan(self, budget: np.ndarray) -> Any:
        return plan_copies(self.module, self.copies, budget)

    def map_atoms(self, function: Any) -> "Stack":
        return Stack(self.module.map_atoms(function), self.copies)

    def unroll(self) -> Compose:
        """Return the copies as a plain composition; its parameters are `unstack(params)`."""
        return Compose((self.module,) * self.copies)

    def unstack(self, params: Any) -> tuple[Any, ...]:
        """Return the tuple of the copies' parameters."""
        copies = range(self.copies)
        return tuple(jax.tree.map(operator.itemgetter(i), params) for i in copies)

    def describe(self) -> str:
        return f"Stack of {self.copies}"


@dataclasses.dataclass(frozen=True)
class Bond(Module):
    """A module without weights, of mass 0. A new one gives `forward`.

    Its sensitivity is 1, and `gamma`, the bound on its second derivative where there is one, is 0
    as that of piecewise linear maps, unless it says otherwise.

    Examples:
      >>> ReLU().mass, ReLU().apply((), jnp.array([-1.0, 2.0])).tolist()
      (0.0, [0.0, 2.0])
    """

    mass: ClassVar[float] = 0.0
    sensitivity: ClassVar[float] = 1.0
    gamma: ClassVar[float] = 0.0
    parts: ClassVar[tuple[Module, ...]] = ()

    @abc.abstractmethod
    def forward(self, x: Any) -> Any:
        """Return the output."""

    @property
    def sharpness(self) -> Sharpness:
        return LINEAR._replace(gamma=self.gamma)

    def init(self, key: PRNGKeyArray, dtype: Any = jnp.float32) -> tuple[()]:
        return ()

    def apply(self, params: Any, x: Any) -> Any:
        return self.forward(x)

    def plan(self, budget: np.ndarray) -> tuple[()]:
        return ()

    def map_atoms(self, function: Any) -> "Bond":
        return self


@dataclasses.dataclass(frozen=True)
class Identity(Bond):
    """The input, unchanged.

    Examples:
      >>> Identity() @ Abs()
      Abs()
    """

    entry: ClassVar = ("identity",)

    def forward(self, x: Any) -> Any:
        return x


@dataclasses.dataclass(frozen=True)
class Add(Bond):
    """The sum of a tuple of inputs, which carry the sum of their norms.

    Examples:
      >>> Add().forward((jnp.ones(2), jnp.ones(2)))
      Array([2., 2.], dtype=float32)
    """

    def forward(self, x: tuple[Any, ...]) -> Any:
        return jax.tree.map(lambda *terms: functools.reduce(jnp.add, terms), *x)


@dataclasses.dataclass(frozen=True)
class Mul(Bond):
    """A fixed multiple of the input, which may be a tree of arrays.

    Attributes:
      factor: any finite number; the sensitivity is its magnitude.

    Examples:
      >>> (0.5 * Identity()).sensitivity
      0.5
    """

    factor: float
    ranges: ClassVar = {"factor": "(-inf, inf)"}
    entry: ClassVar = ("scale", "factor")

    @property
    def sensitivity(self) -> float:
        return abs(self.factor)

    def forward(self, x: Any) -> Any:
        return jax.tree.map(lambda array: self.factor * array, x)
