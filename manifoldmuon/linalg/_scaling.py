"""Powers of two that bring an array to magnitude one, so that no square over- or underflows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from manifoldmuon.linalg._matrix import upcast

_LIFT = 100  # binary places by which a float32 block of tiny entries is raised beforehand
_TINY = -50  # ... tiny being below 2**_TINY


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def prescale(x: Float[Array, "..."], ndim: int) -> tuple[Float[Array, "..."], Int[Array, "..."]]:
    """Divides each block by the power of two nearest below its largest magnitude.

    Multiplying by a power of two is exact, so a function that is invariant to positive scale
    gives the same bits for `x` and for `2**k * x`. Denormal entries are read exactly, also on
    backends that flush them to zero.

    Args:
      x: blocks in the trailing `ndim` axes; leading axes are independent.
      ndim: how many trailing axes make one block.

    Returns:
      `(scaled, exponent)` with `x == scaled * 2**exponent`: `scaled` in float32 or wider, its
      largest magnitude in [1, 2); `exponent` with the leading axes' shape. A zero block stays
      zero; a block that holds a NaN or an infinity becomes NaN throughout, exponent 0.
      Differentiable, as multiplication by a constant.

    Raises:
      ValueError: `x` has fewer than `ndim` axes.
    """
    axes = _trailing(x, ndim)
    y = upcast(x)
    lifted = jnp.zeros(x.shape[: x.ndim - ndim], jnp.int32)
    if y.dtype == jnp.float32:
        y, lifted = _lift(y, axes)
    top = jnp.max(jnp.abs(y), axis=axes, initial=0.0)
    finite = jnp.isfinite(top)
    exponent = jnp.where(finite & (top > 0), jnp.frexp(top)[1] - 1, 0)
    visible = jnp.where(finite, jnp.ones((), y.dtype), jnp.nan)
    scaled = times_power_of_two(y, -exponent, ndim) * jnp.expand_dims(visible, axes)
    return scaled, exponent - lifted


@prescale.defjvp
def _prescale_jvp(ndim, primals, tangents):
    scaled, exponent = prescale(primals[0], ndim)
    tangent = times_power_of_two(upcast(tangents[0]), -exponent, ndim)
    return (scaled, exponent), (tangent, np.zeros(exponent.shape, jax.dtypes.float0))


def times_power_of_two(
    x: Float[Array, "..."], exponent: Int[Array, "..."], ndim: int = 0
) -> Float[Array, "..."]:
    """`x * 2**exponent`, with one exponent for each block of `ndim` trailing axes."""
    half = exponent // 2  # 2**exponent itself may not be representable
    for part in (half, exponent - half):
        x = x * jnp.expand_dims(jnp.ldexp(jnp.ones((), x.dtype), part), tuple(range(-ndim, 0)))
    return x


def _trailing(x: Float[Array, "..."], ndim: int) -> tuple[int, ...]:
    if x.ndim < ndim:
        raise ValueError(
            f"expected an array of at least {ndim} axes, got shape {tuple(x.shape)}; "
            f"the trailing {ndim} axes are one block"
        )
    return tuple(range(-ndim, 0))


def _lift(x: Float[Array, "..."], axes) -> tuple[Float[Array, "..."], Int[Array, "..."]]:
    """Multiplies float32 blocks whose entries are all tiny by `2**_LIFT`, denormals included.

    XLA may flush denormal operands to zero in arithmetic and in comparisons, so they are read
    as the integers that they are: the bits of a denormal count units of 2**-149.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    magnitude = bits & 0x7FFFFFFF
    most = jnp.max(magnitude, axis=axes, initial=0)
    tiny = (most > 0) & (most < (127 + _TINY) << 23)
    units = jnp.where(bits < 0, -magnitude, magnitude).astype(x.dtype)
    raised = jnp.where(magnitude < 1 << 23, units * 2.0 ** (_LIFT - 149), x * 2.0**_LIFT)
    return jnp.where(jnp.expand_dims(tiny, axes), raised, x), jnp.where(tiny, _LIFT, 0)
