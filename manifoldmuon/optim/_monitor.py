"""Numbers to log: gaps and residuals in a state, distances of weights from their manifolds."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from manifoldmuon._internal.compiling import compiled
from manifoldmuon._internal.matrices.arrays import largest, upcast
from manifoldmuon._internal.trees.paths import flat, flatten_with_path, is_hole, path_string
from manifoldmuon.manifolds import Manifold
from manifoldmuon.optim._execute import map_leaves
from manifoldmuon.optim._geometry import Geometry, constrained
from manifoldmuon.optim._keep_norms import KeepNormsState, distance_from_radius
from manifoldmuon.optim._links import ScaleBySteepestState
from manifoldmuon.optim._master_copies import MasterCopiesState
from manifoldmuon.optim._plan import Plan, make_plan
from manifoldmuon.optim.rules import on_sphere


def monitor(state: Any) -> dict[str, dict[str, jax.Array]]:
    """Return the last step's residuals and gaps, found anywhere in an optimizer state.

    Works on the state of any composition (chains, `optax.masked`, `optax.partition`,
    `optax.MultiSteps`, ...), and under `jax.jit`. See `monitor_distance` for the distance of the
    parameters from their manifolds.

    Args:
      state: an optimizer state with a `scale_by_steepest`, or several for different parameters;
        for Flax, the `opt_state` of an `nnx.Optimizer`.

    Returns:
      `{"residual": {path: array}, "gap": {path: array}}`, with paths such as `layer/kernel`: a
      float32 number per point; see `manifoldmuon.manifolds.solvers.Steepest`. Empty without
      `track_gap`, as in `muon`.

    Raises:
      ValueError: there is no `ScaleBySteepestState`, or two report on the same parameter.

    Examples:
      >>> tx, params = manifold_muon(0.1, mm.manifolds.Hypersphere()), {"w": jnp.array([1.0, 0.0])}
      >>> monitor(tx.init(params))["gap"]["w"].item()
      0.0
    """
    residual, gap = (find_in(state, ScaleBySteepestState, name) for name in ("residual", "gap"))
    if residual is None or gap is None:
        raise ValueError("there is no scale_by_steepest in the transformation of this state.")
    return {"residual": residual, "gap": gap}


def find_in(state: Any, kind: type, field: str) -> dict[str, jax.Array] | None:
    """Return a field by path, from all states of a type in an optimizer state; None without any."""
    fields = [getattr(own, field) for own in _states_of(kind, state)]
    reports = [{"/".join(keys): x for keys, x in flat(held).items()} for held in fields]
    report: dict[str, jax.Array] = {}
    for numbers in reports:
        if twice := report.keys() & numbers.keys():
            raise ValueError(f"two {kind.__name__} report on {sorted(twice)}; ask each state.")
        report |= numbers
    return report if reports else None


def _states_of(kind: type, state: Any) -> list[Any]:
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in nodes if isinstance(node, kind)]


def monitor_distance(geometry: Geometry, params: Any, state: Any = None) -> dict[str, jax.Array]:
    """Return the largest distance of each parameter from its manifold, for logging.

    Args:
      geometry: the manifold of each parameter; see `resolve_geometry`.
      params: any tree of floating point arrays.
      state: an optimizer state. Weights that a `keep_norms` in it keeps at a radius `R` (`muonh`,
        `adamh`, `hyperball`) are measured from this radius, `| ||W|| / R - 1 |`, and the copies of
        a `with_master_copies` in place of the rounded parameters. Both are found in the state of
        any composition; for Flax, give the `opt_state` of an `nnx.Optimizer`.

    Returns:
      A float32 scalar per parameter, by path: the largest `Manifold.distance` of its points.
      Parameters with the entry None are left out. Works under `jax.jit`.

    Raises:
      ValueError: a radius in the state belongs to no point of a `Hypersphere`, as with the
        geometry of another optimizer, or two `keep_norms` have the same parameter.

    Examples:
      >>> sphere, params = mm.manifolds.Hypersphere(), {"w": jnp.array([3.0, 4.0])}
      >>> monitor_distance(sphere, params)["w"].item()
      4.0
      >>> state = keep_norms(sphere).init(params)
      >>> monitor_distance(sphere, params, state)["w"].item()
      0.0
    """
    params, zero = _with_master_copies(state, params), jnp.zeros((), jnp.float32)
    plan = make_plan(geometry, params, rest=True)
    own = plan.fill(params, dict.fromkeys(plan.rest))
    paths = [weight.path for weight in plan.weights]
    radii = dict.fromkeys(paths, ()) | _find_radii(state, plan, params)
    _, sizes = map_leaves(
        _drift, geometry, own, own, name="monitor_distance", select=constrained, carried=radii
    )
    return {path: largest(sizes.get(path, zero)) for path in paths}


def _with_master_copies(state: Any, params: Any) -> Any:
    """Return the parameters, replaced by their master copies in a state, if any."""
    states = _states_of(MasterCopiesState, state)
    copies = {"/".join(k): x for own in states for k, x in flat(own.copies).items()}
    if not copies:
        return params
    pairs, treedef = flatten_with_path(params, is_hole)
    return jax.tree.unflatten(treedef, [copies.get(path_string(path), x) for path, x in pairs])


def _find_radii(state: Any, plan: Plan, params: Any) -> dict[str, Any]:
    """Return the radii in a state by path; raise unless they fit the points of the parameters."""
    radii = find_in(state, KeepNormsState, "radius")
    if not radii:
        return {}
    leaves = plan.leaves(jax.eval_shape(lambda tree: tree, params))
    points: dict[str, Any] = dict.fromkeys(plan.paths)  # None: a hole, or of another optimizer
    for weight in plan.weights:
        is_kept = on_sphere(weight.manifold)
        points[weight.path] = weight.copies(leaves[weight.index]) if is_kept else ...
    wrong = [path for path, x in radii.items() if points.get(path, ...) not in (None, x.shape)]
    if wrong:
        raise ValueError(
            f"monitor_distance: the state keeps radii of {wrong}, which are not these points on a"
            " Hypersphere: give the geometry and the parameters of its optimizer."
        )
    return radii


def monitor_scalars(
    state: Any, geometry: Geometry | None = None, params: Any = None
) -> dict[str, jax.Array]:
    """Return gaps, residuals and distances as a flat dictionary to log, for TensorBoard or W&B.

    Call `wandb.log(monitor_scalars(state, geometry, params), step)`, or `add_scalar` in a loop for
    TensorBoard.

    Args:
      state: an optimizer state; see `monitor` and `monitor_distance`.
      geometry: see `monitor_distance`; None leaves distances out.
      params: see `monitor_distance`.

    Returns:
      `{"gap/path": ..., "residual/path": ..., "distance/path": ...}`: scalars, the maximum over
      the points of a stack. Works under `jax.jit`.

    Examples:
      >>> sphere, params = mm.manifolds.Hypersphere(), {"w": jnp.array([1.0, 0.0])}
      >>> state = manifold_muon(0.1, sphere).init(params)
      >>> sorted(monitor_scalars(state, sphere, params))
      ['distance/w', 'gap/w', 'residual/w']
    """
    report: dict[str, dict[str, jax.Array]] = {}
    if geometry is None or find_in(state, ScaleBySteepestState, "gap") is not None:
        report |= monitor(state)
    if geometry is not None:
        report["distance"] = monitor_distance(geometry, params, state)
    return {
        f"{kind}/{path}": largest(numbers)
        for kind, by_path in report.items()
        for path, numbers in by_path.items()
    }


def _drift(
    manifold: Manifold, point: jax.Array, _: jax.Array, radius: Any
) -> tuple[None, jax.Array]:
    if isinstance(radius, tuple):  # the state has no radius
        return None, compiled(_distance_float32, point)(manifold, point)
    return None, distance_from_radius(manifold, point, radius)


def _distance_float32(manifold: Manifold, point: jax.Array) -> jax.Array:
    return manifold.distance(upcast(point)).astype(jnp.float32)
