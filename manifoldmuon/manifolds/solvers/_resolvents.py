"""The closed form by rational functions: n x n inverses in place of 2n x 2n products.

With `B = W^T G`, `E = G - W B`, `S = E^T E` and `Omega = skew(B)` the lift `Gamma = skew(G W^T)`
maps `W x + E z` to `W (Omega x - S z / 2) + E (x / 2)`. Its resolvents are therefore solved for in
n x n: for real s

    (Gamma - i s)^-1 W   needs only   N = (S / 4 + s^2 I + s Omega)^-1,

and an odd rational function of `Gamma` is a sum of resolvents. With Zolotarev's weights `a_j` and
`s_j = sqrt(c_j)`

    A = f(Gamma) W = W X + E P,   X = -sum_j a_j s_j skew(N_j),   P = sum_j a_j sym(N_j) / 2.

X is exactly skew, so the direction is tangent. The symmetric part of every matrix to be inverted is
positive definite, so no pivots are needed.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon._internal.arguments import check_fields
from manifoldmuon._internal.matrices import arrays
from manifoldmuon._internal.matrices.arrays import Matrices, Numbers, Squares
from manifoldmuon._internal.matrices.powers_of_two import scale_to_unit_exponent
from manifoldmuon._internal.meshes.mesh import match_varying_axes
from manifoldmuon.manifolds.solvers._parts import duality_gap, is_noise, tangent_parts
from manifoldmuon.manifolds.solvers._rational import inverse, zolotarev
from manifoldmuon.manifolds.solvers._solver import Steepest, StiefelSolver
from manifoldmuon.norms import Norm

_POWER_STEPS = 6
_ENTRIES = 2**22  # matrix entries inverted at once


@dataclasses.dataclass(frozen=True)
class Resolvents(StiefelSolver):
    """The closed form `A = f(G W^T - W G^T) W` with Zolotarev's function f in place of the sign.

    When to use it: for points with many rows on a CPU, where an inverse costs as much as two or
    three products; everything is n x n except eight products with tall matrices. On accelerators
    use `SkewPolar`, which has products alone. Singular values with squares below rounding are not
    brought all the way to 1.

    Attributes:
      poles: the number of pole pairs, each an inverse.
      lower: the smallest singular value of the lift that is brought to 1, relative to the largest.
        Eight poles leave 1.4e-4 at 3e-3, four leave 1.1e-2 at 1e-2.
    """

    poles: int = 8
    lower: float = 3e-3

    def __post_init__(self):
        check_fields(self, poles="[1, inf)", lower="[1e-5, 1)")

    def solve(self, norm: Norm, at: Matrices, grad: Matrices, dual: Any) -> Steepest:
        entries = self.poles * min(at.shape[-2:]) ** 2
        grad, _ = scale_to_unit_exponent(grad, ndim=2)
        direction, residual, gap = _in_chunks(self._solve, entries, at, grad)
        return Steepest(direction, dual, residual, gap)

    def _solve(self, point, grad):
        along, outer = tangent_parts(point, grad)
        # The part along W left in `outer` by rounding: it would make the direction less tangent.
        left = arrays.gram_matrix(point, outer)
        normal = arrays.gram_matrix(outer, outer)
        # An entry of `normal` is off by less than a unit of rounding times the lengths of two
        # columns. The direction must not be too long for `outer`.
        raised = jnp.finfo(normal.dtype).eps * arrays.trace(normal)
        normal = arrays.sym(normal - arrays.product(left.mT, left))
        normal = normal + arrays.expand_trailing(raised, 2) * arrays.identity_like(normal)
        size = _norm(along, normal)
        still = is_noise(size[..., 0, 0], grad)[..., None, None]
        size = jnp.where(still, 1, size)
        along, normal = along / size, normal / size**2
        turn, leave = self._direction_blocks(along, normal)
        turn, leave = jnp.where(still, 0, turn), jnp.where(still, 0, leave)
        # [along; outer] and [turn; away] are the gradient and the direction in [W, rest].
        outer = outer / size
        away, slip = arrays.right_multiply(outer, leave), arrays.product(left / size, leave)
        bound = _bound(along, outer, turn, away, leave)
        value = arrays.inner_product(along, turn) + arrays.inner_product(outer, away)
        direction = arrays.right_multiply(point, turn - slip) + away
        residual = 2 * arrays.frobenius_norm(arrays.sym(slip)) / max(along.shape[-1], 1)
        gap = duality_gap(bound, value, grad / size)
        return direction, residual, gap

    def _direction_blocks(self, along, normal):
        """Return X and P."""
        weights, shifts, _ = zolotarev(self.poles, self.lower)
        # Rounding is magnified by up to 1 / lower, and must not lift values above 1.
        weights = weights / (1 + 4 * float(jnp.finfo(along.dtype).eps) / self.lower)
        weights, shifts = (jnp.asarray(c, along.dtype) for c in (weights, shifts))
        roots, identity = jnp.sqrt(shifts), arrays.identity_like(along)
        along, normal = along[..., None, :, :], normal[..., None, :, :]
        s, squares = (arrays.expand_trailing(x, 2) for x in (roots, shifts))
        resolvents = inverse(normal / 4 + squares * identity + s * along)
        turn = -arrays.skew(_mix(weights * roots, resolvents))
        return turn, arrays.sym(_mix(weights, resolvents)) / 2


def _mix(weights: Float[Array, " poles"], matrices: Float[Array, "*batch poles n n"]) -> Squares:
    """Return the weighted sum, as a product: XLA's sum over a strided axis is slow on CPUs."""
    return jnp.einsum("p,...pij->...ij", weights, matrices, precision="highest")


