"""Odd polynomials of a matrix, taken on its Gram matrix: what the iterations share."""

import itertools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon.linalg._matrix import mT, product, sym


def odd_factor(
    gram: Float[Array, "*batch n n"], coefficients, multiply=product
) -> Float[Array, "*batch n n"]:
    """`p(S) = a I + b S + c S^2 + d S^3`, by at most two products.

    Args:
      gram: S, symmetric.
      coefficients: two to four numbers, or traced scalars of the dtype of S.
      multiply: how two matrices are multiplied.
    """
    a, b, *higher = coefficients
    eye = jnp.eye(gram.shape[-1], dtype=gram.dtype)
    low = a * eye + b * gram
    if not higher:
        return low
    square = multiply(gram, gram)
    if len(higher) == 1:
        return low + higher[0] * square
    return low + multiply(square, higher[0] * eye + higher[1] * gram)


def coupled_factor(
    gram: Float[Array, "*batch n n"], steps, multiply=product
) -> Float[Array, "*batch n n"]:
    """The product Q of the factors of all steps: `S <- p(S) S p(S)`, `Q <- Q p(S)`.

    `X Q` is what the odd polynomials make of X with `X^T X = S`, and Q tends to `S^(-1/2)`.

    Args:
      gram: S, symmetric, its eigenvalues in [0, 1].
      steps: the coefficients of each step, at least one.
      multiply: how two matrices are multiplied.
    """

    def advance(carry, coefficients):
        s, step, factor = carry
        s = sym(multiply(multiply(step, s), step))
        step = odd_factor(s, coefficients, multiply)
        return s, step, multiply(factor, step)

    first = odd_factor(gram, steps[0], multiply)
    return scan_runs(advance, (gram, first, first), steps[1:], gram.dtype)[2]


def scan_runs(body, carry, items, dtype):
    """`for item in items: carry = body(carry, item)`, compiling alike neighbours only once.

    Args:
      body: maps `(carry, item)` to a carry of the same shapes.
      carry: the start.
      items: nested tuples of numbers; neighbours of the same structure share a `lax.scan`,
        which costs a third of the compile time and nothing at run time.
      dtype: of the numbers inside the scan.
    """
    for _, neighbours in itertools.groupby(items, key=jax.tree.structure):
        run = tuple(neighbours)
        if len(run) == 1:
            carry = body(carry, run[0])
        else:
            stacked = jax.tree.map(lambda *numbers: jnp.array(numbers, dtype), *run)
            carry, _ = jax.lax.scan(lambda c, item: (body(c, item), None), carry, stacked)
    return carry


def polish(x: Float[Array, "*batch m n"]) -> Float[Array, "*batch m n"]:
    """One classical Newton-Schulz step: removes the rounding errors of a nearly orthogonal x."""
    return product(x, odd_factor(product(mT(x), x), (1.5, -0.5)))


def schatten_bound(power: Float[Array, "*batch n n"], exponent: int) -> Float[Array, "*batch 1 1"]:
    """`||S^k||_F^(1/k)` for `power = S^k`: an upper bound of `||S||_2` for k a power of two."""
    bound = jnp.sqrt(jnp.sum(power**2, axis=(-2, -1), keepdims=True))
    for _ in range(exponent.bit_length() - 1):
        bound = jnp.sqrt(bound)
    return bound


def one_for_zero(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """x, with 1 in place of 0: a divisor."""
    return jnp.where(x == 0, 1, x)
