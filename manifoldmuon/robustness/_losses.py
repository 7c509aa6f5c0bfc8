"""Losses that train for a margin between logits, for certified robustness."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from manifoldmuon._internal.arguments import check_number
from manifoldmuon._internal.arrays import Numbers, upcast


def margin_cross_entropy(
    logits: Float[Array, "*batch classes"],
    labels: Int[Array, "*batch"],
    offset: ArrayLike,
    temperature: ArrayLike,
) -> Numbers:
    """Compute the cross-entropy of `(logits - offset * onehot(label)) / temperature`.

    The offset is a margin between logits. A 1-Lipschitz network with orthonormal rows in its last
    layer keeps its label within the radius r, in the norm of its input, if the label's logit
    exceeds all others by more than `sqrt(2) r`. To train for r, take this offset: 2.234 for 1.58.
    At a lower temperature, there is less to gain beyond this margin. Subtracting the offset from
    the label's logit is adding it to all others, as in Lipschitz-margin training (Tsuzuku, Sato and
    Sugiyama, arXiv:1802.04034, temperature 1). Prach and Lampert (AOL, arXiv:2208.03160, offset
    sqrt(2), temperature 1/4) also multiply the loss by the temperature, which scales gradients.

    Args:
      logits: `(..., classes)`, floating point.
      labels: `(...)`, whole numbers from 0 to `classes - 1`.
      offset: a margin in the unit of the logits; 0 or more.
      temperature: a positive number in the unit of the logits.

    Returns:
      A loss for each example, in float32 or wider; NaN if the label is not a class.

    Raises:
      TypeError: logits are not floating point, or labels not whole numbers.
      ValueError: shapes do not fit, or a number is out of its range. JAX arrays, such as a
        schedule's values under `jax.jit`, are not range-checked.

    Examples:
      >>> margin_cross_entropy(jnp.zeros((1, 2)), jnp.array([0]), 0.0, 1.0).round(4)
      Array([0.6931], dtype=float32)
    """
    _check("margin_cross_entropy", logits, labels)
    _check_scale("margin_cross_entropy: offset", offset)
    _check_scale("margin_cross_entropy: temperature", temperature, positive=True)
    onehot = _onehot(logits, labels)
    scores = (upcast(logits) - offset * onehot) / temperature
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(scores, labels)
    return _where_a_class(losses, onehot)


def multiclass_hinge(
    logits: Float[Array, "*batch classes"], labels: Int[Array, "*batch"], margin: ArrayLike
) -> Numbers:
    """Compute `sum over i != label of max(0, margin - (logits[label] - logits[i])) / classes`.

    Loss and gradient are zero once every other logit is `margin` below the label's. To train for
    the radius r, Li et al. (BCOP, arXiv:1911.00937) take a margin of `sqrt(2) r` times the
    Lipschitz constant of the network; see `margin_cross_entropy`.

    Args:
      logits: `(..., classes)`, floating point.
      labels: `(...)`, whole numbers from 0 to `classes - 1`.
      margin: a number in the unit of the logits; 0 or more.

    Returns:
      A loss for each example, in float32 or wider; NaN if the label is not a class.

    Raises:
      TypeError: see `margin_cross_entropy`.
      ValueError: see `margin_cross_entropy`.

    Examples:
      >>> multiclass_hinge(jnp.array([[2.0, 0.0]]), jnp.array([0]), 1.0)
      Array([0.], dtype=float32)
    """
    _check("multiclass_hinge", logits, labels)
    _check_scale("multiclass_hinge: margin", margin)
    onehot, scores = _onehot(logits, labels), upcast(logits)
    own = jnp.sum(jnp.where(onehot > 0, scores, 0), axis=-1, keepdims=True)
    short = jnp.where(onehot > 0, 0, jnp.maximum(margin - (own - scores), 0))
    return _where_a_class(jnp.mean(short, axis=-1), onehot)


def _onehot(logits: Array, labels: Array) -> Array:
    return jax.nn.one_hot(labels, logits.shape[-1], dtype=upcast(logits).dtype)


def _where_a_class(losses: Array, onehot: Array) -> Array:
    """Set losses of invalid labels to NaN: JAX would count -1 from the end."""
    return jnp.where(jnp.any(onehot > 0, axis=-1), losses, jnp.nan)


def _check(name: str, logits: Array, labels: Array) -> None:
    if not jnp.issubdtype(jnp.result_type(logits), jnp.floating):
        raise TypeError(f"{name}: logits must be floating point; got {jnp.result_type(logits)}")
    if not jnp.issubdtype(jnp.result_type(labels), jnp.integer):
        raise TypeError(
            f"{name}: labels must be whole numbers, one for each example; got"
            f" {jnp.result_type(labels)}. Of one-hot labels take jnp.argmax(labels, -1)"
        )
    shape, rows = jnp.shape(logits), jnp.shape(labels)
    if len(shape) == 0 or shape[:-1] != rows or shape[-1] < 2:
        raise ValueError(
            f"{name}: logits (..., classes), two classes or more, go with labels (...); got shapes"
            f" {shape} and {rows}"
        )


def _check_scale(name: str, value: ArrayLike, positive: bool = False) -> None:
    if isinstance(value, jax.Array):
        return
    check_number(name, value, within="[0, inf)")
    if positive and value == 0:
        raise ValueError(f"{name} must be above 0; got {value!r}")
