"""Odd polynomials of a matrix, evaluated on its Gram matrix: common parts of the iterations."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp

from manifoldmuon._internal.matrices import arrays
from manifoldmuon._internal.matrices.arrays import Squares


def factor_products(terms: int) -> int:
    """Return how many products `odd_factor` takes for this many coefficients, once S is formed."""
    block, count = _block_lengths(terms)
    return block - 1 + count - 1


def odd_factor(
    gram: Squares, coefficients, multiply=arrays.product, square: Squares | None = None
) -> Squares:
    """Return `p(S) = a I + b S + c S^2 + ...` in few products (Paterson and Stockmeyer 1973).

    Give two coefficients or more, as numbers or traced scalars of the dtype of S, and `square`,
    `S^2`, if it is known.
    """
    block, count = _block_lengths(len(coefficients))
    powers = [arrays.identity_like(gram), gram]
    for k in range(2, block + 1):
        powers.append(square if k == 2 and square is not None else multiply(powers[-1], gram))
    # The last block has an extra term, S^block itself, which is available anyway.
    pieces = [coefficients[i * block : (i + 1) * block] for i in range(count - 1)]
    pieces.append(coefficients[(count - 1) * block :])
    terms = [[c * s for c, s in zip(piece, powers, strict=False)] for piece in pieces]
    sums = [functools.reduce(jnp.add, each) for each in terms]
    result = sums[-1]
    for piece in reversed(sums[:-1]):
        result = piece + multiply(powers[block], result)
    return result


def _block_lengths(terms: int) -> tuple[int, int]:
    """Return length and number of blocks for the fewest products; long blocks reuse `square`."""
    sizes = [(block, max(1, -(-(terms - 1) // block))) for block in range(1, terms)]
    return min(sizes, key=lambda size: (sum(size), -size[0]))


def coupled_factor(
    gram: Squares, steps, multiply=arrays.product, square: Squares | None = None
) -> Squares:
    """Return the product Q of the factors of all steps: `S <- p(S) S p(S)`, `Q <- Q p(S)`.

    For X with `X^T X = S`, `X Q` is the result of the odd polynomials. Q tends to `S^(-1/2)`. The
    eigenvalues of S are in [0, 1]; for `square` see `odd_factor`.
    """

    def advance(carry, coefficients):
        s, step, factor = carry
        s = arrays.sym(multiply(multiply(step, s), step))
        step = odd_factor(s, coefficients, multiply)
        return s, step, multiply(factor, step)

    first = odd_factor(gram, steps[0], multiply, square)
    return scan_runs(advance, (gram, first, first), steps[1:], gram.dtype)[2]


def scan_runs(body, carry, items, dtype):
    """Run `for item in items: carry = body(carry, item)`; compile similar neighbours only once.

    Items are nested tuples of numbers, in the scan of this dtype. Neighbours of the same structure
    share a `lax.scan`, which takes a third of the compile time and costs nothing at run time.
    """
    for _, neighbours in itertools.groupby(items, key=jax.tree.structure):
        run = tuple(neighbours)
        if len(run) == 1:
            carry = body(carry, run[0])
        else:
            stacked = jax.tree.map(lambda *numbers: jnp.array(numbers, dtype), *run)
            carry, _ = jax.lax.scan(lambda c, item: (body(c, item), None), carry, stacked)
    return carry
