"""Methods that keep weights orthonormal or 1-Lipschitz, and unconstrained AdamW.

All methods start from the same orthonormal weights and train biases with Adam at a separate rate.
They differ in the training of matrices: on their manifold, or as differentiable functions of free
arrays (parametrisations).

Muon's direction appears three times: tangent to the manifold ("manifold Muon"), followed by a
retraction without tangent projection ("Muon + retraction"), and on the free arrays of a
parametrisation ("Björck + Muon"). The difference between the first two measures the tangent
projection; the difference from Adam under the same constraint measures the direction.
"""

import abc
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from manifoldmuon import optim
from manifoldmuon.linalg import MUON, NewtonSchulz
from manifoldmuon.manifolds import Euclidean, LaidOut
from manifoldmuon.manifolds.solvers import ClosedForm, ProjectedPolar, StiefelSolver
from manifoldmuon.norms import Spectral

SQUARES = 0.99
BIASES = 0.03
"""The peak learning rate of the biases."""

BIASES_MOMENTUM = 0.9

POWER_ITERATIONS = 3
BJORCK_STEPS = 12

FLAT = Euclidean(Spectral(NewtonSchulz(MUON, frobenius=True)))
"""Muon as published: five Newton-Schulz steps after Frobenius normalisation."""


def flat(manifolds: Any) -> Any:
    """Return `FLAT` for every matrix, in the layouts of these manifolds."""
    return jax.tree.map(
        lambda x: LaidOut(FLAT, x.layout) if isinstance(x, LaidOut) else FLAT, manifolds
    )


@dataclasses.dataclass(frozen=True)
class Method(abc.ABC):
    """A way to train the matrices of a network.

    Attributes:
      log2_rate: log2 of the learning rate at which tuning starts.
    """

    log2_rate: int

    solver: ClassVar[StiefelSolver] = ProjectedPolar()
    on_manifolds: ClassVar[bool] = True

    @abc.abstractmethod
    def optimizer(self, rate: Any, momentum: Any, manifolds: Any) -> optax.GradientTransformation:
        """Return the optimizer of the trained arrays of matrices on these manifolds."""

    def begin(self, weight: Float[Array, "*batch m n"]) -> tuple[Any, Any]:
        """Return the trained array of an orthonormal matrix, and the state carried over steps."""
        return weight, ()

    def carried(self, free: Any, carry: Any) -> Any:
        """Return the carry for the next step; no gradient passes through it."""
        del free
        return carry

    def weight(self, free: Any, carry: Any) -> Float[Array, "*batch m n"]:
        """Return the matrix that the network uses."""
        del carry
        return free


@dataclasses.dataclass(frozen=True)
class Muon(Method):
    """Manifold Muon with the cheap solver."""

    def optimizer(self, rate: Any, momentum: Any, manifolds: Any) -> optax.GradientTransformation:
        return optim.manifold_muon(rate, manifolds, momentum, track_gap=False)


@dataclasses.dataclass(frozen=True)
class ClosedFormMuon(Muon):
    """Manifold Muon with the default solver."""

    solver: ClassVar[StiefelSolver] = ClosedForm()


@dataclasses.dataclass(frozen=True)
class MuonRetraction(Method):
    """Unconstrained Muon step, then the polar retraction: no tangent projection."""

    def optimizer(self, rate: Any, momentum: Any, manifolds: Any) -> optax.GradientTransformation:
        return optim.chain(
            optax.trace(momentum, nesterov=True),
            optim.scale_by_steepest(flat(manifolds), track_gap=False),
            optax.scale_by_learning_rate(rate),
            optim.retract(manifolds),
        )


@dataclasses.dataclass(frozen=True)
class RiemannianAdam(Method):
    """Adam between two projections onto the tangent space."""

    def optimizer(self, rate: Any, momentum: Any, manifolds: Any) -> optax.GradientTransformation:
        return optim.riemannian_adam(rate, manifolds, momentum, SQUARES)


@dataclasses.dataclass(frozen=True)
class RiemannianGradient(Method):
    """Riemannian gradient descent with momentum."""

    def optimizer(self, rate: Any, momentum: Any, manifolds: Any) -> optax.GradientTransformation:
        return optim.riemannian_sgd(rate, manifolds, momentum)


