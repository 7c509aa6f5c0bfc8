"""The algebra: modules that know their norm, and how they combine into modules."""

from __future__ import annotations

import abc
import dataclasses
import functools
import numbers
import operator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from manifoldmuon._internal.arguments import check_fields
from manifoldmuon._internal.mesh import match_varying_axes
from manifoldmuon.modules._interface import ModuleInterface
from manifoldmuon.modules._plan import (
    Sharpness,
    plan_copies,
    plan_in_sequence,
    plan_side_by_side,
    sharpness_in_sequence,
    sharpness_of_copies,
    sharpness_side_by_side,
)


@dataclasses.dataclass(frozen=True)
class Module(ModuleInterface):
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
    """

    # NumPy's scalars must leave `a * module` to the module.
    __array_ufunc__: ClassVar[None] = None

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
    """A module as it is, and a tuple of modules (or of such tuples) as their concatenation.

    Raises:
      TypeError: it is neither.
    """
    if isinstance(value, Module):
        return value
    if isinstance(value, tuple) and value:
        return Concatenate(tuple(as_module(part) for part in value))
    raise TypeError(f"expected a module or a non-empty tuple of modules; got {value!r}")


def compose(first: Module, second: Module) -> Module:
    """`second` after `first`, flattened; `Identity` is its unit and leaves no trace."""
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
    """

    @property
    def sensitivity(self) -> float:
        return float(np.prod([part.sensitivity for part in self.parts]))

    @property
    def sharpness(self) -> Sharpness:
        return sharpness_in_sequence(self.parts)

    def apply(self, params: Any, x: Any) -> Any:
        for part, weights in zip(self.parts, params, strict=True):
            x = part.apply(weights, x)
        return x

    def plan(self, target: np.ndarray) -> tuple[Any, ...]:
        return plan_in_sequence(self.parts, target)


@dataclasses.dataclass(frozen=True)
class Concatenate(_Several):
    """Modules side by side, each on the same input; written as a tuple.

    The output is the tuple of their outputs, and its norm the sum of their norms.

    Attributes:
      modules: what stands side by side.
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

    def plan(self, target: np.ndarray) -> tuple[Any, ...]:
        return plan_side_by_side(self.parts, target)


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
    """

    module: Module
    copies: int
    wraps: ClassVar[bool] = True

    def __post_init__(self):
        check_fields(self, copies="[1, inf)")

    @property
    def mass(self) -> float:
        return self.copies * self.module.mass

    @property
    def sensitivity(self) -> float:
        return float(self.module.sensitivity**self.copies)

    @property
    def sharpness(self) -> Sharpness:
        return sharpness_of_copies(self.module, self.copies)

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

    def plan(self, target: np.ndarray) -> Any:
        return plan_copies(self.module, self.copies, target)

    def map_atoms(self, function: Any) -> "Stack":
        return Stack(self.module.map_atoms(function), self.copies)

    def unroll(self) -> Compose:
        """The copies as a plain composition; its parameters are `unstack(params)`."""
        return Compose((self.module,) * self.copies)

    def unstack(self, params: Any) -> tuple[Any, ...]:
        """The tuple of the copies' parameters."""
        copies = range(self.copies)
        return tuple(jax.tree.map(operator.itemgetter(i), params) for i in copies)

    def describe(self) -> str:
        return f"Stack of {self.copies}"


@dataclasses.dataclass(frozen=True)
class Bond(Module):
    """A module without weights: mass 0. A new one gives `sensitivity`, `gamma` and `forward`."""

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
    def parts(self) -> tuple[Module, ...]:
        return ()

    def init(self, key: PRNGKeyArray, dtype: Any = jnp.float32) -> tuple[()]:
        return ()

    def apply(self, params: Any, x: Any) -> Any:
        return self.forward(x)

    def plan(self, target: np.ndarray) -> tuple[()]:
        return ()

    def map_atoms(self, function: Any) -> "Bond":
        return self

    def describe(self) -> str:
        return repr(self)


@dataclasses.dataclass(frozen=True)
class Identity(Bond):
    """The input, unchanged."""

    sensitivity: ClassVar[float] = 1.0
    gamma: ClassVar[float] = 0.0

    def forward(self, x: Any) -> Any:
        return x


@dataclasses.dataclass(frozen=True)
class Add(Bond):
    """The sum of a tuple of inputs, which carry the sum of their norms."""

    sensitivity: ClassVar[float] = 1.0
    gamma: ClassVar[float] = 0.0

    def forward(self, x: tuple[Any, ...]) -> Any:
        return jax.tree.map(lambda *terms: functools.reduce(jnp.add, terms), *x)


@dataclasses.dataclass(frozen=True)
class Mul(Bond):
    """A fixed multiple of the input, which may be a tree of arrays.

    Attributes:
      factor: any finite number; the sensitivity is its magnitude.
    """

    factor: float
    gamma: ClassVar[float] = 0.0

    def __post_init__(self):
        check_fields(self, factor="(-inf, inf)")

    @property
    def sensitivity(self) -> float:
        return abs(self.factor)

    def forward(self, x: Any) -> Any:
        return jax.tree.map(lambda array: self.factor * array, x)
