"""Transformations of rules: one visit of all weights, with a state for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from manifoldmuon._internal.arguments import shown
from manifoldmuon._internal.meshes.alike import shard_alike
from manifoldmuon._internal.trees.transformations import (
    Terminal,
    Transformation,
    gradient_transformation,
)
from manifoldmuon.manifolds import Manifold
from manifoldmuon.optim._execute import execute
from manifoldmuon.optim._geometry import Geometry
from manifoldmuon.optim._plan import Plan, make_plan, plan_updates
from manifoldmuon.optim.rules import Rule, rounded, then


def transformation(
    rule: Rule,
    geometry: Geometry,
    state: Any = None,
    init: Callable[[Manifold, tuple[int, ...]], tuple[Any, ...]] | None = None,
    *,
    numbers: Mapping[str, ArrayLike] = MappingProxyType({}),
    name: str = "transformation",
    last: bool = False,
    rest: bool = False,
    check: Callable[[Geometry, Any], None] | None = None,
    select: Callable[[Manifold], bool] | None = None,
    divide: bool = False,
    stack: bool = True,
) -> Transformation:
    """Return the transformation that applies a rule to every weight.

    Args:
      rule: a rule, or several composed by `rules.then`. The last update is cast to the dtype of
        the parameter: a rule need not round.
      geometry: the manifold of each parameter; see `resolve_geometry`.
      state: the type of the state, a NamedTuple whose fields are nested dictionaries with the
        paths of the parameters, such as `{"blocks": {"0": {"kernel": ...}}}`; a rule gets and
        returns values by the names of the fields. None for no state.
      init: `init(manifold, shape)` returns a tuple, the first value of each field, for points of
        this shape with leading axes (a number per point has the shape
        `shape[: len(shape) - manifold.ndim]`); None leaves the weight out of a field.
      numbers: hyperparameters, each a number, that a rule is given by name: an array with one
        number per point, which needs `manifold.ndim` more axes to multiply an update. (Traced
        numbers, as from `optax.inject_hyperparams`, cannot come into a divided rule from outside.)
      name: name of the transformation, for error messages.
      last: whether no transformation may follow, as after a retraction; see `chain`.
      rest: whether the geometry may have entries None, of parameters of another optimizer; their
        updates pass unchanged.
      check: called by `init` with geometry and parameters; raises for unfit parameters.
      select: see `map_leaves`.
      divide: see `map_leaves`.
      stack: see `map_leaves`.

    Examples:
      >>> tx = transformation(rules.then(rules.tangent, rules.unit), mm.manifolds.Hypersphere())
      >>> params = jnp.array([1.0, 0.0])
      >>> updates, _ = tx.update(jnp.array([3.0, 2.0]), tx.init(params), params)
      >>> updates[1].item()
      1.0
    """
    if (state is None) != (init is None):
        raise ValueError(f"{name}: give `state` and `init` together, or neither")
    if clash := sorted(set(numbers) & set(getattr(state, "_fields", ()))):
        raise ValueError(f"{name}: {clash} are numbers and fields of the state; rename one of them")
    for key, value in numbers.items():
        if callable(value) or jnp.ndim(value):
            raise ValueError(
                f"{name}: numbers[{key!r}] must be a number; got {shown(value)}. A schedule goes to"
                " `optax.inject_hyperparams`, around the function that makes the transformation"
            )
    rule = then(rule, rounded)
    options: Any = {"select": select, "divide": divide, "stack": stack}

    def init_fn(params: Any) -> Any:
        plan = make_plan(geometry, params, rest=rest)
        if check is not None:
            check(geometry, params)
        return optax.EmptyState() if state is None else init_state(state, init, plan, params)

    def update_fn(updates, before, params=None, **extra_args):
        del extra_args
        plan = plan_updates(name, geometry, updates, params, rest=rest)
        given = None if state is None else by_weight(plan, before)
        if numbers:
            leaves = plan.leaves(params)
            given = {
                w.path: ({} if given is None else given[w.path])
                | {key: jnp.full(w.copies(leaves[w.index]), x) for key, x in numbers.items()}
                for w in plan.weights
                if given is None or w.path in given
            }
        updates, results = execute(name, plan, rule, (params, updates), given, **options)
        return updates, before if state is None else merge(name, plan, before, results)

    # A scalar per dictionary; see `gradient_transformation`.
    empty = optax.EmptyState() if state is None else state(*[jnp.zeros(()) for _ in state._fields])
    kind = Terminal if last else Transformation
    return gradient_transformation(update_fn, init_fn, lambda _: empty, kind)


def init_state(state: Any, init: Any, plan: Plan, params: Any) -> Any:
    """Return a state of nested dictionaries; see `transformation`."""
    first, fields = {}, state._fields
    for path, values in plan.by_path(lambda w, x: init(w.manifold, w.shape(x)), params).items():
        if not isinstance(values, tuple) or len(values) != len(fields):
            raise TypeError(f"init must return a tuple with a value for each of {fields}")
        first[path] = values
    own = [{p: x[k] for p, x in first.items() if x[k] is not None} for k in range(len(fields))]
    return state(*map(plan.nest, own))


def by_weight(plan: Plan, state: Any) -> dict[str, dict[str, Any]]:
    """Return the values of a state for each weight by name; weights without any are left out."""
    given: dict[str, dict[str, Any]] = {}
    for field, values in state._asdict().items():
        for path, value in plan.flat(values).items():
            given.setdefault(path, {})[field] = value
    return given


def merge(name: str, plan: Plan, state: Any, results: dict[str, Any]) -> Any:
    """Return the next state; weights without an update keep their values."""
    before = {field: plan.flat(values) for field, values in state._asdict().items()}
    for path, found in results.items():
        unknown = found.keys() - before.keys()
        missing = {field for field, old in before.items() if path in old} - found.keys()
        if unknown and missing:
            raise ValueError(
                f"{name}: rules return {sorted(unknown)}, and nothing for {sorted(missing)} of the"
                " state. Return the next value by the name of its field, also if it stays the same"
            )
        for field in found.keys() & before.keys():
            new, old = found[field], before[field].get(path, found[field])
            texts = [jax.tree.map(_dtype_and_shape, x) for x in (new, old)]
            if texts[0] != texts[1]:
                raise ValueError(
                    f"{name}: rules return {texts[0]} as {field!r} of {path!r},"
                    f" where the state has {texts[1]}"
                )
    after = {}
    for field, old in before.items():
        new = {p: x[field] for p, x in results.items() if field in x and p in old}
        after[field] = plan.nest(old | {p: shard_alike(x, old[p]) for p, x in new.items()})
    return state._replace(**after)


def _dtype_and_shape(x: Any) -> str:
    return f"{jnp.result_type(x)}{[*jnp.shape(x)]}"


def budgets_by_weight(
    plan: Plan,
    params: Any,
    shares: Sequence[Any],
    rate: Any,
    select: Callable[[Manifold], bool] = lambda manifold: True,
) -> dict[str, dict[str, Any]]:
    """Return `given["budget"]`, the rate times a share, for the points or entries of each weight.

    A weight without a share is left out.
    """
    leaves, given = plan.leaves(params), {}
    for weight in plan.weights:
        leaf, share = leaves[weight.index], weight.of(shares[weight.index])
        if share is None or not select(weight.manifold):
            continue
        if jnp.ndim(share):
            block = jnp.broadcast_to(rate * share, jnp.shape(weight.of(leaf)))
            given[weight.path] = {"budget": weight.inward(block)}
        else:
            given[weight.path] = {"budget": jnp.full(weight.copies(leaf), rate * share)}
    return given
