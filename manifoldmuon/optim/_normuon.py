"""NorMuon: one learning rate for each neuron, behind the orthogonalised direction."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from manifoldmuon._internal.arrays import expand_trailing, frobenius_norm, nonzero_or_one, upcast
from manifoldmuon._internal.powers_of_two import normalize
from manifoldmuon.manifolds import LaidOut, Manifold
from manifoldmuon.norms import ConvRMSToRMS, Spectral
from manifoldmuon.optim._arguments import checked
from manifoldmuon.optim._geometry import Geometry, find_manifolds, inner_shape, manifold_of
from manifoldmuon.optim._leaves import LikePoint, batched, is_placeholder, pair_up, replicated_like
from manifoldmuon.optim._tangent import tangent_part


class ScaleByNeuronRMSState(NamedTuple):
    """How large the neurons' updates have been.

    Attributes:
      nu: by path (see `path_string`), for the leaves with a spectral norm: the running mean square
        of each neuron's update, shape `(..., fan_out)`, float32.
    """

    nu: dict[str, jax.Array]


@checked()
def scale_by_neuron_rms(
    geometry: Geometry, decay: ArrayLike = 0.95
) -> optax.GradientTransformationExtraArgs:
    """Divides each neuron's update by its running root mean square: the second half of NorMuon.

    An orthogonalised direction has rows of very different lengths. With `O` the direction of a
    matrix `(fan_out, fan_in)` and one number `v_i` for each row (Li et al., arXiv:2510.05491,
    algorithm 1):

    `v_i <- decay * v_i + (1 - decay) * mean_j O_ij^2`, `O_ij <- O_ij / sqrt(v_i)`,

    and then the whole matrix is brought back to the Frobenius norm that `O` had, so that learning
    rates stay those of Muon. (The algorithm as printed gives it root mean square 0.2 instead; the
    authors' program keeps the norm, as here.) It goes behind `scale_by_steepest`, before the
    budgets, and works on leaves whose norm is spectral; all others pass through. Each matrix of a
    stack counts by itself. A row of a kernel with taps is its output channel, over all taps.

    What comes out is not the steepest direction any more: its spectral norm may be above 1, up to
    the square root of the rank, and certificates are of the direction before. On a constrained
    manifold scaled rows are not tangent: their tangent part is taken, and brought to that norm.

    Args:
      geometry: which manifold, and so which norm and layout, each parameter has; see `resolve`.
      decay: of the running mean, from 0 up to but not including 1.

    Returns:
      A transformation whose updates have the parameters' dtypes; the arithmetic is done in float32
      or wider. Its state is a `ScaleByNeuronRMSState`. `update` needs `params`. Rows of zeros stay
      zero; a NaN stays in its leaf, and does not enter the running mean.

    Raises:
      TypeError: on use; see `resolve`.
      ValueError: a decay outside of [0, 1); on use, see `resolve`.
    """

    def init_fn(params: Any) -> ScaleByNeuronRMSState:
        if is_placeholder(params):  # a leaf that is not a parameter
            return ScaleByNeuronRMSState(jnp.zeros(()))  # type: ignore
        places = find_manifolds(geometry, params)
        leaves, nu = places.leaves(params), {}
        for place in places.real:
            entry = places.values[place]
            if _has_neurons(entry):
                shape = inner_shape(entry, jnp.shape(leaves[place]))
                copies = shape[: len(shape) - manifold_of(entry).ndim]
                zeros = jnp.zeros((*copies, shape[-2]), jnp.float32)
                nu[places.paths[place]] = replicated_like(zeros, leaves[place])
        return ScaleByNeuronRMSState(nu)

    def update_fn(updates, state, params=None, **extra_args):
        del extra_args
        paired = pair_up(geometry, updates, params, "scale_by_neuron_rms")
        scaled = [leaf for leaf in paired.leaves if _has_neurons(leaf.entry)]
        unknown = [leaf.path for leaf in scaled if leaf.path not in state.nu]
        if unknown:
            raise ValueError(
                f"scale_by_neuron_rms: the state knows no parameters {unknown}; it was made for"
                " another tree. Call tx.init(params) again."
            )
        arguments = [
            (LikePoint(leaf.param), LikePoint(leaf.update), state.nu[leaf.path]) for leaf in scaled
        ]
        # Not stacked: the rows of a leaf are read once and written once.
        found = batched(
            functools.partial(_scale, decay),
            [leaf.entry for leaf in scaled],
            arguments,
            stack=False,
        )
        pairs = list(zip(scaled, found, strict=True))
        steps = {leaf.place: step for leaf, (step, _) in pairs}
        nu = {leaf.path: after for leaf, (_, after) in pairs}
        emitted = [steps.get(leaf.place, leaf.update) for leaf in paired.leaves]
        cast = [u.astype(leaf.param.dtype) for u, leaf in zip(emitted, paired.leaves, strict=True)]
        return paired.filled(cast), ScaleByNeuronRMSState(state.nu | nu)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _has_neurons(entry: Manifold | LaidOut) -> bool:
    return isinstance(manifold_of(entry).norm, Spectral | ConvRMSToRMS)


def _scale(
    decay: ArrayLike, manifold: Manifold, point: jax.Array, update: jax.Array, nu: jax.Array
) -> tuple[LikePoint, jax.Array]:
    direction, ndim = upcast(update), manifold.ndim
    others = tuple(axis for axis in range(-ndim, 0) if axis != -2)
    after = jnp.asarray(decay * nu + (1 - decay) * jnp.mean(direction**2, axis=others))
    rms = jnp.sqrt(nonzero_or_one(after))
    scaled = direction / jnp.expand_dims(rms, others)
    if manifold.constrained:
        scaled, _ = tangent_part(manifold, point, scaled)
    step = expand_trailing(frobenius_norm(direction, ndim), ndim) * normalize(scaled, ndim)
    return LikePoint(step), jnp.where(jnp.isfinite(after), after, nu).astype(nu.dtype)
