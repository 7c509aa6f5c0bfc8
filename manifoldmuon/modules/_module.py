"""Modules and their algebra: composition, concatenation, sums, multiples and stacks."""

from __future__ import annotations

import abc
import dataclasses
import functools
import numbers
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from manifoldmuon._internal.arguments import check_fields, check_number
from manifoldmuon._internal.meshes.mesh import match_varying_axes
from manifoldmuon._internal.text import Node, Printed, tree
from manifoldmuon.modules import _budgets

_MODULE_COLUMNS = ("module", "mass", "sensitivity", "sharpness", "part of the mass", "budget")


@dataclasses.dataclass(frozen=True)
class Module(Printed, abc.ABC):
    """A piece of an architecture with a known norm (modular norm, arXiv:2405.14813).

    A frozen, hashable value without arrays. It declares a mass and a sensitivity, and is
    well-normed: `||df/dw dw|| <= ||dw||` in the modular norm, `||df/dx dx|| <= sensitivity ||dx||`.
    Modules combine into modules:

    | written | is |
    |---|---|
    | `g @ f` | `g` after `f`; the modules of a Python tuple read the same input |
    | `f + g`, `f - g` | `Add() @ (f, g)`, `Add() @ (f, -g)` |
    | `a * f`, `f / a`, `-f` | `Mul(a) @ f`, `Mul(1 / a) @ f`, `Mul(-1) @ f` |
    | `f ** n` | `n` independent copies of `f` in sequence |

    Mass, sensitivity, sharpness, budgets and norm follow from the parts, and do not depend on how
    compositions and concatenations are nested. Compositions are flattened and drop identities: the
    parameters of `h @ g @ f` are the tuple of the parameters of `f`, `g` and `h`, in the order of
    the data flow.

    Examples:
      >>> net = Linear(2, 8) @ ReLU() @ Linear(8, 4)
      >>> net.mass, net.sensitivity, net.budgets()
      (2.0, 1.0, (0.5, (), 0.5))
    """

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
    # Make `a * module` with a NumPy scalar call the module's `__rmul__`.
    __array_ufunc__: ClassVar[None] = None

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
    def sharpness(self) -> _budgets.Sharpness:
        """Bounds on the second derivatives."""

    @property
    @abc.abstractmethod
    def parts(self) -> tuple["Module", ...]:
        """The modules inside this module, in the order of its parameters; empty for a leaf."""

    @abc.abstractmethod
    def init(self, key: PRNGKeyArray, dtype: Any = jnp.float32) -> Any:
        """Return random parameters on their manifolds.

        Returns:
          Nested tuples of arrays: an array for an atom, `()` for a module without weights, a tuple
          over `parts` for several modules. `Stack` and `Tied` keep the structure of their part.
        """

    @abc.abstractmethod
    def apply(self, params: Any, x: Any) -> Any:
        """Compute the output, a pure function of the parameters and the input.

        The input is an array or a tuple, with any leading batch axes.
        """

    @abc.abstractmethod
    def plan(self, budget: np.ndarray) -> Any:
        """Return a `WeightSpec` for every weight, given a budget for each copy of the module."""

    @abc.abstractmethod
    def map_atoms(self, function: Callable[[Any], Any]) -> Any:
        """Return the module with each atom (each module with its own weight) replaced.

        The function maps an atom to a module of the same input, output and sensitivity.
        """

    def describe(self) -> str:
        """Return the module's label in the printed tree."""
        return repr(self)

    def weights(self) -> Any:
        """Return a `WeightSpec` for every weight, as a tree: the compiled architecture."""
        return self.plan(np.ones(()))

    def map_weights(self, function: Callable[..., Any], *trees: Any) -> Any:
        """Map `function(spec, ...)` over `weights` and trees of the same structure."""
        specs, structure = jax.tree.flatten(self.weights())
        for other in trees:
            if (actual := jax.tree.structure(other)) != structure:
                wanted, got = (str(s).removeprefix("PyTreeDef(")[:-1] for s in (structure, actual))
                raise ValueError(
                    f"{type(self).__name__}: expected a tree of the structure that init returns,"
                    f" {wanted}; got {got}"
                )
        mapped = map(function, specs, *map(jax.tree.leaves, trees))
        return jax.tree.unflatten(structure, mapped)

    def geometry(self) -> Any:
        """Return the manifold of every weight, in the structure of the parameters."""
        return self.map_weights(_budgets.WeightSpec.entry)

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
        return self.map_weights(_budgets.WeightSpec.plain_budget)

    def masses(self) -> Any:
        """Return the mass of every weight, summed over copies; the total is the module's mass."""
        return self.map_weights(lambda spec: spec.mass)

    def norm(self, weights: Any) -> Float[Array, ""]:
        """Return the modular norm of a tree of weights or updates.

        It is `max_k ||w_k|| / budget_k`, each weight in its manifold's norm, without frozen
        weights.
        """
        norms = jax.tree.leaves(self.map_weights(_budgets.WeightSpec.relative_norm, weights))
        return jnp.max(jnp.stack([jnp.zeros(()), *norms]))

    def tare(self, absolute: float = 1.0) -> Any:
        """Return the module with this total mass: all masses multiplied by the same factor."""
        check_number("tare(absolute)", absolute, within="[0, inf)")
        if self.mass == 0 and absolute != 0:
            raise ValueError(f"no factor brings a mass of 0 to {absolute}; give an atom a mass")
        factor = absolute / self.mass if self.mass else 1.0
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
        return tree(_MODULE_COLUMNS, _module_row(self, self.weights(), self.mass))

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
        if not isinstance(factor, numbers.Real):
            return NotImplemented
        raise TypeError(
            "module * number is not defined, as modula scales the input by it: write number * "
            f"module to scale the output, or module @ Mul(number); got the factor {factor!r}"
        )

    def __rmul__(self, factor: Any) -> "Module":
        return Mul(float(factor)) @ self if isinstance(factor, numbers.Real) else NotImplemented

    def __truediv__(self, divisor: Any) -> "Module":
        return (1 / divisor) * self if isinstance(divisor, numbers.Real) else NotImplemented

    def __pow__(self, copies: Any) -> "Module":
        if isinstance(copies, bool) or not isinstance(copies, numbers.Integral):
            return NotImplemented
        if copies < 0:
            raise ValueError(f"a power is a whole number of copies, 0 or more; got {copies!r}")
        return Stack(self, int(copies)) if copies else Identity()


