"""Dual ascent on the Stiefel manifold, as published with manifold Muon.

The dual of "steepest tangent direction" is to minimise `||[T + Omega; R]||_*` over symmetric `T`,
where `Omega` is the skew part of `W^T G`, `R` the part normal to `W` (see `split`), and
`T = sym(W^T G) + 2 Lambda`. `T = 0` is optimal for square points and the cold start for other
points. A candidate direction is a `2n x n` matrix in the basis `[W, Q]`. The dual variable is
`T / unit_of(parts)`: the same for G and c*G.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon._internal.arguments import check_fields
from manifoldmuon._internal.matrices import arrays
from manifoldmuon._internal.matrices.arrays import Matrices, Numbers, Squares
from manifoldmuon._internal.matrices.powers_of_two import scale_to_unit_exponent
from manifoldmuon._internal.matrices.spectral import nuclear_parts
from manifoldmuon._internal.meshes.mesh import match_varying_axes
from manifoldmuon.linalg import DEFAULT_MSIGN, MsignMethod, msign
from manifoldmuon.manifolds.solvers import _parts
from manifoldmuon.manifolds.solvers._solver import Steepest, StiefelSolver, in_dtypes_of
from manifoldmuon.norms import Norm


def unit_of(parts: _parts.Split) -> Float[Array, "*batch 1 1"]:
    """Return the root mean square singular value of the tangent part of `G`, or 1 if it is zero."""
    square = jnp.sum(arrays.skew(parts.inner) ** 2, axis=(-2, -1), keepdims=True)
    square += jnp.sum(parts.normal**2, axis=(-2, -1), keepdims=True)
    scale = jnp.sqrt(square / max(parts.inner.shape[-1], 1))
    return arrays.nonzero_or_one(scale)


def stack(
    parts: _parts.Split, shift: Squares, scale: Float[Array, "*batch 1 1"] | float = 1.0
) -> Float[Array, "*batch rows n"]:
    """Return `[T + Omega; R] / scale`, where `T = scale * shift`."""
    return jnp.concatenate(
        [shift + arrays.skew(parts.inner) / scale, parts.normal / scale], axis=-2
    )


def halves(x: Float[Array, "*batch rows n"]):
    """Return the part along `W` and the part normal to it."""
    n = x.shape[-1]
    return x[..., :n, :], x[..., n:, :]


def finish(
    parts: _parts.Split, candidate: Float[Array, "*batch rows n"], upper: Numbers, dual: Any
) -> Steepest:
    """Make a candidate feasible and bound its gap.

    The candidate is in the basis `[W, Q]`, nearly tangent, of norm about 1. `upper` bounds the
    optimum without the part that the split leaves out; `dual` is passed on.
    """
    inner, normal = halves(candidate)
    feasible = jnp.concatenate([arrays.skew(inner), normal], axis=-2)
    # An SVD may find too small a norm: by 7e-6, for instance, with 128 columns in float32.
    margin = 1 + inner.shape[-1] * float(jnp.finfo(feasible.dtype).eps)
    length = margin * jnp.linalg.norm(feasible, ord=2, axis=(-2, -1), keepdims=True)
    feasible = feasible / jnp.maximum(length, 1)
    tangent = stack(parts, jnp.zeros_like(inner))
    # The gradient in the basis [W, Q], of the same norm.
    grad = jnp.concatenate([parts.inner, parts.normal], axis=-2)
    still = _parts.is_noise(arrays.frobenius_norm(tangent), grad)[..., None, None]
    feasible = jnp.where(still, 0, feasible)
    gap = _parts.duality_gap(upper + parts.defect, arrays.inner_product(tangent, feasible), grad)
    return Steepest(parts.assemble(*halves(feasible)), dual, _parts.tangent_residual(inner), gap)


@dataclasses.dataclass(frozen=True)
class DualAscent(StiefelSolver):
    """Subgradient steps: `A = msign(G + 2 W L)`, `L <- L - step (1 - k/K) (W^T A + A^T W)`.

    When to use it: to reproduce the published manifold Muon. Where 100 of these steps fall short of
    the optimum by some percent, `ClosedForm()` falls short by a thousandth, and is faster.

    The published step size is a number without units while `L` has the units of the gradient, so
    the published loop depends on the gradient's scale: `relative=False` reproduces this, for
    comparison. By default the step is relative to the gradient's scale.

    Attributes:
      step: the first step size; it falls linearly to zero. Published: 0.01, absolute.
      steps: the iteration budget `K`. Published: 100.
      tolerance: if above 0, stop once `||W^T A + A^T W||_F / n` is below it in every problem.
      relative: whether `step` is in units of the gradient's root mean square singular value.
      method: the polar factor; it acts on `2n x n` matrices.

    Examples:
      >>> published = mm.manifolds.Stiefel(solver=DualAscent(step=0.01, steps=100, relative=False))
    """

    step: float = 0.3
    steps: int = 100
    tolerance: float = 0.0
    relative: bool = True
    method: MsignMethod = DEFAULT_MSIGN

    def __post_init__(self):
        MsignMethod.check("DualAscent.method", self.method)
        check_fields(self, step="(0, inf)", steps="[1, inf)", tolerance="[0, inf)")

    def init(self, shape: tuple[int, ...], axes: int = 2) -> Squares:
        n = min(shape[-2:])
        return jnp.zeros((*shape[:-2], n, n), jnp.float32)

    def solve(self, norm: Norm, at: Matrices, grad: Matrices, dual: Any) -> Steepest:
        asked = grad
        point, grad, dual = match_varying_axes((arrays.tall(at), arrays.tall(grad), dual))
        # The published loop does not scale the gradient: its scale is part of the algorithm.
        parts = _parts.split(
            point, scale_to_unit_exponent(grad, ndim=2)[0] if self.relative else grad
        )
        scale = unit_of(parts)
        step_size = self.step if self.relative else self.step / scale

        def ascend(k, shift):
            """Return the next multiplier, and the distance of the last direction from tangent."""
            candidate = msign(stack(parts, shift, scale), self.method)
            residual = 2 * arrays.sym(halves(candidate)[0])
            # T = sym(W^T G) + 2 L moves by twice the step of L.
            after = shift - 2 * step_size * (1 - k / self.steps) * residual
            error = arrays.frobenius_norm(residual) / max(point.shape[-1], 1)
            return after.astype(shift.dtype), error  # under jax_enable_x64 the count k widens it

        def unfinished(carry):
            k, _, error = carry
            # Not `error > tolerance`: a NaN would count as finished and hide.
            return (k < self.steps) & ~jnp.all(error <= self.tolerance)

        def advance(carry):
            k, before, _ = carry
            return k + 1, *ascend(k, before)

        shift = dual.astype(grad.dtype)
        if self.tolerance == 0:  # the cost of a training step must not depend on the data
            shift = jax.lax.fori_loop(0, self.steps, lambda k, s: ascend(k, s)[0], shift)
        else:
            worst = match_varying_axes(jnp.full(shift.shape[:-2], jnp.inf, shift.dtype), shift)
            shift = jax.lax.while_loop(unfinished, advance, (jnp.int32(0), shift, worst))[1]
        reduced = stack(parts, shift, scale)
        candidate = msign(reduced, self.method)
        gained, missed = nuclear_parts(reduced, candidate)
        upper = (gained + missed) * jnp.squeeze(scale, (-2, -1))
        result = finish(parts, candidate, upper, in_dtypes_of(dual, shift))
        return result._replace(direction=arrays.match_orientation(result.direction, asked))
