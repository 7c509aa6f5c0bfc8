"""Complete optimizers for a geometry, built as chains."""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated, Any

import jax
import optax
from jax.typing import ArrayLike, DTypeLike

from manifoldmuon._internal import arguments
from manifoldmuon._internal.trees.paths import refuse_unused
from manifoldmuon._internal.trees.transformations import (
    Transformation,
    as_transformations,
    gradient_transformation,
)
from manifoldmuon.linalg import TRAINING_MSIGN, MsignMethod
from manifoldmuon.manifolds import Euclidean, Manifold
from manifoldmuon.norms import ConvRMSToRMS, Spectral
from manifoldmuon.optim import rules
from manifoldmuon.optim._budget import Budgets
from manifoldmuon.optim._chain import chain
from manifoldmuon.optim._descend import descend
from manifoldmuon.optim._geometry import Geometry, map_geometry
from manifoldmuon.optim._hybrid import hybrid
from manifoldmuon.optim._hyperball import norm_keeping
from manifoldmuon.optim._keep_norms import Radius
from manifoldmuon.optim._links import scale_by_steepest
from manifoldmuon.optim._plan import make_plan, plan_updates
from manifoldmuon.optim._riemannian import scale_by_wide_adam


def decay_transformations(
    weight_decay: optax.ScalarOrSchedule | None, geometry: Geometry
) -> list[optax.GradientTransformation]:
    """Return weight decay for unconstrained leaves; an empty list for None."""

    def mask(tree: Any) -> Any:
        plan = make_plan(geometry, tree)
        return plan.fill(tree, {w.index: not w.manifold.constrained for w in plan.weights})

    return [] if weight_decay is None else [optax.add_decayed_weights(weight_decay, mask=mask)]


@arguments.checked
def manifold_muon(
    learning_rate: arguments.Rate,
    geometry: Geometry,
    momentum: arguments.Momentum = 0.95,
    *,
    nesterov: bool = True,
    accumulator_dtype: DTypeLike | None = "float32",
    clip: arguments.ClipNorm = None,
    rest: optax.GradientTransformation | None = None,
    weight_decay: arguments.WeightDecay = None,
    budgets: Budgets | None = None,
    track_gap: bool = True,
) -> optax.GradientTransformationExtraArgs:
    r"""Steepest descent with momentum on manifolds; on Stiefel matrices this is manifold Muon.

    With gradients $G_t$, the momentum $\mu$, a leaf's budget $b$ and its retraction $R$:

    $$
    \begin{aligned}
    M_t &= \mu M_{t-1} + G_t, \qquad A_t = \operatorname*{arg\,max}_A\
    \langle \mu M_t + G_t, A\rangle \ \text{ over tangent } A \text{ with } \|A\| \le 1,\\
    W_{t+1} &= R_{W_t}(-\eta_t\, b\, A_t); \quad \text{unconstrained:}\quad
    W_{t+1} = W_t - \eta_t\,(b A_t + \lambda W_t).
    \end{aligned}
    $$

    The chain is: clipping, `optax.trace`, `scale_by_steepest`, `scale_by_budget`, weight decay
    (unconstrained leaves), `optax.scale_by_learning_rate`, `retract` ("Modular Manifolds",
    Thinking Machines 2025).

    Args:
      learning_rate: a number or an Optax schedule. On a constrained manifold it is an angle, to
        first order.
      geometry: the manifold of each parameter; see `resolve_geometry`.
      momentum: decay of the momentum; None turns momentum off. Directions do not depend on the
        gradient's scale, so a sum and an average of past gradients are equivalent. To converge on
        a fixed cost, add `clip=project_tangent(geometry)`: see "Momentum" in docs/minimize.md.
      nesterov: whether to look ahead along the momentum.
      accumulator_dtype: dtype of the momentum, independent of parameters and gradients (float32
        keeps small terms that bfloat16 would round away); None for the default of `optax.trace`.
      clip: gradient clipping: a maximum global norm, or a transformation such as
        `optax.adaptive_grad_clip(0.01)`. It sees all gradients, before the momentum; later it would
        have no effect, since directions do not depend on scale.
      rest: complete optimizer of the parameters with the entry None, such as `optax.adamw(3e-4)`,
        with its own learning rate and weight decay; `optax.set_to_zero()` freezes them. See
        `hybrid`.
      weight_decay: decay rate of the unconstrained (`Euclidean`) leaves, a number or a schedule,
        multiplied by the learning rate. Constrained manifolds already bound their weights.
      budgets: shares of the learning rate per leaf; see `scale_by_budget`.
      track_gap: whether to keep residuals and gaps for `monitor`; see `scale_by_steepest`.

    Returns:
      The chain. `update` needs `params`. With `optax.inject_hyperparams`, list a geometry or
      budgets given as functions in its `static_args`.

    Examples:
      >>> tx, w = manifold_muon(0.3, mm.manifolds.Stiefel()), jnp.eye(4, 2)
      >>> state = tx.init(w)
      >>> for _ in range(4):
      ...     loss, grad = jax.value_and_grad(lambda w: jnp.sum((w - jnp.eye(4, 2)[::-1]) ** 2))(w)
      ...     updates, state = tx.update(grad, state, w)
      ...     w = optax.apply_updates(w, updates)
      ...     print(f"{loss:.2f}", end=" ")
      4.00 2.85 1.80 0.93
    """
    descent = descend(
        learning_rate,
        geometry,
        budgets=1.0 if budgets is None else budgets,
        weight_decay=weight_decay,
        track_gap=track_gap,
    )
    own = [] if momentum is None else [optax.trace(momentum, nesterov, accumulator_dtype)]
    whole = _with_rest([*own, descent], geometry, rest, clip, budgets=budgets)

    def update_fn(updates, state, params=None, **extra_args):
        # Check shapes before clipping and momentum, which would broadcast a wrong shape.
        plan_updates("manifold_muon", geometry, updates, params, rest=rest is not None)
        return whole.update(updates, state, params, **extra_args)

    return gradient_transformation(update_fn, whole.init, whole.init, type(whole))


