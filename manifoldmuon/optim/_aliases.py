"""Whole optimizers for a geometry: chains of the links, and nothing else."""

from __future__ import annotations

import dataclasses
from typing import Any

import optax
from jax.typing import ArrayLike, DTypeLike

from manifoldmuon.linalg import TRAINING_MSIGN, MsignMethod
from manifoldmuon.manifolds import Euclidean, Manifold
from manifoldmuon.norms import Combination, ConvRMSToRMS, Max, Spectral
from manifoldmuon.optim._arguments import checked, number
from manifoldmuon.optim._budget import Budgets, scale_by_budget
from manifoldmuon.optim._decay import Decay, decay_link
from manifoldmuon.optim._geometry import Geometry, find_manifolds, manifold_of, map_geometry
from manifoldmuon.optim._leaves import is_placeholder, pair_up
from manifoldmuon.optim._normuon import scale_by_neuron_rms
from manifoldmuon.optim._retract import LastLink, chain, retract
from manifoldmuon.optim._steepest import scale_by_duality, scale_by_steepest


@checked()
def manifold_muon(
    learning_rate: optax.ScalarOrSchedule,
    geometry: Geometry,
    momentum: ArrayLike | None = 0.95,
    *,
    nesterov: bool = True,
    accumulator_dtype: DTypeLike | None = "float32",
    clip: ArrayLike | optax.GradientTransformation | None = None,
    weight_decay: Decay | None = None,
    budgets: Budgets | None = None,
    combination: Combination = Max(),
    neuron_decay: ArrayLike | None = None,
    certify: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """Steepest descent on manifolds, with momentum: manifold Muon and its kin.

    The chain is: clipping, `optax.trace`, `scale_by_steepest`, `scale_by_neuron_rms` if asked for,
    `scale_by_budget`, weight decay (unconstrained leaves), `optax.scale_by_learning_rate`,
    `retract`. On `Stiefel` leaves this is
    manifold Muon ("Modular Manifolds", Thinking Machines 2025); every other geometry works the
    same way.

    Args:
      learning_rate: a number or an Optax schedule. On a constrained manifold it is an angle, to
        first order.
      geometry: which manifold each parameter lives on; see `resolve`.
      momentum: decay of the momentum, or None for none. Directions do not depend on the
        gradient's scale, so a sum and an average of past gradients are the same.
      nesterov: whether to look ahead along the momentum.
      accumulator_dtype: dtype of the momentum, whatever the parameters' and gradients' are
        (float32 keeps what bfloat16 would round away); None for that of `optax.trace`.
      clip: applied to gradients before they enter the momentum, where alone it has an effect:
        a largest global norm, or a transformation such as `optax.adaptive_grad_clip(0.01)`.
      weight_decay: decay rate of the unconstrained (`Euclidean`) leaves, multiplied by the
        learning rate, or a link such as `add_cautious_weight_decay(0.1, geometry)`. Constrained
        manifolds bound their weights by themselves.
      budgets: shares of the learning rate per leaf; see `scale_by_budget`.
      combination: how the norms of the layers combine; `Max()` treats each leaf by itself. See
        `scale_by_duality`, which takes the place of its two links for any other.
      neuron_decay: of the running mean squares by neuron of `scale_by_neuron_rms`, which goes
        behind the directions then; None for none.
      certify: whether residuals and gaps are kept for `monitor`; see `scale_by_steepest`.

    Returns:
      The chain. `update` needs `params`. For `optax.inject_hyperparams`, wrap a geometry or budgets
      that are functions in `ByFunction`.

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
        shares = 1.0 if budgets is None else budgets
        links.append(scale_by_duality(geometry, shares, combination, certify))
    else:
        links.append(scale_by_steepest(geometry, certify))
    if neuron_decay is not None:
        links.append(scale_by_neuron_rms(geometry, neuron_decay))
    if combination == Max() and budgets is not None:
        links.append(scale_by_budget(budgets))
    if weight_decay is not None:
        links.append(decay_link(weight_decay, geometry))
    links.append(optax.scale_by_learning_rate(learning_rate))
    links.append(retract(geometry))
    tx = chain(*links)

    def update_fn(updates, state, params=None, **extra_args):
        # Before clipping and momentum, which would broadcast an update of another shape.
        pair_up(geometry, updates, params, "manifold_muon")
        return tx.update(updates, state, params, **extra_args)

    return LastLink(tx.init, update_fn)


@checked()
def muon(
    learning_rate: optax.ScalarOrSchedule,
    geometry: Geometry,
    momentum: ArrayLike | None = 0.95,
    *,
    method: MsignMethod | None = TRAINING_MSIGN,
    nesterov: bool = True,
    accumulator_dtype: DTypeLike | None = "float32",
    clip: ArrayLike | optax.GradientTransformation | None = None,
    weight_decay: Decay | None = None,
    budgets: Budgets | None = None,
    combination: Combination = Max(),
    neuron_decay: ArrayLike | None = None,
    certify: bool = False,
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
      method: how msign is taken in norms that name no method themselves. The default is
        `linalg.TRAINING_MSIGN`, singular values within 0.014 of 1 down to 1e-2 of the Schatten
        norm; None converges (see `linalg.DEFAULT_MSIGN`), for twice the time or more.
      nesterov: see `manifold_muon`.
      accumulator_dtype: see `manifold_muon`.
      clip: see `manifold_muon`.
      weight_decay: see `manifold_muon`.
      budgets: see `manifold_muon`.
      combination: see `manifold_muon`.
      neuron_decay: see `manifold_muon`; `normuon` is this optimizer with 0.95.
      certify: see `manifold_muon`; gaps take a third of this optimizer's time.

    Returns:
      The chain. `update` needs `params`.

    Raises:
      TypeError: `method` is not a `MsignMethod`; on use, see `resolve`.
      ValueError: on use, for a leaf on a constrained manifold; see `resolve`.
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
        weight_decay=weight_decay,
        budgets=budgets,
        combination=combination,
        neuron_decay=neuron_decay,
        certify=certify,
    )

    def init_fn(params: Any) -> Any:
        if not is_placeholder(params):
            places = find_manifolds(geometry, params)
            values = {places.paths[i]: manifold_of(places.values[i]) for i in places.real}
            if found := [path for path, manifold in values.items() if manifold.constrained]:
                raise ValueError(
                    f"muon is for flat space, but {found} lie on constrained manifolds; use"
                    " manifold_muon, or Euclidean with a norm."
                )
        return descent.init(params)

    return LastLink(init_fn, descent.update)


@checked()
def normuon(
    learning_rate: optax.ScalarOrSchedule,
    geometry: Geometry,
    momentum: ArrayLike | None = 0.95,
    neuron_decay: ArrayLike = 0.95,
    *,
    method: MsignMethod | None = TRAINING_MSIGN,
    nesterov: bool = True,
    accumulator_dtype: DTypeLike | None = "float32",
    clip: ArrayLike | optax.GradientTransformation | None = None,
    weight_decay: Decay | None = None,
    budgets: Budgets | None = None,
) -> optax.GradientTransformationExtraArgs:
    """NorMuon: Muon with a second moment for each neuron (Li et al., arXiv:2510.05491).

    `muon` with `scale_by_neuron_rms` behind its directions. The rates of decay are the authors'. On
    constrained manifolds take `manifold_muon(..., neuron_decay=0.95)`.

    Args:
      learning_rate: a number or an Optax schedule; that of Muon.
      geometry: see `muon`. Leaves whose norm is not spectral get the step of `muon`.
      momentum: see `manifold_muon`.
      neuron_decay: see `scale_by_neuron_rms`.
      method: see `muon`.
      nesterov: see `manifold_muon`.
      accumulator_dtype: see `manifold_muon`.
      clip: see `manifold_muon`.
      weight_decay: see `manifold_muon`.
      budgets: see `manifold_muon`.

    Returns:
      The chain. `update` needs `params`.

    Raises:
      TypeError: see `muon`.
      ValueError: see `muon` and `scale_by_neuron_rms`.
    """
    return muon(
        learning_rate,
        geometry,
        momentum,
        method=method,
        nesterov=nesterov,
        accumulator_dtype=accumulator_dtype,
        clip=clip,
        weight_decay=weight_decay,
        budgets=budgets,
        neuron_decay=neuron_decay,
    )


@checked()
def scion(
    learning_rate: optax.ScalarOrSchedule,
    geometry: Geometry,
    radius: Budgets = 1.0,
    momentum: ArrayLike | None = 0.9,
    *,
    constrained: bool = True,
    method: MsignMethod | None = TRAINING_MSIGN,
    accumulator_dtype: DTypeLike | None = "float32",
    clip: ArrayLike | optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Scion: conditional gradients in the ball of each leaf's norm (arXiv:2502.07529, alg. 1, 2).

    `w <- (1 - learning_rate) w - learning_rate * radius * a`, where `a` is the steepest direction
    of the averaged gradient in the leaf's norm: a Frank-Wolfe step. It is `muon` without lookahead
    whose weight decay is 1 and whose budgets are the radii. Weights that start in the ball
    `norm(w) <= radius` stay in it, as closely as the method of msign is exact (1.014 radii for the
    default), and others come in; `init_tree` draws weights of norm 1, to be multiplied by the
    radius.

    Args:
      learning_rate: a number in [0, 1], or an Optax schedule of such.
      geometry: `Euclidean` with a norm for every parameter, the paper's choice of which is
        `RMSToRMS()` for matrices, `L1ToRMS()` or `MaxAbs()` for tables and the last layer,
        `Frobenius(1, RootDim())` for biases; see `resolve`.
      radius: of the ball of each leaf, in its norm; see `scale_by_budget`. The paper takes 50 in
        the body of a language model and `3000 / fan_in`, under `MaxAbs()`, for its last layer.
      momentum: 1 minus the weight of the newest gradient in the average (the paper's `alpha`).
      constrained: whether there is a ball. False is its unconstrained variant, without decay.
      method: see `muon`.
      accumulator_dtype: see `manifold_muon`.
      clip: see `manifold_muon`.

    Returns:
      The chain. `update` needs `params`.

    Raises:
      TypeError: see `muon`.
      ValueError: a learning rate outside of [0, 1] where there is a ball; see `muon`.
    """
    if constrained:  # the share of the way to the edge of the ball
        number("[0, 1]", schedule=True)("scion: learning_rate", learning_rate)
    return muon(
        learning_rate,
        geometry,
        momentum,
        method=method,
        nesterov=False,
        accumulator_dtype=accumulator_dtype,
        clip=clip,
        weight_decay=1.0 if constrained else None,
        budgets=radius,
    )


def _with_method(manifold: Manifold, method: MsignMethod) -> Manifold:
    """The manifold with this method in its norm, where that names none."""
    norm = manifold.norm
    if (
        not isinstance(manifold, Euclidean)
        or not isinstance(norm, Spectral | ConvRMSToRMS)
        or norm.method is not None
    ):
        return manifold
    return dataclasses.replace(manifold, step_norm=dataclasses.replace(norm, method=method))
