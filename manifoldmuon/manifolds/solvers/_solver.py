"""The interface of a solver for the steepest direction on the Stiefel manifold."""

import abc

import chex
from jaxtyping import Array, Float

from manifoldmuon.manifolds._manifold import Steepest


class StiefelSolver(abc.ABC):
    """Maximises `<G, A>` over `||A||_2 <= 1` and `W^T A + A^T W = 0`.

    A frozen, hashable value without arrays: budgets and tolerances are fields, so that the
    iteration count is static under `jax.jit`. `W` is tall or square, `(..., m, n)` with
    `m >= n` and `W^T W = I`; leading axes are independent problems. The answer does not depend
    on the scale of `G`.
    """

    @abc.abstractmethod
    def init_dual(self, shape: tuple[int, ...]) -> chex.ArrayTree:
        """The cold start for points of shape `(..., m, n)`."""

    @abc.abstractmethod
    def solve(
        self,
        point: Float[Array, "*batch m n"],
        grad: Float[Array, "*batch m n"],
        dual: chex.ArrayTree,
    ) -> Steepest:
        """The direction with its certificate (see `Steepest`)."""


class MemorylessSolver(StiefelSolver):
    """A solver that hands nothing on to the next problem."""

    def init_dual(self, shape: tuple[int, ...]) -> chex.ArrayTree:
        del shape
        return ()