@dataclasses.dataclass(frozen=True)
class Parametrised(Method):
    """Adam on free arrays; the matrices are functions of the arrays."""

    on_manifolds: ClassVar[bool] = False

    def optimizer(self, rate: Any, momentum: Any, manifolds: Any) -> optax.GradientTransformation:
        del manifolds
        return optax.adam(rate, momentum, SQUARES)


@dataclasses.dataclass(frozen=True)
class SpectralNorm(Parametrised):
    """The array divided by its largest singular value (Miyato et al., arXiv:1802.05957).

    The singular value comes from power iterations, warm-started with the vector of the last step.
    """

    def begin(self, weight: Float[Array, "*batch m n"]) -> tuple[Any, Any]:
        columns = min(weight.shape[-2:])
        vector = jax.random.normal(jax.random.key(0), (*weight.shape[:-2], columns, 1))
        return weight, vector / jnp.linalg.norm(vector, axis=-2, keepdims=True)

    def carried(self, free: Any, carry: Any) -> Any:
        frame, vector = _tall(jax.lax.stop_gradient(free)), carry
        for _ in range(POWER_ITERATIONS):
            vector = frame.mT @ (frame @ vector)
            vector = vector / jnp.linalg.norm(vector, axis=-2, keepdims=True)
        return vector

    def weight(self, free: Any, carry: Any) -> Float[Array, "*batch m n"]:
        image = _tall(free) @ carry
        left = jax.lax.stop_gradient(image / jnp.linalg.norm(image, axis=-2, keepdims=True))
        return free / (left.mT @ image)


@dataclasses.dataclass(frozen=True)
class Bjorck(SpectralNorm):
    """Björck's iteration after spectral normalisation, as in Orthogonium and deel-torchlip.

    `W <- W (3 I - W^T W) / 2`, twelve times, after three power iterations from the vector of the
    last step (Orthogonium's numbers; deel-torchlip iterates fifteen times). Computed with the small
    Gram matrix: an iteration costs three products of its size, independent of the longer side.
    """

    def weight(self, free: Any, carry: Any) -> Float[Array, "*batch m n"]:
        frame = _tall(super().weight(free, carry))
        gram = frame.mT @ frame
        one = jnp.eye(gram.shape[-1], dtype=gram.dtype)
        factor = one
        for step in range(BJORCK_STEPS):
            move = 1.5 * one - 0.5 * gram
            factor = factor @ move
            if step < BJORCK_STEPS - 1:
                gram = move @ gram @ move
        return _like(frame @ factor, free)


@dataclasses.dataclass(frozen=True)
class BjorckMuon(Bjorck):
    """Björck's iteration with Muon instead of Adam on the free arrays."""

    def optimizer(self, rate: Any, momentum: Any, manifolds: Any) -> optax.GradientTransformation:
        return optim.muon(rate, flat(manifolds), momentum)


@dataclasses.dataclass(frozen=True)
class Cayley(Parametrised):
    """The Cayley transform of a free array (Trockman and Kolter, arXiv:2104.07167).

    A tall matrix is `[(I - A); -2 V] (I + A)^{-1}` with `A = U - U^T + V^T V`, times a fixed
    orthogonal matrix: this gives a well-conditioned start at the weights of all other methods.
    """

    def begin(self, weight: Float[Array, "*batch m n"]) -> tuple[Any, Any]:
        frame = _tall(weight)
        n = frame.shape[-1]
        left, _, right = jnp.linalg.svd(frame[..., :n, :])
        turn = left @ right
        top, bottom = frame[..., :n, :] @ turn.mT, frame[..., n:, :] @ turn.mT
        one = jnp.eye(n, dtype=frame.dtype)
        a = jnp.linalg.solve((one + top).mT, (one - top).mT).mT
        v = -bottom @ (one + a) / 2
        u = (a - v.mT @ v) / 2
        return _like(jnp.concatenate([(u - u.mT) / 2, v], axis=-2), weight), turn

    def weight(self, free: Any, carry: Any) -> Float[Array, "*batch m n"]:
        frame, n = _tall(free), carry.shape[-1]
        u, v = frame[..., :n, :], frame[..., n:, :]
        one = jnp.eye(n, dtype=free.dtype)
        a = u - u.mT + v.mT @ v
        inverse = jnp.linalg.solve(one + a, carry)
        found = jnp.concatenate([(one - a) @ inverse, -2 * v @ inverse], axis=-2)
        return _like(found, free)


