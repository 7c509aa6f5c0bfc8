"""A loss that trains for a margin between logits, for certified robustness."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Integer

from manifoldmuon._internal.arguments import check_number
from manifoldmuon._internal.matrices.arrays import Numbers, upcast


def margin_cross_entropy(
    logits: Float[Array, "*batch classes"],
    labels: Integer[Array, "*batch"],
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
      offset: a margin in the unit of the logits; 0 or more (not checked in JAX arrays).
      temperature: a positive number in the unit of the logits (not checked in JAX arrays).

    Returns:
      A loss for each example, in float32 or wider; NaN if the label is not a class.

    Examples:
      >>> margin_cross_entropy(jnp.zeros((1, 2)), jnp.array([0]), 0.0, 1.0).round(4)
      Array([0.6931], dtype=float32)
    """
    name = "margin_cross_entropy"
    if not jnp.issubdtype(jnp.result_type(logits), jnp.floating):
        raise TypeError(f"{name}: logits must be floating point; got {jnp.result_type(logits)}")
    if not jnp.issubdtype(jnp.result_type(labels), jnp.integer):
        raise TypeError(
            f"{name}: labels must be class indices; got"
            f" {jnp.result_type(labels)}. For one-hot labels, write jnp.argmax(labels, -1)"
        )
    shape, rows = jnp.shape(logits), jnp.shape(labels)
    if len(shape) == 0 or shape[:-1] != rows or shape[-1] < 2:
        raise ValueError(
            f"{name}: logits must be (..., classes), with two classes or more, and labels (...);"
            f" got shapes {shape} and {rows}"
        )
    for argument, value in {"offset": offset, "temperature": temperature}.items():
        if not isinstance(value, jax.Array):
            check_number(f"{name}: {argument}", value, within="[0, inf)")
    if not isinstance(temperature, jax.Array) and temperature == 0:
        raise ValueError(f"{name}: temperature must be above 0; got {temperature!r}")
    wide = upcast(logits)
    labels = jnp.asarray(labels).astype(jnp.promote_types(jnp.result_type(labels), jnp.int32))
    onehot = jax.nn.one_hot(labels, shape[-1], dtype=wide.dtype)
    scores = (wide - offset * onehot) / temperature
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(scores, labels)
    # JAX would count the label -1 from the end.
    return jnp.where(jnp.any(onehot > 0, axis=-1), losses, jnp.nan)
