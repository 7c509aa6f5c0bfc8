"""Whole optimizers: chains of the links, and nothing else."""

from typing import Any

import optax
from jax.typing import ArrayLike, DTypeLike

from manifoldmuon.optim._budget import Budgets, scale_by_budget
from manifoldmuon.optim._chain import chain
from manifoldmuon.optim._combination import Combination, Max
from manifoldmuon.optim._duality import scale_by_duality
from manifoldmuon.optim._geometry import Geometry, lay_out_geometry
from manifoldmuon.optim._retract import retract
from manifoldmuon.optim._steepest import scale_by_steepest
from manifoldmuon.optim._updates import is_placeholder


def manifold_muon(
    learning_rate: optax.ScalarOrSchedule,
    geometry: Geometry,
    momentum: ArrayLike | None = 0.95,
    *,
    nesterov: bool = True,
    accumulator_dtype: DTypeLike | None = "float32",
    clip: ArrayLike | optax.GradientTransformation | None = None,
    weight_decay: optax.ScalarOrSchedule | None = None,
    budgets: Budgets | None = None,
    combination: Combination = Max(),
) -> optax.GradientTransformationExtraArgs:
    """Steepest descent on manifolds, with momentum: manifold Muon and its kin.

    The chain is: clipping, `optax.trace`, `scale_by_steepest`, `scale_by_budget`, weight decay
    (flat leaves), `optax.scale_by_learning_rate`, `retract`. On `Stiefel` leaves this is
    manifold Muon ("Modular Manifolds", Thinking Machines 2025); every other geometry works the
    same way.

    Args:
      learning_rate: a number or an Optax schedule. On a curved manifold it is an angle.
      geometry: which manifold each parameter lives on; see `resolve`.
      momentum: decay of the momentum, or None for none. Directions do not depend on the
        gradient's scale, so a sum and an average of past gradients are the same.
      nesterov: whether to look ahead along the momentum.
      accumulator_dtype: dtype of the momentum, whatever the parameters' and gradients' are
        (float32 keeps what bfloat16 would round away); None for that of `optax.trace`.
      clip: what tames gradients before they enter the momentum, where alone it has an effect:
        a largest global norm, or a transformation such as `optax.adaptive_grad_clip(0.01)`.
      weight_decay: decay rate of the flat (`Euclidean`) leaves, multiplied by the learning rate.
        Curved manifolds bound their weights by themselves.
      budgets: shares of the learning rate per leaf; see `scale_by_budget`.
      combination: how the norms of the layers combine; `Max()` treats each leaf by itself. See
        `scale_by_duality`, which takes the place of its two links for any other.

    Returns:
      The chain. `update` needs `params`. With `optax.inject_hyperparams`, name a geometry,
      budgets or `accumulator_dtype` that are callable in `static_args`.

    Raises:
      TypeError: on use; see `resolve`.
      ValueError: on use; see `resolve`.
    """
    links = []
    if clip is not None:
        is_link = isinstance(clip, optax.GradientTransformation)
        links.append(clip if is_link else optax.clip_by_global_norm(clip))
    if momentum is not None:
        links.append(optax.trace(momentum, nesterov, accumulator_dtype))
    if combination != Max():
        links.append(scale_by_duality(geometry, 1.0 if budgets is None else budgets, combination))
    else:
        links.append(scale_by_steepest(geometry))
        if budgets is not None:
            links.append(scale_by_budget(budgets))
    if weight_decay is not None:
        links.append(decay_flat(weight_decay, geometry))
    links.append(optax.scale_by_learning_rate(learning_rate))
    links.append(retract(geometry))
    return chain(*links)


def muon(
    learning_rate: optax.ScalarOrSchedule,
    geometry: Geometry,
    momentum: ArrayLike | None = 0.95,
    *,
    nesterov: bool = True,
    accumulator_dtype: DTypeLike | None = "float32",
    clip: ArrayLike | optax.GradientTransformation | None = None,
    weight_decay: optax.ScalarOrSchedule | None = None,
    budgets: Budgets | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Muon: momentum, orthogonalised (Jordan 2024), as steepest descent in flat space.

    `manifold_muon` for a geometry that is `Euclidean` everywhere. The norms say what each leaf
    is: `Euclidean(RMSToRMS())` for matrices, so that the learning rate transfers across widths,
    `Euclidean(L1ToRMS())` for embeddings, `Euclidean()` for biases and gains. Every leaf gets the
    steepest direction of its norm; none is handed to Adam (use `optax.partition` for that).

    Args:
      learning_rate: a number or an Optax schedule.
      geometry: `Euclidean` with a norm for every parameter; see `resolve`.
      momentum: see `manifold_muon`.
      nesterov: see `manifold_muon`.
      accumulator_dtype: see `manifold_muon`.
      clip: see `manifold_muon`.
      weight_decay: see `manifold_muon`.
      budgets: see `manifold_muon`.

    Returns:
      The chain. `update` needs `params`.

    Raises:
      TypeError: on use; see `resolve`.
      ValueError: on use, for a leaf that is not flat; see `resolve`.
    """
    descent = manifold_muon(
        learning_rate,
        geometry,
        momentum,
        nesterov=nesterov,
        accumulator_dtype=accumulator_dtype,
        clip=clip,
        weight_decay=weight_decay,
        budgets=budgets,
    )
    return chain(_require_flat(geometry), descent)


def decay_flat(
    weight_decay: optax.ScalarOrSchedule | None, geometry: Geometry
) -> optax.GradientTransformation:
    """Weight decay of the flat leaves; None decays nothing."""
    if weight_decay is None:
        return optax.identity()

    def mask(tree: Any) -> Any:
        layout = lay_out_geometry(geometry, tree)
        marks = list(layout.leaves)
        for index in layout.indices():
            marks[index] = layout.values[index].flat
        return layout.rebuild(marks)

    return optax.add_decayed_weights(weight_decay, mask=mask)


def _require_flat(geometry: Geometry) -> optax.GradientTransformationExtraArgs:
    def init_fn(params: Any) -> optax.EmptyState:
        if not is_placeholder(params):
            layout = lay_out_geometry(geometry, params)
            curved = [layout.paths[i] for i in layout.indices() if not layout.values[i].flat]
            if curved:
                raise ValueError(
                    f"muon is for flat space, but {curved} lie on curved manifolds; use"
                    " manifold_muon, or Euclidean with a norm."
                )
        return optax.EmptyState()

    def update_fn(updates, state, params=None, **extra_args):
        del params, extra_args
        return updates, state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
