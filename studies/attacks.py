"""An attack in the Euclidean norm: no proof can certify more than what it leaves unbroken."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

SHARPNESS = 8.0  # an image's margin, in units of its scaled logits
BATCH = 250  # images per evaluation


@functools.partial(jax.jit, static_argnames="steps")
def pgd(
    logits: Callable[[Array], Array],
    x: ArrayLike,
    labels: ArrayLike,
    radius: ArrayLike,
    steps: int = 50,
) -> tuple[Float[Array, "n ..."], Bool[Array, " n"]]:
    """Attack by projected gradient ascent from each image (A. Madry et al., arXiv:1706.06083).

    The objective `logsumexp(other logits) - logit of the label` grows with the cross-entropy, and
    its gradient does not vanish for confident networks. Logits are divided by an eighth of the
    image's margin: the small logits of a 1-Lipschitz network would otherwise let all classes pull
    at once. Pixels are not clipped to a range, as certificates allow any.

    Args:
      logits: a `jax.tree_util.Partial`, from `(n, ...)` to `(n, classes)`.
      x: images `(n, ...)` in float32.
      labels: `(n,)`, the true classes.
      radius: the largest Euclidean length of a movement, a number or one for each image.
      steps: number of steps, each of length `2.5 radius / steps`.

    Returns:
      For each image the point of its ball where another label leads most, and whether its label is
      right at all tried points. A point with NaN counts as broken.
    """
    x, labels = jnp.asarray(x), jnp.asarray(labels)
    eps = jnp.finfo(x.dtype).eps

    def climb(case):
        image, label, radius = case

        def leads(point):
            z = logits(point[None])[0]
            return jnp.where(jnp.arange(z.size) == label, -jnp.inf, z - z[label])

        def height(point):
            others = leads(point)
            return jax.nn.logsumexp(others / unit), jnp.max(others)

        def step(_, carry):
            point, best, most, robust = carry
            uphill, lead = jax.grad(height, has_aux=True)(point)
            best = jnp.where(lead > most, point, best)
            move = point - image + 2.5 * reach / steps * uphill / _length(uphill)
            move = move * jnp.minimum(1, reach / _length(move))
            return image + move, best, jnp.fmax(lead, most), robust & (lead <= 0)

        margins = -leads(image)
        unit = jnp.maximum(jnp.min(margins) / SHARPNESS, 1e-3 * jnp.std(logits(image[None])))
        unit = jnp.where(unit > 0, unit, 1)
        # Shrink the ball by the rounding of points, and of lengths as sums of many squares.
        reach = (1 - eps * (16 + image.size**0.5)) * radius - eps * _length(image)
        reach = jnp.maximum(reach, 0).astype(x.dtype)
        carry = image, image, -jnp.inf, jnp.array(True)
        return jax.lax.fori_loop(0, steps + 1, step, carry)[1::2]

    radii = jnp.broadcast_to(radius, labels.shape)
    return jax.lax.map(climb, (x, labels, radii), batch_size=BATCH)


def _length(x: Array) -> Array:
    """Return the Euclidean length; 1 for zeros, so that they can be divided by it."""
    square = jnp.sum(x**2)
    return jnp.sqrt(jnp.where(square > 0, square, 1))
