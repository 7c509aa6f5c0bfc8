"""What the dual solvers share: the problem of a tall gradient in n x n matrices, and its answer.

The dual of "steepest tangent direction" is to minimise `||[T + Omega; R]||_*` over symmetric `T`,
where `Omega` is the skew part of `W^T G`, `R` the part normal to `W` (see `split`), and
`T = sym(W^T G) + 2 Lambda`. `T = 0` is optimal for square points and the cold start for the others.
A candidate direction is a `2n x n` matrix in the basis `[W, Q]`. The dual variable that a solver
hands on is `T / scale_of(parts)`: the same for G and c*G.
"""

import chex
import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon.linalg import skew
from manifoldmuon.manifolds._manifold import Steepest
from manifoldmuon.manifolds.solvers._certificate import (
    inner_product,
    relative_gap,
    tangent_residual,
)
from manifoldmuon.manifolds.solvers._solver import StiefelSolver
from manifoldmuon.manifolds.solvers._split import Split


def scale_of(parts: Split) -> Float[Array, "*batch 1 1"]:
    """The root mean square singular value of the tangent part of `G`; 1 where that is zero."""
    square = jnp.sum(skew(parts.inner) ** 2, axis=(-2, -1), keepdims=True)
    square += jnp.sum(parts.normal**2, axis=(-2, -1), keepdims=True)
    scale = jnp.sqrt(square / max(parts.inner.shape[-1], 1))
    return jnp.where(scale == 0, 1, scale)


def stack(
    parts: Split, shift: Float[Array, "*batch n n"], scale: Float[Array, "*batch 1 1"] | float = 1.0
) -> Float[Array, "*batch rows n"]:
    """`[T + Omega; R] / scale`, where `T = scale * shift`."""
    return jnp.concatenate([shift + skew(parts.inner) / scale, parts.normal / scale], axis=-2)


class DualSolver(StiefelSolver):
    """A solver whose dual variable is one `n x n` symmetric matrix per point."""

    def init_dual(self, shape: tuple[int, ...]) -> Float[Array, "*batch n n"]:
        return jnp.zeros((*shape[:-2], shape[-1], shape[-1]), jnp.float32)


def halves(x: Float[Array, "*batch rows n"]):
    """The part along `W` and the part normal to it."""
    n = x.shape[-1]
    return x[..., :n, :], x[..., n:, :]


def finish(
    parts: Split,
    candidate: Float[Array, "*batch rows n"],
    upper: Float[Array, "*batch"],
    dual: chex.ArrayTree,
) -> Steepest:
    """Makes a candidate feasible and certifies it.

    Args:
      parts: the problem.
      candidate: a direction in the basis `[W, Q]`, nearly tangent, of norm about 1.
      upper: an upper bound on the optimum, without the part that the split leaves out.
      dual: passed on for the next problem.
    """
    inner, normal = halves(candidate)
    feasible = jnp.concatenate([skew(inner), normal], axis=-2)
    length = jnp.linalg.norm(feasible, ord=2, axis=(-2, -1), keepdims=True)
    feasible = feasible / jnp.maximum(length, 1)
    value = inner_product(stack(parts, jnp.zeros_like(inner)), feasible)
    gap = relative_gap(upper + parts.defect, value)
    return Steepest(parts.assemble(*halves(feasible)), dual, tangent_residual(inner), gap)


def nuclear_norm(x: Float[Array, "*batch m n"]) -> Float[Array, "*batch"]:
    """The sum of the singular values."""
    return jnp.sum(jnp.linalg.svd(x, compute_uv=False), axis=-1)