@dataclasses.dataclass(frozen=True)
class SkewExponential(Parametrised):
    """The exponential of a skew matrix (SOC; Singla and Feizi, arXiv:2105.11417).

    `exp(F Q^T - Q F^T) Q` with the free array F and the first weight Q, which reaches every
    direction from Q. It is `Q A + F B` with the exponential of a square matrix of twice the short
    side. Published is a Taylor series of a skew matrix of norm at most 1, which reaches less.
    """

    def begin(self, weight: Float[Array, "*batch m n"]) -> tuple[Any, Any]:
        return jnp.zeros_like(weight), weight

    def weight(self, free: Any, carry: Any) -> Float[Array, "*batch m n"]:
        first, moves = _tall(carry), _tall(free)
        # The skew matrix maps `first A + unit B` to `first C + unit D`, linearly.
        size = jnp.linalg.norm(moves, axis=(-2, -1), keepdims=True) / moves.shape[-1] ** 0.5
        size = jax.lax.stop_gradient(jnp.maximum(size, 1e-3))
        unit = moves / size
        cross, gram = first.mT @ moves, unit.mT @ moves
        one = jnp.zeros_like(gram) + jnp.eye(gram.shape[-1], dtype=gram.dtype)
        blocks = jnp.block([[-cross.mT, -gram], [size * one, cross]])
        found = jax.scipy.linalg.expm(blocks, max_squarings=6)[..., : gram.shape[-1]]
        return _like(jnp.concatenate([first, unit], axis=-1) @ found, free)


@dataclasses.dataclass(frozen=True)
class AlmostOrthogonal(Parametrised):
    """Columns divided by the root of a bound (AOL; Prach and Lampert, arXiv:2208.03160).

    `F D` with `D_jj = sum_i |F^T F|_ij^(-1/2)` has a norm of at most 1, and is orthonormal if the
    columns of F are orthogonal.
    """

    def weight(self, free: Any, carry: Any) -> Float[Array, "*batch m n"]:
        frame = _tall(free)
        sums = jnp.sum(jnp.abs(frame.mT @ frame), axis=-2, keepdims=True)
        return _like(frame * jax.lax.rsqrt(sums), free)


@dataclasses.dataclass(frozen=True)
class UnitRows(Parametrised):
    """Rows divided by their length, for a last layer of unit rows in parametrised methods."""

    def weight(self, free: Any, carry: Any) -> Float[Array, "*batch m n"]:
        return free / jnp.linalg.norm(free, axis=-1, keepdims=True)


@dataclasses.dataclass(frozen=True)
class Free(Parametrised):
    """AdamW on the matrices, without a constraint."""

    def optimizer(self, rate: Any, momentum: Any, manifolds: Any) -> optax.GradientTransformation:
        del manifolds
        return optax.adamw(rate, momentum, SQUARES, weight_decay=0.01)


METHODS: dict[str, Method] = {
    "manifold Muon": Muon(-3),
    "manifold Muon, ClosedForm()": ClosedFormMuon(-3),
    "Muon + retraction": MuonRetraction(-3),
    "Riemannian Adam": RiemannianAdam(-5),
    "Riemannian gradient": RiemannianGradient(-3),
    "Björck + Adam": Bjorck(-5),
    "Björck + Muon": BjorckMuon(-4),
    "Cayley + Adam": Cayley(-7),
    "SOC + Adam": SkewExponential(-7),
    "AOL + Adam": AlmostOrthogonal(-7),
    "spectral norm + Adam": SpectralNorm(-10),
    "AdamW, free": Free(-13),
}


def _tall(x: jax.Array) -> jax.Array:
    return x.mT if x.shape[-2] < x.shape[-1] else x


def _like(x: jax.Array, example: jax.Array) -> jax.Array:
    """Transpose a tall matrix to the orientation of `example`."""
    return x.mT if example.shape[-2] < example.shape[-1] else x
