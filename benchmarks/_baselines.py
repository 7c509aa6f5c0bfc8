"""Baseline iterations for the steepest direction on the Stiefel manifold.

The dual of "steepest tangent direction" is to minimise `||G + 2 W L||_*` over symmetric L. With
`H = G - W sym(W^T G)` it is `min ||H + W T||_*` over symmetric T. All iterations run in the basis
of `qr([W G])`, where matrices have at most `2n` rows. T is in units of the root mean square
singular value of H, which makes iterations independent of the gradient's scale.
"""

import abc
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon.linalg import msign
from manifoldmuon.manifolds.solvers import Steepest, StiefelSolver
from manifoldmuon.norms import Norm


def sym(x: Float[Array, "n n"]) -> Float[Array, "n n"]:
    return (x + x.T) / 2


class Problem(NamedTuple):
    """The basis, and W and H in this basis; H is scaled to root mean square singular value 1."""

    basis: Float[Array, "m k"]
    point: Float[Array, "k n"]
    tangent: Float[Array, "k n"]


class Baseline(StiefelSolver):
    """A solver for a single tall problem, `_solve`; stacks are solved sequentially."""

    def init(self, shape: tuple[int, ...], axes: int = 2) -> Any:
        """Return a cold start."""
        n = min(shape[-2:])
        return jnp.zeros((*shape[:-2], n, n), jnp.float32)

    def solve(
        self,
        norm: Norm,
        at: Float[Array, "*batch m n"],
        grad: Float[Array, "*batch m n"],
        dual: Any,
    ) -> Steepest:
        if at.shape[-2] < at.shape[-1]:
            answer = self.solve(norm, at.mT, grad.mT, dual)
            return answer._replace(direction=answer.direction.mT)
        if at.ndim > 2:
            return jax.lax.map(lambda given: self.solve(norm, *given), (at, grad, dual))
        n, size = at.shape[-1], jnp.max(jnp.abs(grad))
        grad = grad / jnp.where(size == 0, 1, size)
        basis, factor = jnp.linalg.qr(jnp.concatenate([at, grad], axis=1))
        point, grad = factor[:, :n], factor[:, n:]
        tangent = grad - point @ sym(point.T @ grad)
        unit = jnp.sqrt(jnp.sum(tangent**2) / n)
        problem = Problem(basis, point, tangent / jnp.where(unit == 0, 1, unit))
        raw, shift, dual = self._solve(problem, dual)
        normal = sym(point.T @ raw)
        direction = raw - point @ normal
        direction = direction / jnp.maximum(jnp.linalg.norm(direction, 2), 1)
        upper = jnp.sum(singular_values(problem.tangent + point @ shift))
        value = jnp.sum(problem.tangent * direction)
        noise = 4 * n * jnp.finfo(grad.dtype).eps  # relative error of the singular values
        gap = 1 - value / jnp.where(upper == 0, 1, upper) + noise
        residual = 2 * jnp.linalg.norm(normal) / n
        return Steepest(basis @ direction, dual, residual, jnp.where(upper == 0, 0, gap))

    @abc.abstractmethod
    def _solve(self, problem: Problem, dual: Any) -> tuple[Any, Any, Any]:
        """Return a nearly tangent direction, a T with a low dual value, and the warm start."""


def singular_values(x: Float[Array, "k n"]) -> Float[Array, " n"]:
    return jnp.linalg.svd(x, compute_uv=False)


