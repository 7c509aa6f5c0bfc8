"""Alternating projection: the matrix sign of the tangent part, again and again (Cesista, 2025)."""

import dataclasses

import chex
import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon.linalg import (
    Schedule,
    inverse_sqrt,
    mT,
    polar_express,
    power_iteration,
    prescale,
    skew,
    sym,
)
from manifoldmuon.manifolds._manifold import Steepest
from manifoldmuon.manifolds.solvers._certificate import (
    inner_product,
    relative_gap,
    tangent_residual,
)
from manifoldmuon.manifolds.solvers._solver import StiefelSolver

# The Gram matrix is never formed anew, so its rounding errors, 1e-7 of its largest entry, must not
# be magnified to order 1: singular values below 6e-3 of the largest are left short.
COARSE_SCHEDULE = polar_express(6e-3, safety=1.0001, cushion=0.05, steps=5)


@dataclasses.dataclass(frozen=True)
class AlternatingProjection(StiefelSolver):
    """`A <- msign(A - W sym(W^T A))` from `A = G`, with a last tangent projection.

    One step is the cheap preset: two tall products more than an unconstrained direction. It is
    exact for square points and near-optimal for well-conditioned gradients; more steps make it
    more nearly tangent before the last projection, not more nearly optimal.

    Attributes:
      steps: how often to project and take the sign.
      schedule: drives the inverse root of the Gram matrix.
    """

    steps: int = 1
    schedule: Schedule = COARSE_SCHEDULE

    def init_dual(self, shape: tuple[int, ...]) -> chex.ArrayTree:
        del shape
        return ()

    def solve(
        self,
        point: Float[Array, "*batch m n"],
        grad: Float[Array, "*batch m n"],
        dual: chex.ArrayTree,
    ) -> Steepest:
        grad, _ = prescale(grad, ndim=2)
        inner = mT(point) @ grad
        outer = sym(mT(grad) @ grad - mT(inner) @ inner)
        # A = W along + (G - W inner) across: its Gram matrix needs no further tall product.
        along, across = skew(inner), jnp.eye(point.shape[-1], dtype=grad.dtype)
        gram = mT(along) @ along + outer
        root = inverse_sqrt(gram, self.schedule)
        upper = _trace_bound(gram, root)
        for _ in range(self.steps - 1):
            along, across = skew(along @ root), across @ root
            gram = mT(along) @ along + mT(across) @ outer @ across
            root = inverse_sqrt(gram, self.schedule)
        along, across = along @ root, across @ root
        residual, along = tangent_residual(along), skew(along)
        length = _length(mT(along) @ along + mT(across) @ (outer @ across))
        along, across = along / length, across / length
        value = inner_product(skew(inner), along) + inner_product(outer, across)
        direction = grad @ across + point @ (along - inner @ across)
        return Steepest(direction, dual, residual, relative_gap(upper, value))


def _trace_bound(
    gram: Float[Array, "*batch n n"], root: Float[Array, "*batch n n"]
) -> Float[Array, "*batch"]:
    """`nuclear_bound` of a matrix x that is known by its Gram matrix and the inverse root of it."""
    n = gram.shape[-1]
    slack = jnp.eye(n, dtype=gram.dtype) - root @ gram @ root
    # ||x slack||_F^2 = tr(slack x^T x slack); rounding may leave a small negative number.
    square = jnp.maximum(inner_product(slack, gram @ slack), 0)
    return inner_product(gram, root) + jnp.sqrt(n * square)


def _length(gram: Float[Array, "*batch n n"]) -> Float[Array, "*batch 1 1"]:
    """`max(1, ||A||_2)` from `A^T A`, by power iteration.

    Squaring the Gram matrix twice first makes each of the eight steps count for four: the answer
    falls short by a percent or so where many singular values lie near the largest.
    """
    size = jnp.trace(gram, axis1=-2, axis2=-1)[..., None, None]
    size = jnp.where(size == 0, 1, size)
    squared = (gram / size) @ (gram / size)
    largest, _ = power_iteration(squared @ squared, jnp.zeros(gram.shape[:-1], gram.dtype), 8)
    return jnp.maximum(1, jnp.sqrt(size * largest[..., None, None] ** 0.25))
