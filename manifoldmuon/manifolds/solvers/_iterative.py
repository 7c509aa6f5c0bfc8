"""The iterations for the steepest direction on the Stiefel manifold that others have published.

The dual of "steepest tangent direction" is to minimise `||[T + Omega; R]||_*` over symmetric `T`,
where `Omega` is the skew part of `W^T G`, `R` the part normal to `W` (see `split`), and
`T = sym(W^T G) + 2 Lambda`. `T = 0` is optimal for square points and the cold start for the others.
A candidate direction is a `2n x n` matrix in the basis `[W, Q]`. The dual variable that a solver
hands on is `T / unit_of(parts)`: the same for G and c*G.

Each takes a fixed number of steps, unless a `tolerance` above 0 says when to stop.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon._internal.arguments import check_fields
from manifoldmuon._internal.arrays import (
    frobenius_norm,
    inner_product,
    mT,
    nonzero_or_one,
    skew,
    sym,
)
from manifoldmuon._internal.lapack import map_matrices
from manifoldmuon._internal.mesh import match_varying_axes
from manifoldmuon._internal.powers_of_two import scale_to_unit_exponent
from manifoldmuon.linalg import DEFAULT_MSIGN, MsignMethod, check_method, msign, nuclear_norm
from manifoldmuon.manifolds.solvers._solver import (
    MemorylessSolver,
    Steepest,
    StiefelSolver,
    certify,
    in_dtypes_of,
    is_noise,
    iterate,
    nuclear_bound,
    tangent_residual,
)
from manifoldmuon.manifolds.solvers._split import Split, split


def unit_of(parts: Split) -> Float[Array, "*batch 1 1"]:
    """The root mean square singular value of the tangent part of `G`; 1 where that is zero."""
    square = jnp.sum(skew(parts.inner) ** 2, axis=(-2, -1), keepdims=True)
    square += jnp.sum(parts.normal**2, axis=(-2, -1), keepdims=True)
    scale = jnp.sqrt(square / max(parts.inner.shape[-1], 1))
    return nonzero_or_one(scale)


def stack(
    parts: Split, shift: Float[Array, "*batch n n"], scale: Float[Array, "*batch 1 1"] | float = 1.0
) -> Float[Array, "*batch rows n"]:
    """`[T + Omega; R] / scale`, where `T = scale * shift`."""
    return jnp.concatenate([shift + skew(parts.inner) / scale, parts.normal / scale], axis=-2)


class _DualSolver(StiefelSolver):
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
    dual: Any,
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
    tangent = stack(parts, jnp.zeros_like(inner))
    # The sizes of both parts are the gradient's.
    grad = jnp.concatenate([parts.inner, parts.normal], axis=-2)
    still = is_noise(frobenius_norm(tangent), grad)[..., None, None]
    feasible = jnp.where(still, 0, feasible)
    gap = certify(upper + parts.defect, inner_product(tangent, feasible), grad)
    return Steepest(parts.assemble(*halves(feasible)), dual, tangent_residual(inner), gap)


@dataclasses.dataclass(frozen=True)
class DualAscent(_DualSolver):
    """Subgradient steps: `A = msign(G + 2 W L)`, `L <- L - step (1 - k/K) (W^T A + A^T W)`.

    The published step size is a number without units while `L` has those of the gradient, so the
    published loop depends on the gradient's scale: `relative=False` keeps it that way, for
    comparison. The default measures the step in the gradient's own scale.

    Attributes:
      step: the first step size; it falls linearly to zero. Published: 0.01, absolute.
      steps: the iteration budget `K`. Published: 100.
      tolerance: if above 0, stop once `||W^T A + A^T W||_F / n` is below it.
      relative: whether `step` is in units of the gradient's root mean square singular value.
      method: the polar factor; it acts on `2n x n` matrices.
    """

    step: float = 0.3
    steps: int = 100
    tolerance: float = 0.0
    relative: bool = True
    method: MsignMethod = DEFAULT_MSIGN

    def __post_init__(self):
        check_method("DualAscent.method", self.method)
        check_fields(self, step="(0, inf)", steps="[1, inf)", tolerance="[0, inf)")

    def solve(
        self,
        point: Float[Array, "*batch m n"],
        grad: Float[Array, "*batch m n"],
        dual: Float[Array, "*batch n n"],
    ) -> Steepest:
        point, grad, dual = match_varying_axes((point, grad, dual))
        # The published loop sees the gradient as it came: its scale is part of the algorithm.
        parts = split(point, scale_to_unit_exponent(grad, ndim=2)[0] if self.relative else grad)
        scale = unit_of(parts)
        step_size = self.step if self.relative else self.step / scale

        def ascend(k, shift):
            candidate = msign(stack(parts, shift, scale), self.method)
            residual = 2 * sym(halves(candidate)[0])
            # T = sym(W^T G) + 2 L moves by twice the step of L.
            shift = shift - 2 * step_size * (1 - k / self.steps) * residual
            return shift, frobenius_norm(residual) / max(point.shape[-1], 1)

        shift = iterate(ascend, dual.astype(grad.dtype), self.steps, self.tolerance)
        reduced = stack(parts, shift, scale)
        candidate = msign(reduced, self.method)
        upper = nuclear_bound(reduced, candidate) * jnp.squeeze(scale, (-2, -1))
        return finish(parts, candidate, upper, in_dtypes_of(dual, shift))


@dataclasses.dataclass(frozen=True)
class FixedPoint(_DualSolver):
    """Solves for the `T` that makes `[T + Omega; R] P` tangent, with `P` from the last `T`.

    `P = (Z^T Z + e^2)^(-1/2)` majorises the nuclear norm, `T P + P T = P Omega - Omega P` minimises
    the majoriser, in the eigenbasis of `P`. The smoothing `e` falls geometrically to its floor;
    each step is stretched by `relaxation`, for the majoriser is steeper than what it bounds.

    Attributes:
      steps: the iteration budget.
      tolerance: if above 0, stop once a step moves `T` by less than this, relative to the
        gradient's root mean square singular value.
      smoothing: the first `e` of a cold start, relative to the largest singular value of `Z`;
        a warm start begins at the floor.
      floor: the last `e`. It bounds what the answer can reach, and float32 bounds it: the
        eigenvalues of `Z^T Z` carry an error of 1e-7 of the largest.
      relaxation: 1 is the plain iteration, which decreases the dual monotonically; below 2.
    """

    steps: int = 20
    tolerance: float = 0.0
    smoothing: float = 0.1
    floor: float = 1e-3
    relaxation: float = 1.7

    def __post_init__(self):
        check_fields(self, steps="[1, inf)", tolerance="[0, inf)", relaxation="(0, 2)")
        check_fields(self, smoothing="(0, inf)", floor="(0, inf)")

    def solve(
        self,
        point: Float[Array, "*batch m n"],
        grad: Float[Array, "*batch m n"],
        dual: Float[Array, "*batch n n"],
    ) -> Steepest:
        point, grad, dual = match_varying_axes((point, grad, dual))
        parts = split(point, scale_to_unit_exponent(grad, ndim=2)[0])
        scale = unit_of(parts)
        omega = skew(parts.inner) / scale
        n = max(point.shape[-1], 1)
        # A dual variable that comes from a nearby problem would be lost in a large smoothing.
        cold = jnp.all(dual == 0, axis=(-2, -1))[..., None]
        first = jnp.where(cold, self.smoothing, self.floor)

        def reweight(k, shift):
            stacked = stack(parts, shift, scale)
            values, basis = map_matrices(jnp.linalg.eigh, sym(mT(stacked) @ stacked))
            smoothing = jnp.maximum(first * 0.6**k, self.floor)
            floor = smoothing**2 * values[..., -1:]
            roots = jnp.sqrt(jnp.maximum(values, 0) + nonzero_or_one(floor))[..., None]
            turned = mT(basis) @ omega @ basis
            # With p = 1/roots: (p_i - p_j) omega_ij / (p_i + p_j), free of the division by p.
            turned = turned * (mT(roots) - roots) / (mT(roots) + roots)
            target = basis @ turned @ mT(basis)
            return sym(target), basis, roots

        def step(k, shift):
            target, _, _ = reweight(k, shift)
            move = self.relaxation * (target - shift)
            return shift + move, frobenius_norm(move) / n

        shift = iterate(step, dual.astype(grad.dtype), self.steps, self.tolerance)
        target, basis, roots = reweight(self.steps, shift)
        candidate = stack(parts, target, scale) @ (basis / mT(roots)) @ mT(basis)
        upper = jnp.minimum(
            nuclear_norm(stack(parts, shift, scale)), nuclear_norm(stack(parts, target, scale))
        )
        upper = upper * jnp.squeeze(scale, (-2, -1))
        return finish(parts, candidate, upper, in_dtypes_of(dual, target))


class Dual(NamedTuple):
    """Return the warm start of the next problem: `T / scale`, and the direction in `[W, Q]`."""

    shift: Float[Array, "*batch n n"]
    direction: Float[Array, "*batch rows n"]


def _clip(x: Float[Array, "*batch m n"], bound: Float[Array, "*batch 1 1"]):
    """`x` with its singular values cut off at `bound`: what soft-thresholding removes."""
    values, basis = map_matrices(jnp.linalg.eigh, sym(mT(x) @ x))
    lengths = jnp.sqrt(jnp.maximum(values, 0))[..., None, :]
    factors = jnp.where(lengths > bound, bound / jnp.where(lengths > bound, lengths, 1), 1)
    return x @ (basis * factors) @ mT(basis)


@dataclasses.dataclass(frozen=True)
class ADMM(StiefelSolver):
    """Splits `Z = [T + Omega; R]` from `T`: a thresholding step, a projection step, a multiplier.

    The multiplier divided by the threshold is a direction of norm at most 1 at every iteration.

    Attributes:
      steps: the iteration budget.
      tolerance: if above 0, stop once both residuals are below it, relative to the
        gradient's root mean square singular value.
      threshold: the first soft threshold, in the same unit.
      relaxation: over-relaxation, between 1 and 2 (Boyd et al. 2011, section 3.4.3).
      balance: how far the two residuals may drift apart, as a factor, before the threshold moves.
    """

    steps: int = 30
    tolerance: float = 0.0
    threshold: float = 1.5
    relaxation: float = 1.6
    balance: float = 3.0

    def __post_init__(self):
        check_fields(self, steps="[1, inf)", tolerance="[0, inf)", relaxation="[1, 2)")
        check_fields(self, threshold="(0, inf)", balance="[1, inf)")

    def init_dual(self, shape: tuple[int, ...]) -> Dual:
        *batch, _, n = shape
        shapes = (*batch, n, n), (*batch, 2 * n, n)
        return Dual(*(jnp.zeros(shape, jnp.float32) for shape in shapes))

    def solve(
        self,
        point: Float[Array, "*batch m n"],
        grad: Float[Array, "*batch m n"],
        dual: Dual,
    ) -> Steepest:
        point, grad, dual = match_varying_axes((point, grad, dual))
        parts = split(point, scale_to_unit_exponent(grad, ndim=2)[0])
        scale = unit_of(parts)
        fixed = stack(parts, jnp.zeros_like(dual.shift), scale)
        n = max(point.shape[-1], 1)

        def step(k, state):
            shift, split_copy, direction, threshold = state
            target = stack(parts, shift, scale)
            relaxed = self.relaxation * target + (1 - self.relaxation) * split_copy
            pushed = relaxed + threshold * direction
            clipped = _clip(pushed, threshold)
            thresholded = pushed - clipped
            direction = clipped / threshold
            shift = sym(halves(thresholded - clipped - fixed)[0])
            primal = frobenius_norm(stack(parts, shift, scale) - thresholded)
            dual_error = frobenius_norm(thresholded - split_copy)
            factor = jnp.where(
                primal > self.balance * dual_error,
                0.5,
                jnp.where(dual_error > self.balance * primal, 2.0, 1.0),
            )
            # Balancing must end, or it cycles with the iteration: after half of the budget it does.
            factor = jnp.where(k < self.steps // 2, factor, 1.0)[..., None, None]
            error = jnp.maximum(primal, dual_error) / n
            return (shift, thresholded, direction, threshold * factor), error

        shift, direction = (x.astype(grad.dtype) for x in dual)
        start = stack(parts, shift, scale)
        state = (shift, start, direction, jnp.full_like(scale, self.threshold))
        shift, _, direction, _ = iterate(step, state, self.steps, self.tolerance)
        upper = nuclear_norm(stack(parts, shift, scale)) * jnp.squeeze(scale, (-2, -1))
        return finish(parts, direction, upper, in_dtypes_of(dual, Dual(shift, direction)))


@dataclasses.dataclass(frozen=True)
class AlternatingProjection(MemorylessSolver):
    """`A <- msign(A - W sym(W^T A))` from `A = G`.

    It converges to a direction that is tangent and has orthonormal columns, as a rule not the
    steepest: on well-conditioned gradients it comes close, on others more steps drift away from
    the optimum. For comparison; there is no dual variable to carry.

    Attributes:
      steps: the iteration budget.
      tolerance: if above 0, stop once `||W^T A + A^T W||_F / n` is below it.
      method: the polar factor; it acts on `2n x n` matrices.
    """

    steps: int = 10
    tolerance: float = 0.0
    method: MsignMethod = DEFAULT_MSIGN

    def __post_init__(self):
        check_method("AlternatingProjection.method", self.method)
        check_fields(self, steps="[1, inf)", tolerance="[0, inf)")

    def solve(
        self,
        point: Float[Array, "*batch m n"],
        grad: Float[Array, "*batch m n"],
        dual: Any,
    ) -> Steepest:
        parts = split(point, scale_to_unit_exponent(grad, ndim=2)[0])
        start = stack(parts, jnp.zeros_like(parts.inner))
        first = msign(start, self.method)

        def project(k, candidate):
            del k
            along, across = halves(candidate)
            moved = msign(jnp.concatenate([skew(along), across], axis=-2), self.method)
            return moved, 2 * frobenius_norm(sym(along)) / max(point.shape[-1], 1)

        candidate = iterate(project, first, self.steps - 1, self.tolerance)
        return finish(parts, candidate, nuclear_bound(start, first), dual)
