"""The inverse root of a matrix close to the identity, by products alone."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon.linalg import (
    identity_like,
    product,
    solve_lyapunov,
    sym,
)

# On accelerators the Gram matrix of `W + V` takes float32: what rounding does to it is a distance
# from the set. The rest multiplies what is small, so its errors are: three passes of bfloat16 for
# what grows with the step, one for what is below 0.025 always.
IN_THREE_PASSES = jax.lax.Precision.HIGH
_in_three_passes = functools.partial(product, precision=IN_THREE_PASSES)
_in_one_pass = functools.partial(product, precision=jax.lax.Precision.DEFAULT)


def row_sum(x: Float[Array, "*batch n n"]) -> Float[Array, "*batch 1 1"]:
    """The largest absolute row sum: an upper bound on the spectral norm."""
    return jnp.max(jnp.sum(jnp.abs(x), axis=-1), axis=-1, initial=0)[..., None, None]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def inverse_sqrt_minus_one(
    excess: Float[Array, "*batch n n"], max_iterations: int
) -> Float[Array, "*batch n n"]:
    """`(I + E)^{-1/2} - I` for a symmetric `E`, with an error relative to its own size.

    The quintic Newton-Schulz step multiplies `S = I + E` on both sides by the Taylor polynomial
    `p = I - E/2 + 3/8 E^2` of its inverse root and collects the product of the `p`. Carrying
    `E`, `p - I` and `D = root - I` in place of `S`, `p` and the root keeps the identity out of
    the rounding errors: near it the result is three times as accurate.
    """
    # The series leave 5/16 E^3 and 63/256 E^5: 8e-9 and 3e-9, or 2e-17 in float64.
    near, close = (3e-3, 0.025) if excess.dtype == jnp.float32 else (4e-6, 6e-4)
    square = _in_one_pass(excess, excess)
    # A bound of the norm of E: tighter than the row sums of E itself by half or more.
    size = jnp.sqrt(row_sum(square))

    def quadratic(excess, square):
        return 0.375 * square - 0.5 * excess

    def quartic(excess, square):
        rest = _in_one_pass(square, 35 / 128 * square - 5 / 16 * excess)
        return quadratic(excess, square) + rest

    def unfinished(carry):
        count, excess, _ = carry
        # A NaN compares false and ends the loop for its own matrix, not for the others.
        return (count < max_iterations) & jnp.any(row_sum(excess) > close)

    def step(carry):
        count, excess, root = carry
        p = 0.375 * _in_three_passes(excess, excess) - 0.5 * excess
        root = root + p + _in_three_passes(root, p)
        square = 2 * p + _in_three_passes(p, p)
        excess = excess + square + _in_three_passes(excess, square)
        return count + 1, sym(excess), root

    def iterated(excess, _):
        start = (jnp.zeros((), jnp.int32), excess, jnp.zeros_like(excess))
        _, excess, root = jax.lax.while_loop(unfinished, step, start)
        last = quartic(excess, _in_one_pass(excess, excess))
        return root + last + _in_one_pass(root, last)

    # Steps of training end in the first two: one product or two.
    terms = (~jnp.all(size <= near)).astype(jnp.int32) + ~jnp.all(size <= close)
    return jax.lax.switch(terms, [quadratic, quartic, iterated], excess, square)


@inverse_sqrt_minus_one.defjvp
def _inverse_sqrt_minus_one_jvp(max_iterations, primals, tangents):
    """`H R' + R' H = -R E' R` with `H = R^-1`: the derivative of `R S R = I`."""
    (excess,), (tangent,) = primals, tangents
    found = inverse_sqrt_minus_one(excess, max_iterations)
    identity = identity_like(excess)
    inverse_root = identity + found
    root = sym(product(identity + excess, inverse_root))
    turned = product(inverse_root, product(sym(tangent), inverse_root))
    return found, solve_lyapunov(root, -turned)
