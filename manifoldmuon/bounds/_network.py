"""Bounds of whole architectures, propagated module by module."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from manifoldmuon import modules
from manifoldmuon._internal.arguments import check_number, one_of
from manifoldmuon._internal.text import Node, Printed, tree
from manifoldmuon.bounds._lipschitz_bounds import LipschitzBounds, Sizes
from manifoldmuon.bounds._norm_bounds import RMS, ActivationNorm, NormBound, OneHot
from manifoldmuon.bounds._weights import weight_of

_HEADER = ("module", "input", "output", "Lipschitz: input", "weights")


@dataclasses.dataclass(frozen=True, eq=False)
class NetworkBounds(Printed):
    """Bounds that hold for every input and all weights given to `bound`.

    Movements of the input are measured in the norms of `inputs`. Movements of the weights are
    measured in the modular norm of the whole network, also in `parts`: the `lipschitz_weights` of
    a part bounds the response of its own output to its own weights. The norm of a tuple is the sum
    of its parts' norms.

    A bound that does not exist is infinite, and `reasons` says why. `print` shows the tree.

    Attributes:
      module: the bounded module.
      inputs: the size of the input, or a tuple of sizes.
      transfer: the bounds, with a slope for each pair of an output array and an input array.
      assumptions: conditions that the bounds need and no constraint ensures, one line each.

    Examples:
      >>> bound(mm.modules.RMSDivide()).reasons
      ('RMSDivide may get inputs near zero, where it has no largest slope',)
    """

    module: modules.Module
    inputs: Sizes
    transfer: LipschitzBounds
    assumptions: tuple[str, ...] = ()

    @property
    def outputs(self) -> Sizes:
        """The size of the output, or a tuple of sizes."""
        return self.transfer.outputs

    @property
    def input_norm(self) -> float:
        """The largest norm of the inputs for which the bounds hold."""
        return _total_size(self.inputs)

    @property
    def output_norm(self) -> float:
        """The largest norm of an output."""
        return _total_size(self.outputs)

    @property
    def lipschitz_inputs(self) -> float:
        """Bound L on the norm of the derivative in the input.

        `||f(x') - f(x)|| <= L ||x' - x||` if the bounds hold for all inputs between x and x':
        always, unless a least size was declared.
        """
        return float(self.transfer.slopes.sum(axis=0).max())

    @property
    def lipschitz_weights(self) -> float:
        """Bound L on the norm of the derivative in the weights.

        For a step within the radius of the bounds, `||f(w + dw) - f(w)|| <= L ||dw||` in
        the modular norm.
        """
        return float(self.transfer.weights.sum())

    @property
    def parts(self) -> tuple["NetworkBounds", ...]:
        """The bounds of the module's parts; for a stack, of its copies."""
        return self.transfer.parts

    @property
    def reasons(self) -> tuple[str, ...]:
        """Causes of infinite bounds, one line each."""
        return tuple(dict.fromkeys(self.transfer.reasons))

    def __str__(self) -> str:
        notes = [f"infinite: {reason}" for reason in self.reasons]
        notes += [f"assumed: {assumption}" for assumption in self.assumptions]
        return "\n".join([tree(_HEADER, _bounds_row(self)), *notes])


def _total_size(x: Sizes) -> float:
    return float(np.sum([size.upper for size in jax.tree.leaves(x)]))


def _bounds_row(bounds: NetworkBounds) -> Node:
    """Return the printed row of a module, and those of its parts."""
    sizes = (_format_sizes(x) for x in (bounds.inputs, bounds.outputs))
    slopes = f"{bounds.lipschitz_inputs:.4g}", f"{bounds.lipschitz_weights:.4g}"
    row = (bounds.module.describe(), *sizes, *slopes)
    if isinstance(bounds.module, modules.Stack):  # a single tree for all copies
        return row, [_span(*(_bounds_row(bounds.parts[i]) for i in (0, -1)))]
    return row, [_bounds_row(child) for child in bounds.parts]


def _format_sizes(x: Sizes) -> str:
    return str(x) if isinstance(x, NormBound) else f"({', '.join(map(_format_sizes, x))})"


def _span(first: Node, last: Node) -> Node:
    """Return rows with the ranges from the first copy to the last."""
    pairs = zip(first[0], last[0], strict=True)
    row = tuple(a if a == b else f"{a} → {b}" for a, b in pairs)
    return row, [_span(*children) for children in zip(first[1], last[1], strict=True)]


@functools.singledispatch
def propagate(module: modules.Module, weights: Any, x: Sizes) -> LipschitzBounds:
    """Bound a module's output and its response to perturbations, for inputs of these norms.

    A generic function with an implementation for each type of module. To bound your own bond,
    decorate a function `(bond, weights, x) -> LipschitzBounds` with `bounds.propagate.register`.

    Args:
      module: a module of the implementation's type.
      weights: a `WeightRegion` for each weight, in the structure of the parameters; `()` for bonds.
      x: the size of the input, or a tuple of sizes for a tuple of inputs.

    Examples:
      >>> class Half(mm.modules.Bond):
      ...     def forward(self, x):
      ...         return x / 2
      >>> @propagate.register
      ... def bound_half(bond: Half, weights, x):
      ...     read = LipschitzBounds.convert_norm(x, RMS())
      ...     return read.then_of(read.outputs.within(), 0.5)
      >>> bound(Half()).lipschitz_inputs
      0.5
    """
    name = type(module).__name__
    raise TypeError(
        f"no bound for all inputs is registered for {name}: decorate a function (bond: {name}, "
        "weights, x) -> bounds.LipschitzBounds with @bounds.propagate.register, as on the page "
        "'Bounds'"
    )