def _module_row(module: Module, plan: Any, whole: float) -> Node:
    """Return the printed row of a module and its compiled weights, and those of its parts."""
    sharpness = "({:.3g}, {:.3g}, {:.3g})".format(*module.sharpness)
    row = (module.describe(), f"{module.mass:.4g}", f"{module.sensitivity:.4g}", sharpness)
    if not module.parts:
        return (*row, *_learning(module, jax.tree.leaves(plan), whole)), []
    pairs = zip(module.parts, (plan,) if module.wraps else plan, strict=True)
    return (*row, "", ""), [_module_row(child, inner, whole) for child, inner in pairs]


def _learning(module: Module, leaves: list[_budgets.WeightSpec], whole: float) -> tuple[str, str]:
    if not leaves:
        return ("tied" if module.mass else "", "")
    if not (mass := sum(leaf.mass for leaf in leaves)):
        return "frozen", "0"
    ends = dict.fromkeys(f"{b:.4g}" for leaf in leaves for b in leaf.budget.flat[[0, -1]])
    return f"{mass / whole:.1%}", " … ".join(ends)


def as_module(value: Any) -> Module:
    """Return a module unchanged, and a (nested) tuple of modules as `Concatenate`."""
    if isinstance(value, Module):
        return value
    if isinstance(value, tuple) and value:
        return Concatenate(tuple(as_module(child) for child in value))
    raise TypeError(f"expected a module or a non-empty tuple of modules; got {value!r}")


def compose(first: Module, second: Module) -> Module:
    """Return `second` after `first`, flattened and without identities."""
    sequence = (*_sequence(first), *_sequence(second))
    return sequence[0] if len(sequence) == 1 else Compose(sequence) if sequence else Identity()


def _sequence(module: Module) -> tuple[Module, ...]:
    if isinstance(module, Identity):
        return ()
    return module.modules if isinstance(module, Compose) else (module,)


def _either(build: Any, other: Any) -> Any:
    return build() if isinstance(other, Module | tuple) else NotImplemented


@dataclasses.dataclass(frozen=True)
class _Several(Module):
    """Several modules: shared base class of `Compose` and `Concatenate`."""

    modules: tuple[Any, ...]

    @property
    def parts(self) -> tuple[Any, ...]:
        return self.modules

    @property
    def mass(self) -> float:
        return float(sum(child.mass for child in self.modules))

    def init(self, key: PRNGKeyArray, dtype: Any = jnp.float32) -> tuple[Any, ...]:
        keys = jax.random.split(key, len(self.modules))
        return tuple(child.init(k, dtype) for child, k in zip(self.modules, keys, strict=True))

    def map_atoms(self, function: Any) -> Any:
        return type(self)(tuple(child.map_atoms(function) for child in self.modules))

    def describe(self) -> str:
        return type(self).__name__


@dataclasses.dataclass(frozen=True)
class Compose(_Several):
    """Modules in sequence; made by `@`.

    Attributes:
      modules: the modules in the order of application, the reverse of the order in `@`.
    """

    @property
    def sensitivity(self) -> float:
        return float(np.prod([child.sensitivity for child in self.parts]))

    @property
    def sharpness(self) -> _budgets.Sharpness:
        return _budgets.sharpness_in_sequence(
            (p.mass, p.sensitivity, p.sharpness) for p in self.parts
        )

    def apply(self, params: Any, x: Any) -> Any:
        for child, weights in zip(self.parts, params, strict=True):
            x = child.apply(weights, x)
        return x

    def plan(self, budget: np.ndarray) -> tuple[Any, ...]:
        return _budgets.plan_in_sequence(self.parts, budget)