def _norm(along: Squares, normal: Squares) -> Float[Array, "*batch 1 1"]:
    """Estimate the spectral norm of the lift to a few percent, by power iteration.

    In the lift's own inner product, where `W u + E w` has the squared length `|u|^2 + w^T S w`. The
    iteration starts from the largest column, a null vector only if the lift is zero.
    """

    def length(u, w):
        squares = jnp.sum(u * u + w * arrays.product(normal, w), -2, keepdims=True)
        return arrays.safe_sqrt(jnp.maximum(squares, 0))

    lengths = jnp.diagonal(normal, axis1=-2, axis2=-1)[..., None, :]
    columns = jnp.sum(along**2, -2, keepdims=True) + lengths / 4
    index = jnp.argmax(columns, axis=-1, keepdims=True)
    u = jnp.take_along_axis(along, index, axis=-1)
    w = (jnp.arange(along.shape[-1])[:, None] == index).astype(along.dtype) / 2

    def advance(_, carry):
        u, w = carry
        size = arrays.nonzero_or_one(length(u, w))
        u, w = u / size, w / size
        return arrays.product(along, u) - arrays.product(normal, w) / 2, u / 2

    start = match_varying_axes((u, w), along, normal)
    return 1.02 * length(*jax.lax.fori_loop(0, _POWER_STEPS, advance, start))


def _bound(
    along: Float[Array, "*batch k k"],
    outer: Matrices,
    turn: Float[Array, "*batch k k"],
    away: Matrices,
    leave: Float[Array, "*batch k k"],
) -> Numbers:
    """Return an upper bound on the optimum, `min over symmetric T of || W (Omega + T) + E ||_*`.

    `T = sym(X P^-1)` makes `M = [Omega + T; E]` nearly `A H` with the direction `A = [X; E P]`, of
    norm at most 1. So `||M||_* <= ||H||_* + ||M - A H||_*` for every symmetric H. Two are tried:

    * `P^-1`, always positive definite, which leaves `M - A H = Omega - skew(X P^-1)` and counts the
      shortfall of f in full;
    * `sym(A^T M)`, with a nuclear norm equal to its trace if its pivots are positive.

    Computed from E and E P themselves: in `S` singular values below `eps**(1/2)` of the largest are
    noise.
    """
    n = along.shape[-1]
    root = arrays.sym(inverse(leave))
    ratio = arrays.product(turn, root)
    missed = arrays.frobenius_norm(along - arrays.skew(ratio))
    simple = arrays.trace(root) + math.sqrt(n) * missed
    top = arrays.sym(ratio) + along
    size = arrays.sym(arrays.product(turn.mT, top) + arrays.gram_matrix(away, outer))
    # Rounding perturbs zero eigenvalues by at most this, relative to the norm, which is 1.
    lift = 128 * float(jnp.finfo(along.dtype).eps)
    lifted = size + lift * arrays.identity_like(along)
    definite = jnp.all(jnp.isfinite(inverse(lifted)), axis=(-2, -1))
    squares = arrays.frobenius_norm(top - arrays.product(turn, size)) ** 2
    squares = squares + arrays.frobenius_norm(outer - arrays.right_multiply(away, size)) ** 2
    sharp = arrays.trace(size) + 2 * n * lift + jnp.sqrt(n * squares)
    return jnp.where(definite, jnp.minimum(sharp, simple), simple)


def _in_chunks(function, entries: int, *stacks):
    """Apply `function` to stacks of matrices, in chunks that fit in memory at `entries` per matrix.

    All stacks, and all results, have the same leading axes.
    """
    batch = stacks[0].shape[:-2]
    if not batch:
        return function(*stacks)
    flat = [x.reshape((-1, *x.shape[-2:])) for x in stacks]
    count, size = flat[0].shape[0], max(1, _ENTRIES // entries)
    # A remainder would need a second program, as long to compile as the first.
    size = max((d for d in range(-(-size // 2), size + 1) if count % d == 0), default=size)
    if count <= size:
        result = function(*flat)
    else:
        result = jax.lax.map(lambda given: function(*given), tuple(flat), batch_size=size)
    return jax.tree.map(lambda x: x.reshape(batch + x.shape[1:]), result)
