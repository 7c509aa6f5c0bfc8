"""NorMuon: a learning rate for each neuron, after orthogonalisation."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from manifoldmuon._internal.arguments import ClipNorm, Decay, Momentum, Rate, WeightDecay, checked
from manifoldmuon._internal.matrices import arrays
from manifoldmuon._internal.matrices.powers_of_two import to_unit_norm
from manifoldmuon.linalg import TRAINING_MSIGN, MsignMethod
from manifoldmuon.manifolds import Manifold
from manifoldmuon.norms import ConvRMSToRMS, Spectral
from manifoldmuon.optim import Budgets, Geometry, muon, rules, scale_by_budget, transformation


class ScaleByNeuronRMSState(NamedTuple):
    """State of `scale_by_neuron_rms`.

    Attributes:
      nu: running mean square of each neuron's update, shape `(..., fan_out)`, float32, for leaves
        with a spectral norm: nested dictionaries with the paths of the parameters.
    """

    nu: dict[str, Any]


def neuron_rms(
    manifold: Manifold, point: jax.Array, update: jax.Array, given: rules.Given
) -> rules.RuleResult:
    """Divide the rows of a direction by their running root mean square; a rule."""
    axes = tuple(axis for axis in range(-manifold.ndim, 0) if axis != -2)
    wide = arrays.upcast(update)
    kept = arrays.expand_trailing(given["decay"], 1)
    nu = kept * given["nu"] + (1 - kept) * jnp.mean(wide**2, axis=axes)
    scaled = wide / jnp.expand_dims(jnp.sqrt(arrays.nonzero_or_one(nu)), axes)
    scaled, _ = rules.tangent(manifold, point, scaled, {})
    length = arrays.expand_trailing(arrays.frobenius_norm(wide, manifold.ndim), manifold.ndim)
    after = jnp.where(jnp.isfinite(nu), nu, given["nu"]).astype(given["nu"].dtype)
    return length * to_unit_norm(scaled, manifold.ndim), {"nu": after}


@checked
def scale_by_neuron_rms(
    geometry: Geometry, decay: Decay = 0.95
) -> optax.GradientTransformationExtraArgs:
    """Divide each neuron's update by its running root mean square: the second half of NorMuon.

    An orthogonalised direction has rows of very different lengths. With `O` the direction of a
    matrix `(fan_out, fan_in)` and a number `v_i` for each row (Li et al., arXiv:2510.05491,
    algorithm 1):

    `v_i <- decay * v_i + (1 - decay) * mean_j O_ij^2`, `O_ij <- O_ij / sqrt(v_i)`,

    and then the whole matrix is scaled back to the Frobenius norm of `O`, so that learning rates of
    Muon carry over. (The printed algorithm sets the root mean square to 0.2 instead; the authors'
    program keeps the norm, as here.) Put it after `scale_by_steepest`, before the budgets. It works
    on leaves with a spectral norm; all other leaves pass through. Matrices of a stack are
    independent. A row of a kernel with taps is an output channel, over all taps.

    The result is no longer the steepest direction: its spectral norm may be above 1, up to the
    square root of the rank, and recorded gaps belong to the direction before. On a constrained
    manifold scaled rows are not tangent: their tangent part is taken, and scaled to that norm.

    Args:
      geometry: manifold, and so norm and layout, of each parameter; see `resolve_geometry`.
      decay: decay of the running mean, from 0 up to but not including 1.

    Returns:
      A transformation with arithmetic in float32 or wider. `update` needs `params`. Rows of zeros
      stay zero; a NaN stays in its leaf, and does not enter the running mean.

    Examples:
      >>> g = mm.manifolds.Stiefel()
      >>> directions = mm.optim.chain(mm.optim.scale_by_steepest(g), scale_by_neuron_rms(g))
      >>> tx = mm.optim.chain(directions, optax.scale(-0.1), mm.optim.retract(g))
    """
    return transformation(
        neuron_rms,
        geometry,
        ScaleByNeuronRMSState,
        _init_squares,
        numbers={"decay": decay},
        name="scale_by_neuron_rms",
        select=_has_neurons,
        stack=False,  # the rows of a leaf are read once and written once
    )


def _has_neurons(manifold: Manifold) -> bool:
    return isinstance(manifold.norm, Spectral | ConvRMSToRMS)


def _init_squares(manifold: Manifold, shape: tuple[int, ...]) -> tuple[jax.Array | None]:
    copies = shape[: len(shape) - manifold.ndim]
    has = _has_neurons(manifold)
    return (jnp.zeros((*copies, shape[-2]), jnp.float32) if has else None,)


@checked
def normuon(
    learning_rate: Rate,
    geometry: Geometry,
    momentum: Momentum = 0.95,
    neuron_decay: Decay = 0.95,
    *,
    method: Annotated[MsignMethod, MsignMethod.check] | None = TRAINING_MSIGN,
    nesterov: bool = True,
    accumulator_dtype: DTypeLike | None = "float32",
    clip: ClipNorm = None,
    weight_decay: WeightDecay = None,
    budgets: Budgets | None = None,
) -> optax.GradientTransformationExtraArgs:
    """NorMuon: `muon` with `scale_by_neuron_rms` after its directions (arXiv:2510.05491).

    Default decays are the authors'. On constrained manifolds put `scale_by_neuron_rms` after
    `scale_by_steepest` in your own chain.

    Args:
      learning_rate: see `muon`, like all arguments not listed.
      geometry: see `muon`. Leaves without a spectral norm get the step of `muon`.
      neuron_decay: see `scale_by_neuron_rms`.

    Examples:
      >>> tx, w = normuon(0.1, mm.manifolds.Euclidean(mm.norms.RMSToRMS())), jnp.eye(2)
      >>> state = tx.init(w)
      >>> for _ in range(4):
      ...     loss, grad = jax.value_and_grad(lambda w: jnp.sum((w - 1) ** 2))(w)
      ...     updates, state = tx.update(grad, state, w)
      ...     w = optax.apply_updates(w, updates)
      ...     print(f"{loss:.2f}", end=" ")
      2.00 1.62 1.28 0.99
    """
    direction = muon(
        1.0,
        geometry,
        momentum,
        method=method,
        nesterov=nesterov,
        accumulator_dtype=accumulator_dtype,
        clip=clip,
    )
    return optax.chain(
        direction,
        optax.scale(-1.0),
        scale_by_neuron_rms(geometry, neuron_decay),
        scale_by_budget(1.0 if budgets is None else budgets),
        optax.identity() if weight_decay is None else optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )
