"""The fixed-point iteration: iteratively reweighted least squares on the dual (Su, 2025)."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon.linalg import mT, prescale, skew, sym
from manifoldmuon.manifolds._manifold import Steepest
from manifoldmuon.manifolds.solvers._certificate import frobenius
from manifoldmuon.manifolds.solvers._iterate import iterate
from manifoldmuon.manifolds.solvers._split import split
from manifoldmuon.manifolds.solvers._stacked import (
    DualSolver,
    finish,
    nuclear_norm,
    scale_of,
    stack,
)


@dataclasses.dataclass(frozen=True)
class FixedPoint(DualSolver):
    """Solves for the `T` that makes `[T + Omega; R] P` tangent, with `P` from the last `T`.

    `P = (Z^T Z + e^2)^(-1/2)` majorises the nuclear norm, `T P + P T = P Omega - Omega P` minimises
    the majoriser, in the eigenbasis of `P`. The smoothing `e` falls geometrically to its floor;
    each step is stretched by `relaxation`, for the majoriser is steeper than what it bounds.

    Attributes:
      steps: the iteration budget.
      tolerance: on concrete arrays, stop once a step moves `T` by less than this, relative to the
        gradient's root mean square singular value.
      smoothing: the first `e` of a cold start, relative to the largest singular value of `Z`;
        a warm start begins at the floor.
      floor: the last `e`. It bounds what the answer can reach, and float32 bounds it: the
        eigenvalues of `Z^T Z` carry an error of 1e-7 of the largest.
      relaxation: 1 is the plain iteration, which decreases the dual monotonically; below 2.
    """

    steps: int = 20
    tolerance: float = 1e-6
    smoothing: float = 0.1
    floor: float = 1e-3
    relaxation: float = 1.7

    def solve(
        self,
        point: Float[Array, "*batch m n"],
        grad: Float[Array, "*batch m n"],
        dual: Float[Array, "*batch n n"],
    ) -> Steepest:
        parts = split(point, prescale(grad, ndim=2)[0])
        scale = scale_of(parts)
        omega = skew(parts.inner) / scale
        n = max(point.shape[-1], 1)
        # A dual variable that comes from a nearby problem would be lost in a large smoothing.
        cold = jnp.all(dual == 0, axis=(-2, -1))[..., None]
        first = jnp.where(cold, self.smoothing, self.floor)

        def reweight(k, shift):
            stacked = stack(parts, shift, scale)
            values, basis = jnp.linalg.eigh(sym(mT(stacked) @ stacked))
            smoothing = jnp.maximum(first * 0.6**k, self.floor)
            floor = smoothing**2 * values[..., -1:]
            roots = jnp.sqrt(jnp.maximum(values, 0) + jnp.where(floor == 0, 1, floor))[..., None]
            turned = mT(basis) @ omega @ basis
            # With p = 1/roots: (p_i - p_j) omega_ij / (p_i + p_j), free of the division by p.
            turned = turned * (mT(roots) - roots) / (mT(roots) + roots)
            target = basis @ turned @ mT(basis)
            return sym(target), basis, roots

        def step(k, shift):
            target, _, _ = reweight(k, shift)
            move = self.relaxation * (target - shift)
            return shift + move, frobenius(move) / n

        shift = iterate(step, dual, self.steps, self.tolerance)
        target, basis, roots = reweight(self.steps, shift)
        candidate = stack(parts, target, scale) @ (basis / mT(roots)) @ mT(basis)
        upper = jnp.minimum(
            nuclear_norm(stack(parts, shift, scale)), nuclear_norm(stack(parts, target, scale))
        )
        return finish(parts, candidate, upper * jnp.squeeze(scale, (-2, -1)), target)
