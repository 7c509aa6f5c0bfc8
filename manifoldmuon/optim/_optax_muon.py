"""`optax.contrib.muon` by its own call, with this package's stacks, shards and polar factors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike

from manifoldmuon._internal.arguments import Epsilon, Rate, checked
from manifoldmuon._internal.meshes.alike import shard_alike
from manifoldmuon._internal.trees.paths import is_function, path_string
from manifoldmuon.linalg import MsignMethod, msign
from manifoldmuon.manifolds import Euclidean, LaidOut, Layout, Manifold
from manifoldmuon.norms import Spectral
from manifoldmuon.optim._execute import execute
from manifoldmuon.optim._plan import plan_updates

_Dims = optax.contrib.MuonDimensionNumbers
_JORDAN = 3.4445, -4.7750, 2.0315
_MATRIX = Euclidean(Spectral())
# Optax 0.2.6 scales by shape inside `scale_by_muon`; later versions in a transformation with an
# empty state.
_SCALES_BY_SHAPE = "consistent_rms" not in inspect.signature(optax.contrib.muon).parameters


@checked
def optax_muon(
    learning_rate: Rate,
    ns_coeffs: Any = _JORDAN,
    ns_steps: ArrayLike = 5,
    beta: ArrayLike = 0.95,
    eps: Epsilon = 1e-8,
    weight_decay: Rate = 0.0,
    weight_decay_mask: Any | Callable[[Any], Any] | None = None,
    mu_dtype: DTypeLike | None = None,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
    preconditioning: Literal["frobenius", "spectral", "aol", "schatten"] = "frobenius",
    adam_b1: ArrayLike = 0.9,
    adam_b2: ArrayLike = 0.999,
    adam_eps_root: ArrayLike = 0.0,
    adam_weight_decay: Rate = 0.0,
    adam_learning_rate: Rate | None = None,
    muon_weight_dimension_numbers: Any | Callable[[Any], Any] | None = None,
    consistent_rms: ArrayLike | None = None,
    method: Annotated[MsignMethod, MsignMethod.check] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Replace `optax.contrib.muon` by changing an import: same call, updates and state.

    Arguments, updates (to rounding) and the tree of the state are Optax's, so training resumes from
    its checkpoints. Only the work is organised differently: matrices of equal shape are
    orthogonalised in a single call, so that compile time does not grow with depth, and on a mesh
    (`jax.set_mesh`) each device orthogonalises its own share. `method` selects a polar factor of
    this package: the four steps of `linalg.TRAINING_MSIGN` leave singular values above 1e-2 of the
    Schatten norm within 0.014 of 1, Optax's five steps within 0.3.

    To constrain weights next, give them to `optim.manifold_muon` with `optax.partition`; see the
    page "Swap Optax's Muon".

    Args:
      learning_rate: as in `optax.contrib.muon`, like all arguments not listed.
      method: method for msign, in place of `ns_coeffs`, `ns_steps`, `eps` and `preconditioning`;
        None: Optax's own iteration.

    Raises:
      TypeError: `method` is not a `MsignMethod`; `init`: a matrix is complex.
      ValueError: dimension numbers do not fit their parameter (the message names its path), or
        Optax refuses an argument.

    Examples:
      >>> params = {"kernel": jnp.eye(4, 3), "bias": jnp.ones(3)}
      >>> ours, theirs = optax_muon(0.1), optax.contrib.muon(0.1)
      >>> updates, _ = ours.update(params, theirs.init(params), params)
      >>> wanted, _ = theirs.update(params, theirs.init(params), params)
      >>> bool(jnp.allclose(updates["kernel"], wanted["kernel"], atol=1e-6))
      True
    """
    if isinstance(ns_coeffs, str):
        ns_coeffs = _preset(ns_coeffs)
    iteration: Any = {"ns_coeffs": ns_coeffs, "ns_steps": ns_steps, "eps": eps}
    if preconditioning != "frobenius":  # Optax before 0.2.8 has no other
        iteration["preconditioning"] = preconditioning
    dims = muon_weight_dimension_numbers
    optimizers: Any = {
        "muon": optax.chain(
            _scale_by_muon(
                dims, iteration, beta, mu_dtype, nesterov, adaptive, method, consistent_rms
            ),
            *([] if _SCALES_BY_SHAPE else [optax.identity()]),
            optax.add_decayed_weights(weight_decay, weight_decay_mask),
            optax.scale_by_learning_rate(learning_rate),
        ),
        "adam": optax.adamw(
            learning_rate if adam_learning_rate is None else adam_learning_rate,
            adam_b1,
            adam_b2,
            eps,
            adam_eps_root,
            mu_dtype,
            adam_weight_decay,
            nesterov=nesterov,
        ),
    }
    both = optax.partition(optimizers, lambda params: _optimizer_labels(dims, params))

    def init_fn(params):
        pairs, _ = jax.tree_util.tree_flatten_with_path(params)
        for own, (path, leaf) in zip(_leaf_dims(dims, params), pairs, strict=True):
            if own is None:
                continue
            if jnp.iscomplexobj(leaf):
                raise TypeError(
                    f"optax_muon: parameter {path_string(path)!r} is {leaf.dtype}; train complex "
                    "matrices by optax.contrib.muon, with optax.partition"
                )
            try:
                Layout.from_muon(own, ndim=jnp.ndim(leaf))
            except ValueError as error:
                raise ValueError(
                    f"optax_muon: the dimension numbers of {path_string(path)!r} do not fit its"
                    f" shape {jnp.shape(leaf)}: {error}"
                ) from error
        return both.init(params)

    def update_fn(updates, state, params=None, **extra_args):
        updates, state = both.update(updates, state, params, **extra_args)
        return updates if params is None else shard_alike(updates, params), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _preset(name: str) -> Any:
    """Return Optax's coefficients of this name."""
    kernel = {"w": jnp.ones((1, 1))}
    with jax.ensure_compile_time_eval():
        state: Any = optax.contrib.muon(0.1, name).init(kernel).inner_states["muon"]  # type: ignore
        return np.asarray(state.inner_state[0].ns_coeffs)


