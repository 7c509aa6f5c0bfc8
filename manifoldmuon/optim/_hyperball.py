"""Hyperball: weights that keep the norm they start with, moved by any optimizer of Optax."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.typing import ArrayLike

from manifoldmuon._internal.arguments import check_arguments, number
from manifoldmuon._internal.arrays import expand_trailing, frobenius_norm, inner_product, upcast
from manifoldmuon._internal.directions import never_fused, stay_if_still
from manifoldmuon._internal.links import LastLink, Link, check_ascends, difference, link
from manifoldmuon._internal.mesh import replicated_like
from manifoldmuon._internal.paths import Spec, find_places
from manifoldmuon._internal.powers_of_two import (
    normalize,
    scale_to_unit_exponent,
    times_power_of_two,
)
from manifoldmuon._internal.scales import ScaleRule, check_scale, scale_of
from manifoldmuon.manifolds import Hypersphere, Manifold
from manifoldmuon.optim._budget import Budgets, scale_by_budget
from manifoldmuon.optim._geometry import Geometry, find_manifolds, inner_shape, manifold_of
from manifoldmuon.optim._leaves import map_leaves
from manifoldmuon.optim._retract import chain

Radius = Spec[float | ScaleRule | None]
"""A number, a rule for a shape, or None for the norm at the start: one, or one for each path."""


class KeepNormsState(NamedTuple):
    """State of `keep_norms`.

    Attributes:
      radius: by path such as `layer/kernel`, for the leaves on spheres: one number for each point,
        float32 (float64 for float64 weights). It never changes.
    """

    radius: dict[str, jax.Array]


@check_arguments()
def keep_norms(geometry: Geometry, radius: Radius = None) -> Link:
    """Take each step on the sphere of the norm that the weight had at the start: `init` measures.

    `W+ = R Norm(W / R + u)` with `Norm(x) = x / ||x||_F`: updates are relative to the radius `R`,
    so that a learning rate is an angle to first order, whatever the size of the weight. Like
    `retract` it must be the last link, and `chain` refuses links behind it.

    The radius is in the state and is not measured again. After 1e5 steps in bfloat16 norms of 8 x 8
    matrices were within 5e-4 of it, in float32 within 2e-7; measured anew in every step they had
    drifted by 0.35 and 1e-4. A restored checkpoint continues on its spheres. For fine-tuning call
    `init` with the weights from which it starts: their norms are the new radii.

    Args:
      geometry: which parameters keep their norm: those on a `Hypersphere`, whose `ndim` and layout
        say what one point is. `Hypersphere(ndim=2)` is one matrix: each layer of a stack, each
        expert, and with a layout of blocks each head has a radius of its own. `Hypersphere(ndim=3)`
        gives the experts of `(layers, experts, m, n)` one radius together, `Hypersphere()` one to
        each row. The `scale` of the manifold is not used. Updates of `Euclidean` leaves pass
        through.
      radius: another radius than the norm at the start: a positive number, a rule such as
        `RootRank()` (of a shape in the manifold's layout), None, or one of these for each
        parameter as a geometry gives manifolds: a prefix tree, `by_path(...)`, or a function of
        path and leaf.

    Returns:
      A transformation whose state is a `KeepNormsState`. The step is computed in float32 or wider;
      the update has the parameter's dtype and is rounded so that `W + u` is next to the point on
      the sphere. A zero step gives a zero update. A NaN stays in its matrix. `update` needs
      `params`.

    Raises:
      TypeError: on use; see `resolve`, and for a radius that is no number.
      ValueError: on use; see `resolve`. A constrained leaf is not on a `Hypersphere`. `init` finds
        weights of norm zero, or one that is not finite: the message names their paths; give them a
        `radius`, and the first step takes them there. Inside `jax.jit`, where values are unknown,
        their radius is NaN instead, and so are they after one step.

    Examples:
      >>> tx, params = keep_norms(mm.manifolds.Hypersphere()), jnp.array([0.0, 5.0])
      >>> updates, _ = tx.update(jnp.array([0.75, 0.0]), tx.init(params), params)
      >>> round(float(jnp.linalg.norm(optax.apply_updates(params, updates))), 4)
      5.0
    """

    def init_fn(params: Any) -> KeepNormsState:
        return KeepNormsState(_find_radii(geometry, radius, params))

    def update_fn(updates, state, params=None, **extra_args):
        del extra_args
        updates, _ = map_leaves(
            _step,
            geometry,
            updates,
            params,
            name="keep_norms",
            select=_on_sphere,
            carried=state.radius,
            stack=False,
        )
        return updates, state

    # The placeholder has a number for each dictionary; see `link`.
    return link(update_fn, init_fn, lambda _: KeepNormsState(jnp.zeros(())), LastLink)  # type: ignore


def _step(manifold: Manifold, point: jax.Array, step: jax.Array, radius: jax.Array) -> jax.Array:
    start, ndim = upcast(point), manifold.ndim
    size = expand_trailing(radius, ndim).astype(start.dtype)
    moved = size * normalize(start / size + step.astype(start.dtype), ndim)
    return difference(stay_if_still(start, step, moved, ndim), point)


@check_arguments(radial=number("[0, 1]"))
def hyperball(
    base: optax.GradientTransformation,
    learning_rate: optax.ScalarOrSchedule,
    geometry: Geometry,
    *,
    radial: ArrayLike = 1.0,
    radius: Radius = None,
    budgets: Budgets | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Move weights of fixed norm by normalised updates of any optimizer: AdamH, MuonH.

    With the update $u$ of the base and the norm $R$ of the weight at the start

    $$
    W \leftarrow R\,\operatorname{Norm}\bigl(W - \eta R\,\operatorname{Norm}(u)\bigr), \qquad
    \operatorname{Norm}(x) = \frac{x}{\|x\|_F}
    $$

    (Wen et al., "Hyperball Optimization", arXiv:2606.16899). It takes the place of weight decay,
    and the learning rate is the angle of a step, to first order.

    `adamh` and `muonh` are this with their bases. For steps that are tangent and steepest in the
    spectral norm the base is `chain(optax.trace(0.95), scale_by_steepest(sphere))`, with the
    geometry `sphere = Hypersphere(ndim=2, step_norm=Spectral())` and `radial=0`.

    The norm is fixed, so a gain is a parameter of its own where the model needs one:
    `y = gain * (W @ x)` with `gain` a scalar or vector that starts at 1 and is trained by Adam.
    Biases, gains and embeddings go to another optimizer by `optim.hybrid`, as in the example.

    Args:
      base: what makes the updates. It must ascend and have no learning rate, as
        `optax.scale_by_adam()` does; see `optim.normalize`.
      learning_rate: a number or an Optax schedule.
      geometry: which parameters keep their norm, and what one point of them is; see `keep_norms`.
        Updates of `Euclidean` leaves are those of the base, times the learning rate.
      radial: how much of the radial part of `u`, its component along `W`, is kept before the
        update is normalised: 1 is the published update, 0 a tangent step.
      radius: other radii than the norms at the start; see `keep_norms`.
      budgets: shares of the learning rate per leaf; see `optim.scale_by_budget`.

    Returns:
      A chain that ends in `keep_norms`, whose state has the radii. `update` needs `params`. A zero
      update, and for `radial=0` one whose tangent part is rounding, keeps the weights.

    Raises:
      TypeError: on use; see `keep_norms`.
      ValueError: a number out of its range; on `init`, a base that descends; on use, see
        `keep_norms`.

    Examples:
      >>> params = {"kernel": jnp.ones((2, 4, 4)), "bias": jnp.zeros((2, 4))}
      >>> geometry = {"kernel": mm.manifolds.Hypersphere(ndim=2), "bias": None}
      >>> adamh = hyperball(optax.scale_by_adam(), 0.02, geometry)
      >>> tx = mm.optim.hybrid(adamh, geometry, optax.adam(1e-3))
      >>> updates, _ = tx.update(params, tx.init(params), params)
      >>> jnp.linalg.norm(optax.apply_updates(params, updates)["kernel"], axis=(1, 2)).tolist()
      [4.0, 4.0]
    """
    links: list[Any] = [base, _normalize_updates(geometry, radial)]
    if budgets is not None:
        links.append(scale_by_budget(budgets))
    links += [optax.scale_by_learning_rate(learning_rate), keep_norms(geometry, radius)]
    descent = chain(*links)

    def update_fn(updates, state, params=None, **extra_args):
        # Checked before the base, which would broadcast an update of another shape.
        map_leaves(_step, geometry, updates, params, name="hyperball", select=_nowhere)
        return descent.update(updates, state, params, **extra_args)

    def init_fn(params: Any) -> Any:
        check_ascends("hyperball", base)
        return descent.init(params)

    return link(update_fn, init_fn, descent.init, LastLink)


def match_norms(geometry: Geometry, tree: Any, params: Any) -> Any:
    """Return a tree with the norms of the parameters: for averages of weights of fixed norm.

    An average of points of a sphere lies inside of it. Before use an average of weights that
    `keep_norms` has kept gets their norms back; for manifolds of known scale it is
    `optim.project_tree(geometry, average)`.

    Args:
      geometry: that of `keep_norms`. Leaves that are not on a `Hypersphere`, and those of the
        entry None, stay as they are.
      tree: for instance `optax.incremental_update(params, average, 0.01)`.
      params: the parameters whose norms are taken.

    Returns:
      A tree like `tree`, in the dtypes of the parameters. Where a weight of the tree is zero it
      stays zero.

    Examples:
      >>> match_norms(mm.manifolds.Hypersphere(), jnp.array([0.0, 0.5]), jnp.array([3.0, 4.0]))
      Array([0., 5.], dtype=float32)
    """
    places = find_manifolds(geometry, params, rest=True, cut=False)
    for place in places.real:
        _check_entry(places.paths[place], places.values[place])
    leaves = places.leaves(tree)
    trees = [places.fill(x, dict.fromkeys(places.rest)) for x in (tree, params)]
    found, _ = map_leaves(
        _match, geometry, *trees, name="match_norms", select=_on_sphere, stack=False
    )
    return places.fill(found, {place: leaves[place] for place in places.rest})


def _match(manifold: Manifold, point: jax.Array, other: jax.Array) -> jax.Array:
    size = expand_trailing(_measure(manifold, point, other)[1], manifold.ndim)
    return (size * normalize(other, manifold.ndim)).astype(point.dtype)


def _normalize_updates(geometry: Geometry, radial: ArrayLike) -> Link:
    """Return a link that divides each update on a sphere by its norm, in float32 or wider."""
    unit = functools.partial(_unit, radial)

    def update_fn(updates, state, params=None, **extra_args):
        del extra_args
        options: Any = {"name": "hyperball", "select": _on_sphere, "stack": False}
        return map_leaves(unit, geometry, updates, params, **options)[0], state

    return link(update_fn)


def _unit(radial: ArrayLike, manifold: Manifold, point: jax.Array, update: jax.Array) -> jax.Array:
    ndim = manifold.ndim
    if isinstance(radial, int | float) and radial == 1:
        return normalize(update, ndim)
    vector, _ = scale_to_unit_exponent(update, ndim)
    along = normalize(point, ndim).astype(vector.dtype)
    inner = expand_trailing(inner_product(along, vector, ndim), ndim)
    removed = jnp.asarray(1 - radial, vector.dtype)
    part = vector - never_fused(removed * inner * along)
    # Normalised, what rounding leaves of a radial update would be a whole step.
    noise = 8 * jnp.finfo(vector.dtype).eps * frobenius_norm(vector, ndim)
    rounded = frobenius_norm(part, ndim) <= noise
    return normalize(jnp.where(expand_trailing(rounded, ndim), 0, part), ndim)


def _on_sphere(manifold: Manifold) -> bool:
    return isinstance(manifold, Hypersphere)


def _nowhere(manifold: Manifold) -> bool:
    return False


def _find_radii(geometry: Geometry, radius: Radius, params: Any) -> dict[str, jax.Array]:
    """Return the radii by path, or raise where weights without one are zero or not finite."""
    places = find_manifolds(geometry, params, rest=True)
    for place in places.real:
        _check_entry(places.paths[place], places.values[place])
    given = places.spread(find_places(radius, params, _check_radius).values)
    leaves, radii, wrong = places.leaves(params), {}, []
    if not (places.real or places.rest):
        return {}

    def measure(tree: Any) -> dict[str, jax.Array]:
        return map_leaves(_measure, geometry, tree, tree, name="keep_norms", select=_on_sphere)[1]

    abstract = any(isinstance(leaves[place], jax.ShapeDtypeStruct) for place in places.real)
    found = (jax.eval_shape if abstract else lambda f, x: f(x))(measure, params)
    for place in places.real:
        path, entry, leaf = places.paths[place], places.values[place], leaves[place]
        if path not in found:
            continue
        value, norm = given[place], found[path]
        if value is not None:
            shape = inner_shape(entry, leaf.shape)
            size = scale_of(value, shape[len(shape) - manifold_of(entry).ndim :])
            norm = jnp.full(norm.shape, size, norm.dtype)
        elif abstract:
            norm = jnp.full(norm.shape, jnp.nan, norm.dtype)
        else:
            unfit = (norm == 0) | ~jnp.isfinite(norm)
            if isinstance(norm, Tracer) or not norm.is_fully_addressable:
                norm = jnp.where(unfit, jnp.nan, norm)
            elif unfit.any():
                wrong.append(path)
        radii[path] = replicated_like(norm, leaf)
    if wrong:
        raise ValueError(
            f"keep_norms: {wrong} have weights of norm zero, or one that is not finite, for good."
            " Give them a radius, for instance radius=by_path({...: 1.0, '**': None}), or start"
            " them elsewhere."
        )
    return radii


def _measure(manifold: Manifold, point: jax.Array, _: jax.Array) -> tuple[None, jax.Array]:
    scaled, exponent = scale_to_unit_exponent(point, manifold.ndim)
    return None, times_power_of_two(frobenius_norm(scaled, manifold.ndim), exponent)


def _check_entry(path: str, entry: Any) -> None:
    manifold = manifold_of(entry)
    if manifold.constrained and not _on_sphere(manifold):
        raise ValueError(
            f"keep_norms: the geometry of {path!r} is {manifold}; a weight of fixed norm lies on a"
            " Hypersphere, such as Hypersphere(ndim=2) for matrices."
        )


def _check_radius(path: str, radius: Any, leaf: jax.ShapeDtypeStruct) -> None:
    if radius is not None:
        check_scale(f"keep_norms: the radius of {path!r}", radius)