def bound_part(module: modules.Module, weights: Any, x: Sizes) -> NetworkBounds:
    """Return the bounds of a part, given its `WeightRegion`s and the size of its input."""
    try:
        if isinstance(module, modules.Atom):
            weights.expect_shape(module.shape)
        return NetworkBounds(module, x, propagate(module, weights, x))
    except _ErrorAtModule:  # of a part of this module
        raise
    except ValueError as error:
        raise _ErrorAtModule(f"{error}\nat {module.describe()}") from error


class _ErrorAtModule(ValueError):
    """An error whose message ends with its module."""


def bound(
    module: modules.Module | modules.ExternalModule,
    params: Any = None,
    *,
    input_norm: float | NormBound | tuple[Any, ...] = 1.0,
    radius: float = 0.0,
    drift: float = 0.0,
) -> NetworkBounds:
    """Bound an architecture's output and derivative, module by module.

    The bounds hold for every input of the declared size, and

    * without `params`, for all weights on their manifolds. Flat space is not a constraint: a weight
      in flat space is assumed to have norm at most 1 in its own norm, and `assumptions` says so;
    * with `params`, for these weights and all others within `radius` of them.

    The bounds hold in exact arithmetic: a float32 computation differs by its rounding. They are
    computed in float64, with the singular values of weights rounded up, and are right to about
    twelve digits.

    Args:
      module: the architecture. An `ExternalModule` needs `params` and parameters with atoms.
      params: the weights, as `module.init` returns them; None for all weights on the manifolds.
      input_norm: the largest norm of an input, the RMS of a vector, token or pixel. Infinity allows
        every input. A `NormBound` also sets a least norm or another norm; give a tuple for a tuple
        of inputs. Whole numbers, read by `Embed`, always have norm 1.
      radius: the largest distance from `params`, in the modular norm; only with `params`.
      drift: the largest `Manifold.distance` of a weight (as `optim.monitor_distance` reports it);
        only without `params`. In flat space every distance is 0, and the assumed norm stays 1.

    Raises:
      TypeError: the type of a module or manifold has no rule (the message says how to add it), or
        `params` are traced by `jax.jit`.
      ValueError: sizes or weights do not fit.

    Examples:
      >>> net = mm.modules.Linear(2, 8) @ mm.modules.ReLU() @ mm.modules.Linear(8, 4)
      >>> round(bound(net.constrained()).lipschitz_inputs, 6)
      1.0
    """
    check_number("bound(radius)", radius, within="[0, inf)")
    check_number("bound(drift)", drift, within="[0, inf)")
    if (radius and params is None) or (drift and params is not None):
        raise ValueError(
            "bound(radius) needs params, the centre of the ball; bound(drift) takes no params"
        )
    one_of(modules.Module, modules.ExternalModule)("bound(module)", module)
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(params)):
        raise TypeError("bound(params) computes in float64 by NumPy: call it outside of jax.jit")
    external = None
    if isinstance(module, modules.ExternalModule):
        if params is None:
            raise ValueError("bound(params) is missing: an ExternalModule needs its weights")
        external = module.weights()
        module, params = module.network(params)
    known = functools.partial(weight_of, radius=float(radius), drift=float(drift))
    weights = module.map_weights(known) if params is None else module.map_weights(known, params)
    if external is not None:  # budgets from declared sensitivities, shared along each path
        weights = jax.tree.map(lambda w, spec: w.with_budget(spec.budget), weights, external)
    bounds = bound_part(module, weights, _declared(input_norm, _input_norm(module)))
    spaces = [spec.manifold for spec in jax.tree.leaves(module.weights())]
    free = params is None and not all(space.constrained for space in spaces)
    return dataclasses.replace(bounds, assumptions=(_NORM_ONE,) if free else ())


_NORM_ONE = "weights in flat space have norm at most 1 in its norm, which nothing constrains"


def _declared(bound: Any, norm: ActivationNorm) -> Sizes:
    if isinstance(bound, tuple):
        return tuple(_declared(child, RMS()) for child in bound)
    if isinstance(bound, NormBound):
        return bound
    if norm == OneHot():
        return NormBound(1.0, 1.0, norm)
    number = isinstance(bound, int | float | np.integer | np.floating)
    if not number or isinstance(bound, bool) or not bound >= 0:
        raise ValueError(
            f"bound(input_norm) must be a Python number >= 0 or a NormBound; got {bound!r}"
        )
    return NormBound(float(bound), norm=norm)


def _input_norm(module: modules.Module) -> ActivationNorm:
    """Return the norm of a plain number for `input_norm`: the norm that the first module reads."""
    if isinstance(module, modules.Embed | modules.Positions):
        return OneHot()
    if not isinstance(module, modules.Compose | modules.Stack | modules.Tied | modules.Concatenate):
        return RMS()
    first = module.parts if isinstance(module, modules.Concatenate) else module.parts[:1]
    norms = {_input_norm(child) for child in first}
    return norms.pop() if len(norms) == 1 else RMS()
