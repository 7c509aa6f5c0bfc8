"""Powers of two that bring a weight to magnitude one, so that no square over- or underflows."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_LIFT = 100  # binary places by which a float32 array of tiny entries is raised beforehand


def upcast(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """`x` in float32, or in its own dtype where that is wider."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def trailing(x: Float[Array, "..."], ndim: int) -> tuple[int, ...]:
    """The trailing `ndim` axes of `x`, as negative numbers.

    Raises:
      ValueError: `x` has fewer than `ndim` axes.
    """
    if x.ndim < ndim:
        raise ValueError(
            f"an array of shape {tuple(x.shape)} has {x.ndim} axes, but one weight of this norm "
            f"takes the trailing {ndim}; choose a norm or manifold made for {x.ndim} axes"
        )
    return tuple(range(-ndim, 0))


def prescale(x: Float[Array, "..."], ndim: int) -> tuple[Float[Array, "..."], Int[Array, "..."]]:
    """Divides each weight by the power of two nearest below its largest magnitude.

    Multiplying by a power of two is exact, so the result of a function that is invariant to
    positive scale does not change by one bit between `x` and `2**k * x`.

    Args:
      x: weights in the trailing `ndim` axes; leading axes are independent copies.
      ndim: how many trailing axes make one weight.

    Returns:
      `(y, exponent)` with `x == y * 2**exponent`: `y` in float32 or wider, its largest
      magnitude in [1, 2) (a zero weight stays zero, a NaN or an infinity stays itself), and
      `exponent` with the leading axes' shape.
    """
    axes = trailing(x, ndim)
    y = upcast(x)
    lifted = jnp.zeros(x.shape[: x.ndim - ndim], jnp.int32)
    if y.dtype == jnp.float32:
        y, lifted = _lift(y, axes)
    top = jnp.max(jnp.abs(y), axis=axes, initial=0.0)
    exponent = jnp.where(jnp.isfinite(top) & (top > 0), jnp.frexp(top)[1] - 1, 0)
    return times_power_of_two(y, -exponent, ndim), exponent - lifted


def times_power_of_two(
    x: Float[Array, "..."], exponent: Int[Array, "..."], ndim: int = 0
) -> Float[Array, "..."]:
    """`x * 2**exponent`, one exponent per weight of `ndim` trailing axes."""
    half = exponent // 2  # 2**exponent itself may not be representable
    for part in (half, exponent - half):
        x = x * jnp.expand_dims(jnp.ldexp(jnp.ones((), x.dtype), part), tuple(range(-ndim, 0)))
    return x


def _lift(x: Float[Array, "..."], axes) -> tuple[Float[Array, "..."], Int[Array, "..."]]:
    """Multiplies float32 weights whose entries are all tiny by `2**_LIFT`, denormals included.

    XLA flushes denormal operands to zero in arithmetic and comparisons on some backends, so
    they are read as the integers that they are: the bits of a denormal count units of 2**-149.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    magnitude = bits & 0x7FFFFFFF
    tiny = jnp.max(magnitude, axis=axes, initial=0) < (127 - 50) << 23  # below 2**-50
    units = jnp.where(bits < 0, -magnitude, magnitude).astype(x.dtype)
    raised = jnp.where(magnitude < 1 << 23, units * 2.0 ** (_LIFT - 149), x * 2.0**_LIFT)
    y = jnp.where(jnp.expand_dims(tiny, axes), raised, x)
    return y, jnp.where(tiny, _LIFT, 0)