@arguments.checked
def muon(
    learning_rate: arguments.Rate,
    geometry: Geometry,
    momentum: arguments.Momentum = 0.95,
    *,
    method: Annotated[MsignMethod, MsignMethod.check] | None = TRAINING_MSIGN,
    nesterov: bool = True,
    accumulator_dtype: DTypeLike | None = "float32",
    clip: arguments.ClipNorm = None,
    rest: optax.GradientTransformation | None = None,
    weight_decay: arguments.WeightDecay = None,
    budgets: Budgets | None = None,
    track_gap: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Muon: momentum, orthogonalised (Jordan 2024), as steepest descent in flat space.

    For a matrix with the norm `RMSToRMS()`, budget $b$ and weight decay $\lambda$:

    $$
    M_t = \mu M_{t-1} + G_t, \qquad W_{t+1} = W_t - \eta_t \left(b\,
    \sqrt{\tfrac{\text{fan out}}{\text{fan in}}}\, \operatorname{msign}(\mu M_t + G_t)
    + \lambda W_t\right).
    $$

    `manifold_muon` for a geometry that is `Euclidean` everywhere. Choose the norm by the kind of
    parameter: `Euclidean(RMSToRMS())` for matrices, so that the learning rate transfers across
    widths, and either `Euclidean(L1ToRMS())` for embeddings and `Euclidean()` for biases and gains,
    or None, to train them with the optimizer `rest`.

    Args:
      learning_rate: see `manifold_muon`, also for the arguments not listed here.
      geometry: `Euclidean` with a norm, or None, for every parameter; see `resolve_geometry`.
      method: method of msign in norms without a method of their own. The default,
        `linalg.TRAINING_MSIGN`, brings singular values down to 1e-2 of the Schatten norm within
        0.014 of 1; None converges (see `linalg.DEFAULT_MSIGN`), in twice the time or more.
      track_gap: gaps take about a sixth of this optimizer's time.

    Examples:
      >>> kernel = mm.manifolds.Euclidean(mm.norms.RMSToRMS()).transposed()  # Flax: (in, out)
      >>> geometry = by_path({"**/kernel": kernel, "**": None})
      >>> tx = muon(0.1, geometry, rest=optax.adam(0.1))
      >>> params = {"kernel": jnp.eye(2), "bias": jnp.zeros(2)}
      >>> state = tx.init(params)
      >>> cost = lambda p: jnp.sum((p["kernel"] + p["bias"] - 1) ** 2)
      >>> for _ in range(4):
      ...     loss, grad = jax.value_and_grad(cost)(params)
      ...     updates, state = tx.update(grad, state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     print(f"{loss:.2f}", end=" ")
      2.00 1.30 0.80 0.51
    """
    if method is not None:
        geometry = map_geometry(lambda manifold: _with_method(manifold, method), geometry)
    descent = manifold_muon(
        learning_rate,
        geometry,
        momentum,
        nesterov=nesterov,
        accumulator_dtype=accumulator_dtype,
        clip=clip,
        rest=rest,
        weight_decay=weight_decay,
        budgets=budgets,
        track_gap=track_gap,
    )

    def init_fn(params: Any) -> Any:
        weights = make_plan(geometry, params, rest=rest is not None).weights
        if constrained := [weight.path for weight in weights if weight.manifold.constrained]:
            raise ValueError(
                f"muon is for flat space, but {constrained} have constrained manifolds; use"
                " manifold_muon, or Euclidean with a norm."
            )
        return descent.init(params)

    return gradient_transformation(descent.update, init_fn, descent.init, type(descent))


@arguments.checked
def muonh(
    learning_rate: arguments.Rate,
    geometry: Geometry,
    momentum: arguments.Decay = 0.9,
    *,
    method: Annotated[MsignMethod, MsignMethod.check] | None = TRAINING_MSIGN,
    nesterov: bool = True,
    accumulator_dtype: DTypeLike | None = "float32",
    clip: arguments.ClipNorm = None,
    rest: optax.GradientTransformation | None = None,
    radius: Radius = None,
    radial: Annotated[ArrayLike, arguments.number("[0, 1]")] = 1.0,
    budgets: Budgets | None = None,
) -> optax.GradientTransformationExtraArgs:
    """MuonH: Muon's directions for matrices that keep their initial norm.

    `hyperball` of momentum and msign (Wen et al., arXiv:2606.16899), and another optimizer for the
    rest. There is no weight decay to tune, and the learning rate is an angle to first order.

    Args:
      learning_rate: a number or an Optax schedule; 1/32 to 1/16 at the peak.
      geometry: `Hypersphere(ndim=2)`, in the layout of the array, for each matrix that keeps its
        norm, and None for the parameters of `rest`. Each point keeps its norm (see `keep_norms`);
        msign acts on the matrices in the trailing two axes of the layout.
      momentum: decay of `optax.trace`; 0.8 to 0.95.
      method: method of msign; None converges.
      nesterov: see `optax.trace`.
      accumulator_dtype: dtype of the momentum; None for the dtype of the parameters.
      clip: maximum global norm of all gradients, or a transformation to use instead.
      rest: complete optimizer of the parameters with the entry None, such as `optax.adamw(3e-4)`.
      radius: replaces the initial norms; see `keep_norms`.
      radial: see `hyperball`.
      budgets: shares of the learning rate per leaf; see `scale_by_budget`.

    Examples:
      >>> geometry = by_path({"**/kernel": mm.manifolds.Hypersphere(ndim=2), "**": None})
      >>> tx = muonh(0.1, geometry, rest=optax.adam(0.1))
      >>> params = {"kernel": jnp.eye(2), "bias": jnp.zeros(2)}
      >>> state = tx.init(params)
      >>> cost = lambda p: jnp.sum((p["kernel"] + p["bias"] - 1) ** 2)
      >>> for _ in range(4):
      ...     loss, grad = jax.value_and_grad(cost)(params)
      ...     updates, state = tx.update(grad, state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     print(f"{loss:.2f}", end=" ")
      2.00 1.30 0.80 0.48
    """
    norm = Spectral() if method is None else Spectral(method)
    flat = map_geometry(lambda x: Euclidean(norm) if rules.on_sphere(x) else x, geometry)
    steepest: Any = scale_by_steepest(flat, track_gap=False)

    def init_fn(params: Any) -> Any:
        plan = make_plan(geometry, params, rest=True)
        spheres = [weight for weight in plan.weights if rules.on_sphere(weight.manifold)]
        leaves = plan.leaves(params)
        if vectors := [w.path for w in spheres if len(w.shape(leaves[w.index])) < 2]:
            raise ValueError(
                f"muonh takes matrices, and {vectors} have fewer axes: make their entries None,"
                " for `rest`, or take adamh"
            )
        return steepest.init(params)

    # Directions are computed in the visit below: a closed form has nothing to carry.
    unchanged = optax.GradientTransformationExtraArgs(
        init_fn, lambda updates, state, *_, **extra: (updates, state)
    )
    base = optax.chain(optax.trace(momentum, nesterov, accumulator_dtype), unchanged)

    def msign(
        manifold: Manifold, point: jax.Array, update: jax.Array, given: rules.Given
    ) -> rules.RuleResult:
        own = Euclidean(norm) if rules.on_sphere(manifold) else manifold
        return rules.direction(own, point, update, {"dual": ()})[0], {}

    # A direction that is not zero has norm 1 or more.
    second = functools.partial(rules.unit, radial=radial, over=rules.over_norm)
    ball = norm_keeping("muonh", base, msign, second, learning_rate, geometry, radius, budgets)
    return _with_rest([ball], geometry, rest, clip, budgets=budgets, radius=radius)


@arguments.checked
def adamh(
    learning_rate: arguments.Rate,
    geometry: Geometry,
    b1: arguments.Decay = 0.9,
    b2: arguments.Decay = 0.999,
    eps: arguments.Epsilon = 1e-8,
    *,
    clip: arguments.ClipNorm = None,
    rest: optax.GradientTransformation | None = None,
    radius: Radius = None,
    radial: Annotated[ArrayLike, arguments.number("[0, 1]")] = 1.0,
    budgets: Budgets | None = None,
) -> optax.GradientTransformationExtraArgs:
    """AdamH: Adam's directions for weights that keep their initial norm.

    Its moments are those of `optax.scale_by_adam`, in float32 or wider.

    Args:
      learning_rate: an angle to first order; see `muonh`, also for the arguments not listed here.
      geometry: a `Hypersphere` for each weight that keeps its norm, None for weights of `rest`.
      b1: see `optax.scale_by_adam`, also for `b2` and `eps`.

    Examples:
      >>> tx, w = adamh(0.1, mm.manifolds.Hypersphere(ndim=2)), jnp.eye(2)
      >>> state = tx.init(w)
      >>> for _ in range(4):
      ...     loss, grad = jax.value_and_grad(lambda w: jnp.sum((w - 1) ** 2))(w)
      ...     updates, state = tx.update(grad, state, w)
      ...     w = optax.apply_updates(w, updates)
      ...     print(f"{loss:.2f}", end=" ")
      2.00 1.62 1.39 1.19
    """
    base = scale_by_wide_adam(b1, b2, eps)
    # Unlike gradients, Adam's updates have no denormal numbers worth their compile time.
    move = functools.partial(rules.unit, radial=radial, over=rules.over_scaled_norm)
    ball = norm_keeping("adamh", base, None, move, learning_rate, geometry, radius, budgets)
    return _with_rest([ball], geometry, rest, clip, budgets=budgets, radius=radius)


def _with_rest(
    own: list[Any], geometry: Geometry, rest: Any, clip: Any, **values: Any
) -> Transformation:
    """Return a chain: clipping of all gradients, then `own`, with the optimizer `rest`.

    `values` are arguments that may be `by_path` objects. `own` cannot tell an unused pattern from
    one for the parameters of `rest`, which it does not see: `init` looks for them here.
    """
    both = own if rest is None else [hybrid(chain(*own), geometry, rest)]
    whole = chain(*as_transformations(clip, optax.clip_by_global_norm), *both)

    def init_fn(params: Any) -> Any:
        for name, value in values.items():
            refuse_unused(name, value, params)
        return whole.init(params)

    return gradient_transformation(whole.update, init_fn, whole.init, type(whole))


def _with_method(manifold: Manifold, method: MsignMethod) -> Manifold:
    """Set the msign method of a `Euclidean` manifold's norm, unless the norm has a method."""
    norm = manifold.norm
    if (
        not isinstance(manifold, Euclidean)
        or not isinstance(norm, Spectral | ConvRMSToRMS)
        or norm.method is not None
    ):
        return manifold
    return dataclasses.replace(manifold, step_norm=dataclasses.replace(norm, method=method))