@dataclasses.dataclass(frozen=True)
class Concatenate(_Several):
    """Modules in parallel, on the same input; written as a tuple.

    The output is the tuple of their outputs, and its norm the sum of the outputs' norms.

    Attributes:
      modules: the modules that read the input.
    """

    @property
    def sensitivity(self) -> float:
        return float(sum(child.sensitivity for child in self.parts))

    @property
    def sharpness(self) -> _budgets.Sharpness:
        return _budgets.sharpness_side_by_side(self.parts)

    def apply(self, params: Any, x: Any) -> tuple[Any, ...]:
        pairs = zip(self.parts, params, strict=True)
        return tuple(child.apply(weights, x) for child, weights in pairs)

    def plan(self, budget: np.ndarray) -> tuple[Any, ...]:
        return _budgets.plan_side_by_side(self.parts, budget)


@dataclasses.dataclass(frozen=True)
class Stack(Module):
    """Independent copies of a module in sequence; written `module ** copies`.

    The weights are stacked along a new leading axis, in the order of application. `apply` is a
    `jax.lax.scan`, so that compile time does not depend on the number of copies, except for
    convolutions on CPUs, which are unrolled. The output must have the shape and dtype of the
    input.

    Attributes:
      module: the module to copy.
      copies: number of copies; at least 1.
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
    def sharpness(self) -> _budgets.Sharpness:
        one = self.module.mass, self.module.sensitivity, self.module.sharpness
        return _budgets.sharpness_in_sequence([one] * self.copies)

    @property
    def parts(self) -> tuple[Module, ...]:
        return (self.module,)

    def init(self, key: PRNGKeyArray, dtype: Any = jnp.float32) -> Any:
        one = functools.partial(self.module.init, dtype=dtype)
        return jax.lax.map(one, jax.random.split(key, self.copies))

    def apply(self, params: Any, x: Any) -> Any:
        def step(carried, weights):
            return self.module.apply(weights, carried), None

        x = match_varying_axes(x, params)
        # On CPUs, XLA's fast convolutions are not used inside loops: a scan takes 20 times as long.
        unroll = jax.default_backend() == "cpu" and _convolves(self.module)
        return jax.lax.scan(step, x, params, length=self.copies, unroll=unroll)[0]

    def plan(self, budget: np.ndarray) -> Any:
        return _budgets.plan_copies(self.module, self.copies, budget)

    def map_atoms(self, function: Any) -> "Stack":
        return Stack(self.module.map_atoms(function), self.copies)

    def describe(self) -> str:
        return f"Stack of {self.copies}"


def _convolves(module: Any) -> bool:
    return module.convolves or any(map(_convolves, module.parts))


@dataclasses.dataclass(frozen=True)
class Bond(Module):
    """A module without weights, of mass 0; subclasses implement `forward`.

    By default the sensitivity is 1, and `gamma`, the bound on the second derivative wherever it
    exists, is 0, as for piecewise linear maps.
    """

    mass: ClassVar[float] = 0.0
    sensitivity: ClassVar[float] = 1.0
    gamma: ClassVar[float] = 0.0
    parts: ClassVar[tuple[Module, ...]] = ()

    @abc.abstractmethod
    def forward(self, x: Any) -> Any:
        """Return the output."""

    @property
    def sharpness(self) -> _budgets.Sharpness:
        return _budgets.LINEAR._replace(gamma=self.gamma)

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
    """The input, unchanged."""

    entry: ClassVar = ("identity",)

    def forward(self, x: Any) -> Any:
        return x


@dataclasses.dataclass(frozen=True)
class Add(Bond):
    """The sum of a tuple of inputs of equal shape; the norm of the tuple is the sum of norms.

    Nothing is broadcast: a copied entry would count several times in a Euclidean length.
    """

    def forward(self, x: tuple[Any, ...]) -> Any:
        return jax.tree.map(_add_terms, *x)


def _add_terms(*terms: Any) -> Any:
    if len({jnp.shape(term) for term in terms}) > 1:
        shapes = " and ".join(str(jnp.shape(term)) for term in terms)
        raise ValueError(f"Add takes terms of equal shape; got {shapes}: broadcast them first")
    return functools.reduce(jnp.add, terms)


@dataclasses.dataclass(frozen=True)
class Mul(Bond):
    """A fixed multiple of the input, which may be a tree of arrays.

    Attributes:
      factor: any finite number; the sensitivity is its magnitude.
    """

    factor: float
    ranges: ClassVar = {"factor": "(-inf, inf)"}
    entry: ClassVar = ("scale", "factor")

    @property
    def sensitivity(self) -> float:
        return abs(self.factor)

    def forward(self, x: Any) -> Any:
        return jax.tree.map(lambda array: self.factor * array, x)