def _scale_by_muon(
    dims: Any,
    iteration: dict[str, Any],
    beta: Any,
    mu_dtype: Any,
    nesterov: bool,
    adaptive: bool,
    method: MsignMethod | None,
    consistent_rms: Any,
) -> optax.GradientTransformation:
    """Return `scale_by_muon` and `scale_by_shape` of Optax, with equal leaves stacked."""
    state_of: Any = optax.contrib.scale_by_muon(beta=beta, mu_dtype=mu_dtype, **iteration)
    # AOL divides rows: of a square matrix the result depends on which axis they are.
    by_rows = iteration.get("preconditioning") == "aol"

    @functools.cache
    def polar(steps: int | None) -> Any:
        """Return the rule of the iteration alone; `steps` if the coefficients have a row each."""
        own: Any = iteration if steps is None else iteration | {"ns_steps": steps}
        alone: Any = optax.contrib.scale_by_muon(
            beta=0.0, nesterov=False, weight_dimension_numbers=_Dims(-1, -2), **own
        )

        def rule(manifold: Manifold, point: jax.Array, update: jax.Array, _: Any) -> jax.Array:
            if method is not None:
                return msign(update, method).astype(update.dtype)
            stack = update[None]  # Optax takes two axes as they are stored, whatever the dimensions
            orthogonal = alone.update(stack, alone.init(stack))[0][0]
            return orthogonal / _shape_factor(update.shape) if _SCALES_BY_SHAPE else orthogonal

        return rule

    def times_dual_norm(
        manifold: Manifold, point: jax.Array, update: jax.Array, _: Any
    ) -> jax.Array:
        return jnp.sum(point * update) * update  # a single number for a leaf, copies included

    def scale(manifold: Manifold, point: jax.Array, update: jax.Array, _: Any) -> jax.Array:
        return (update * _shape_factor(update.shape, consistent_rms)).astype(update.dtype)

    def update_fn(updates, state, params=None):
        trees, count = optax.tree_utils, optax.safe_increment(state.count)
        mu = trees.tree_update_moment(updates, state.mu, beta, 1)
        if nesterov:
            ahead = trees.tree_bias_correction(mu, beta, optax.safe_increment(count))
            now = trees.tree_bias_correction(updates, beta, count)
            moment = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, ahead, now)
        else:
            moment = trees.tree_bias_correction(mu, beta, count)
        moment = moment if params is None else shard_alike(moment, params)
        plan = plan_updates("optax_muon", _geometry(dims, moment), moment, moment)
        stored = plan
        if by_rows:
            stored = plan_updates("optax_muon", _geometry(dims, moment, True), moment, moment)
        steps = len(state.ns_coeffs) if state.ns_coeffs.ndim == 2 else None
        updates, _ = execute("optax_muon", stored, polar(steps), (moment, moment), divide=True)
        visit = functools.partial(execute, "optax_muon", plan)
        if adaptive:
            updates, _ = visit(times_dual_norm, (moment, updates), stack=False)
        updates, _ = visit(scale, (updates, updates), stack=False)
        mu = trees.tree_cast(mu, mu_dtype)
        return updates, state._replace(count=count, mu=mu)

    return optax.GradientTransformation(state_of.init, update_fn)


def _shape_factor(shape: tuple[int, ...], consistent_rms: Any = None) -> Any:
    fan_out, fan_in = shape[-2:]
    if consistent_rms is None:
        return max(1, fan_out / fan_in) ** 0.5
    return max(fan_in, fan_out) ** 0.5 * consistent_rms


def _leaf_dims(dims: Any, params: Any) -> Any:
    """Return a list of dimension numbers, or None, for all parameters."""
    if dims is None:
        return [_Dims() if jnp.ndim(x) == 2 else None for x in jax.tree.leaves(params)]
    given, per_leaf = dims(params) if is_function(dims) else dims, []
    jax.tree.map(
        lambda d, x: per_leaf.extend([d] * len(jax.tree.leaves(x))), given, params, is_leaf=_is_dims
    )
    return per_leaf


def _is_dims(node: Any) -> bool:
    return node is None or isinstance(node, _Dims)


def _optimizer_labels(dims: Any, params: Any) -> Any:
    names = ["adam" if d is None else "muon" for d in _leaf_dims(dims, params)]
    return jax.tree.unflatten(jax.tree.structure(params), names)


def _geometry(dims: Any, tree: Any, as_stored: bool = False) -> Any:
    """Return the layouts; with `as_stored` rows are fan-in in all leaves of two axes."""
    leaves, treedef = jax.tree.flatten(tree)
    entries = []
    for own, x in zip(_leaf_dims(dims, tree), leaves, strict=True):
        given = _Dims() if as_stored and x.ndim == 2 else own
        entries.append(LaidOut(_MATRIX, Layout.from_muon(given, ndim=x.ndim)))
    return jax.tree.unflatten(treedef, entries)
