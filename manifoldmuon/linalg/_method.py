"""The interface of a method for msign."""

import abc

from jaxtyping import Array, Float


class MsignMethod(abc.ABC):
    """A way to compute the orthogonal polar factor, as a frozen, hashable value.

    `msign` has already done what every method needs: the matrices are tall or square, not
    empty, in float32 or wider, and each has its largest magnitude in [1, 2) or is zero, or
    is NaN throughout. A method answers with matrices of the same shape and dtype; a zero
    matrix gives zero, a NaN matrix NaN, and matrices in a batch do not touch each other. It
    must work under `jax.jit`, `jax.vmap` and `jax.lax.scan`; it need not be differentiable.
    """

    @abc.abstractmethod
    def polar(self, x: Float[Array, "*batch m n"]) -> Float[Array, "*batch m n"]:
        """`U V^T` for each `x = U S V^T` with `m >= n >= 1`."""
