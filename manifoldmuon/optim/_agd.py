"""Automatic gradient descent: a step whose length follows from the depth and the gradient."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from manifoldmuon.linalg import prescale, times_power_of_two
from manifoldmuon.optim._chain import chain
from manifoldmuon.optim._fans import Fans, FansTree, lay_out_fans
from manifoldmuon.optim._updates import is_placeholder


class ScaleByAGDState(NamedTuple):
    """What the last step of `scale_by_agd` measured.

    Attributes:
      eta: the length of the step, `log((1 + sqrt(1 + 4 summary)) / 2)`; float32.
      summary: the gradient summary `G`, the mean over the layers of their scaled gradient norms;
        float32.
    """

    eta: Float[Array, ""]
    summary: Float[Array, ""]


def agd(
    fans: FansTree, gain: optax.ScalarOrSchedule = 1.0
) -> optax.GradientTransformationExtraArgs:
    """Automatic gradient descent (arXiv:2304.05187, theorem 2): no learning rate, no schedule.

    For a network of `L` layers, trained with the square loss `|f - y|^2 / (2 d_L)`, on inputs
    with `|x| = sqrt(d_0)` and targets with `|y| = sqrt(d_L)`, from `init_semi_orthogonal`:

    `G = mean_k s_k |g_k|_F`, `eta = log((1 + sqrt(1 + 4 G)) / 2)`,
    `dW_k = -gain * eta / L * s_k * g_k / |g_k|_F`, where `s_k = sqrt(d_out / d_in)`.

    The taps of a convolution are normalised one by one, with `s_k / sqrt(taps)`, and their norms
    are summed (its appendix B). Every copy of a stacked layer counts for the depth `L`.

    Args:
      fans: the layout of every parameter: one `Fans` for all, a prefix tree of them (compared by
        path), what `by_path` returns, or a function of JAX key path and leaf. Nothing is guessed
        from a shape; biases, gains and scalars are refused.
      gain: multiplies the step. 1 is the published method.

    Returns:
      The chain of `scale_by_agd` and `optax.scale_by_learning_rate(gain)`.

    Raises:
      TypeError: on use; see `scale_by_agd`.
      ValueError: on use; see `scale_by_agd`.
    """
    return chain(scale_by_agd(fans), optax.scale_by_learning_rate(gain))


def scale_by_agd(fans: FansTree) -> optax.GradientTransformationExtraArgs:
    """The ascending step of `agd`, of gain 1.

    The length of the step looks at all layers: a NaN in one gradient makes every update NaN (wrap
    it in `optax.apply_if_finite`), and under `optax.masked` the depth is that of what is left.
    Zero gradients give zero updates. The scale of the gradients matters, so clipping or averaging
    them beforehand changes the step.

    Args:
      fans: the layout of every parameter; see `agd`.

    Returns:
      A transformation whose updates have the gradients' dtypes; the arithmetic is done in float32
      or wider. Its state is a `ScaleByAGDState`.

    Raises:
      TypeError: on use, for an entry that is no `Fans` or a parameter that is not floating point.
      ValueError: on use, for a parameter without an entry, an entry without a parameter, or a
        parameter without the axes (a bias). Every message names the path.
    """

    def init_fn(params: Any) -> ScaleByAGDState:
        if not is_placeholder(params):
            lay_out_fans(fans, params, "agd")  # so that a bias is refused before training
        return ScaleByAGDState(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))

    def update_fn(updates, state, params=None, **extra_args):
        del state, params, extra_args
        layout = lay_out_fans(fans, updates, "agd")
        real = [i for i in layout.indices() if jnp.size(layout.leaves[i])]
        shaped = [(layout.values[i], jnp.asarray(layout.leaves[i])) for i in real]
        depth = max(sum(value.layers(grad.shape) for value, grad in shaped), 1)
        split = [_split(value, grad) for value, grad in shaped]
        summary = sum((norms for _, norms in split), jnp.zeros(())) / depth
        eta = step_length(summary)
        outgoing = list(layout.leaves)
        for index, (direction, _) in zip(real, split, strict=True):
            step = (eta / depth).astype(direction.dtype) * direction
            outgoing[index] = step.astype(layout.leaves[index].dtype)
        state = ScaleByAGDState(eta.astype(jnp.float32), summary.astype(jnp.float32))
        return layout.rebuild(outgoing), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def step_length(summary: Float[Array, ""]) -> Float[Array, ""]:
    """`log((1 + sqrt(1 + 4 G)) / 2)`, the minimiser over eta of `-eta G + (exp(eta) - 1)^2 / 2`.

    Written so that a tiny `G` gives `G` and not the logarithm of one, which is zero.
    """
    return jnp.log1p(2 * summary / (1 + jnp.sqrt(1 + 4 * summary)))


def _split(fans: Fans, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Scaled unit matrices in the layout of the gradient, and the sum of the scaled norms."""
    last = tuple(range(-len(fans.matrix_axes), 0))
    scaled, exponent = prescale(jnp.moveaxis(grad, fans.matrix_axes, last), len(last))
    length = jnp.sqrt(jnp.sum(scaled**2, axis=last, keepdims=True))
    size = fans.scale(grad.shape)
    # A prescaled matrix has length 0 or at least 1. Not `> 0`: that would hide a NaN.
    unit = scaled * (size / jnp.where(length == 0, 1.0, length))
    norms = times_power_of_two(jnp.squeeze(length, last), exponent)
    return jnp.moveaxis(unit, last, fans.matrix_axes), size * jnp.sum(norms)