@dataclasses.dataclass(frozen=True)
class FixedPoint(Baseline):
    """Solve for the T that makes `(H + W T) P` tangent, with `P` from the last T.

    With `Z = H + W T`, `P = (Z^T Z + e^2)^(-1/2)` majorises the nuclear norm; the solution of
    `T P + P T = P O - O P` with `O = W^T H` minimises the majoriser, and is computed in the
    eigenbasis of P. The smoothing e falls to its floor.

    Attributes:
      steps: the number of steps.
      smoothing: the initial e of a cold start, relative to the largest singular value of Z; a warm
        start begins at the floor.
      floor: the final e.
      relaxation: the factor that lengthens each step, because the majoriser is steeper than the
        nuclear norm.
    """

    steps: int = 20
    smoothing: float = 0.1
    floor: float = 1e-3
    relaxation: float = 1.7

    def _solve(self, problem: Problem, dual: Float[Array, "n n"]):
        _, point, tangent = problem
        along = point.T @ tangent
        first = jnp.where(jnp.all(dual == 0), self.smoothing, self.floor)

        def reweight(k, shift):
            z = tangent + point @ shift
            values, basis = jnp.linalg.eigh(z.T @ z)
            smoothing = jnp.maximum(first * 0.6**k, self.floor)
            floor = jnp.where(values[-1] == 0, 1, smoothing**2 * values[-1])
            roots = jnp.sqrt(jnp.maximum(values, 0) + floor)
            turned = basis.T @ along @ basis
            turned = turned * (roots - roots[:, None]) / (roots + roots[:, None])
            return sym(basis @ turned @ basis.T), (basis / roots) @ basis.T

        def step(k, shift):
            return shift + self.relaxation * (reweight(k, shift)[0] - shift)

        shift = jax.lax.fori_loop(0, self.steps, step, dual)
        target, inverse_root = reweight(self.steps, shift)
        return (tangent + point @ target) @ inverse_root, target, target


class Splitting(NamedTuple):
    """The warm start of `ADMM`: T and the direction."""

    shift: Float[Array, "*batch n n"]
    direction: Float[Array, "*batch m n"]


@dataclasses.dataclass(frozen=True)
class ADMM(Baseline):
    """Split `Z = H + W T` from T: a thresholding step, a projection step, a multiplier.

    The multiplier divided by the threshold is a direction of norm at most 1 at every iteration.

    Attributes:
      steps: the number of steps.
      threshold: the initial soft threshold.
      relaxation: over-relaxation, between 1 and 2 (Boyd et al. 2011, section 3.4.3).
      balance: the largest ratio of the two residuals before the threshold is adapted.
    """

    steps: int = 30
    threshold: float = 1.5
    relaxation: float = 1.6
    balance: float = 3.0

    def init(self, shape: tuple[int, ...], axes: int = 2) -> Splitting:
        tall = (*shape[:-2], max(shape[-2:]), min(shape[-2:]))
        return Splitting(super().init(shape), jnp.zeros(tall, jnp.float32))

    def _solve(self, problem: Problem, dual: Splitting):
        basis, point, tangent = problem

        def step(k, state):
            shift, copy, direction, threshold = state
            target = tangent + point @ shift
            relaxed = self.relaxation * target + (1 - self.relaxation) * copy
            pushed = relaxed + threshold * direction
            left, values, right = jnp.linalg.svd(pushed, full_matrices=False)
            clipped = (left * jnp.minimum(values, threshold)) @ right
            after = pushed - clipped
            shift = sym(point.T @ (after - clipped - tangent))
            primal = jnp.linalg.norm(tangent + point @ shift - after)
            moved = jnp.linalg.norm(after - copy)
            smaller, larger = primal > self.balance * moved, moved > self.balance * primal
            factor = jnp.where(smaller, 0.5, jnp.where(larger, 2.0, 1.0))
            # Stop balancing after half of the steps, or it can cycle with the iteration.
            factor = jnp.where(k < self.steps // 2, factor, 1.0)
            return shift, after, clipped / threshold, threshold * factor

        start = tangent + point @ dual.shift
        threshold = jnp.asarray(self.threshold, start.dtype)
        state = (dual.shift, start, basis.T @ dual.direction, threshold)
        shift, _, direction, _ = jax.lax.fori_loop(0, self.steps, step, state)
        return direction, shift, Splitting(shift, basis @ direction)


@dataclasses.dataclass(frozen=True)
class AlternatingProjection(Baseline):
    """`A <- msign(A - W sym(W^T A))` from `A = G`.

    It converges to a tangent direction with orthonormal columns, usually not the steepest: it comes
    close for well-conditioned gradients; for others, more steps drift away.

    Attributes:
      steps: the number of steps.
    """

    steps: int = 10

    def init(self, shape: tuple[int, ...], axes: int = 2) -> tuple[()]:
        return ()

    def _solve(self, problem: Problem, dual: tuple[()]):
        _, point, tangent = problem

        def project(_, direction):
            return msign(direction - point @ sym(point.T @ direction))

        direction = jax.lax.fori_loop(1, self.steps, project, msign(tangent))
        return direction, jnp.zeros((point.shape[-1],) * 2, point.dtype), dual
