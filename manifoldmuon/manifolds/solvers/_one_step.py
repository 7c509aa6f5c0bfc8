"""The one-step projection: the matrix sign of the gradient's tangent part, made tangent again."""

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
)
from manifoldmuon.manifolds._manifold import Steepest
from manifoldmuon.manifolds.solvers._certificate import (
    inner_product,
    is_noise,
    relative_gap,
    tangent_residual,
)
from manifoldmuon.manifolds.solvers._solver import MemorylessSolver

# The Gram matrix is never formed anew, so its rounding errors, 1e-7 of its largest entry, must not
# be magnified to order 1: singular values below 6e-3 of the largest are left short.
COARSE_SCHEDULE = polar_express(6e-3, safety=1.0001, cushion=0.05, steps=5)


@dataclasses.dataclass(frozen=True)
class OneStep(MemorylessSolver):
    """`msign(G - W sym(W^T G))`, projected and shortened to norm 1 where that is needed.

    The cheap preset: three tall products more than an unconstrained direction, everything else
    in `n x n`. It is exact for square points and where `Q^T G` is so well conditioned that the sign
    stays tangent; on ill-conditioned gradients it leaves several percent of the optimum.

    Attributes:
      schedule: drives the inverse root of the Gram matrix.
    """

    schedule: Schedule = COARSE_SCHEDULE

    def solve(
        self,
        point: Float[Array, "*batch m n"],
        grad: Float[Array, "*batch m n"],
        dual: chex.ArrayTree,
    ) -> Steepest:
        grad, _ = prescale(grad, ndim=2)
        inner = mT(point) @ grad
        # The tangent part is W along + outer. A Gram matrix of G minus one of W B would be cheaper
        # by a product, and nothing but rounding where the tangent part is a small part of G.
        along, outer = skew(inner), grad - point @ inner
        normal = mT(outer) @ outer
        gram = mT(along) @ along + normal
        still = is_noise(jnp.sqrt(jnp.trace(gram, axis1=-2, axis2=-1)), grad)[..., None, None]
        root = inverse_sqrt(jnp.where(still, jnp.eye(gram.shape[-1]), gram), self.schedule)
        root = jnp.where(still, 0, root)
        upper = _trace_bound(gram, root)
        turned = along @ root
        residual, turned = tangent_residual(turned), skew(turned)
        length = _length(mT(turned) @ turned + mT(root) @ (normal @ root))
        value = inner_product(along, turned / length) + inner_product(normal, root / length)
        direction = outer @ (root / length) + point @ (turned / length)
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
