"""The interface of a weight space: what every manifold supplies, and the laws it keeps."""

import abc
from typing import NamedTuple

import chex
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, Shaped

from manifoldmuon.linalg import upcast
from manifoldmuon.norms import Effort


class Steepest(NamedTuple):
    """A steepest direction and its certificate.

    Attributes:
      direction: `A`, tangent at the point, of norm at most 1 in the manifold's own norm; it
        ascends, so a descent step subtracts it. Shape and dtype of the gradient.
      dual: what a later, nearby problem can start from: an array, or `()` where the direction
        has a closed form. float32 or wider.
      residual: how far the solver's raw direction was from tangent before the last tangent
        projection, `||W^T A + A^T W||_F / n` for a Stiefel point of unit scale. Leading axes.
      gap: the relative duality gap, an upper bound on `1 - <G, A> / optimum` that needs no
        reference solution (0 for a zero gradient). Leading axes.
    """

    direction: Float[Array, "..."]
    dual: chex.ArrayTree
    residual: Float[Array, "..."]
    gap: Float[Array, "..."]


class Manifold(abc.ABC):
    """A space of weights, as a frozen, hashable value without arrays; not a pytree node.

    The trailing `ndim` axes of an array are one point; all leading axes are independent copies.
    Methods take the point first. Dtype in = dtype out; arithmetic is done in float32 or wider.

    The norm of a direction is measured relative to the manifold's own scale, so that a learning
    rate is an angle on every curved manifold: a direction on a sphere of radius r has Euclidean
    norm r, a direction on the Stiefel manifold of scale s has spectral norm at most s.

    Laws (checked by `manifoldmuon.testing.check_manifold`):

    * `project` is idempotent and lands on the set; `distance` is zero there;
    * `tangent(p, .)` is linear and idempotent;
    * `steepest` is tangent, `norm(direction) <= 1`, it is the same for G and c*G with c > 0,
      a zero gradient gives a zero direction, and its gap is a true bound;
    * `retract(p, 0) == p`, d/dt retract(p, t*v) at 0 is v, and the result is on the set;
    * a stack of points gives what a loop over them gives;
    * on a `flat` manifold `project` and `tangent` change nothing, and `retract` is addition.
    """

    @property
    @abc.abstractmethod
    def ndim(self) -> int:
        """How many trailing axes make one point."""

    @property
    def flat(self) -> bool:
        """Whether the set is all of space, so that no answer depends on the point.

        False unless a manifold says otherwise. Optimizers decay the weights of flat leaves, and
        add to them instead of retracting.
        """
        return False

    def inner(self, first: Float[Array, "..."], second: Float[Array, "..."]) -> Float[Array, "..."]:
        """`<first, second>` of each point, in float32 or wider."""
        return jnp.sum(upcast(first) * upcast(second), axis=tuple(range(-self.ndim, 0)))

    def spread(self, numbers: Shaped[Array, "..."], shape: tuple[int, ...]) -> Shaped[Array, "..."]:
        """One number for each point, laid out to multiply an array of this shape."""
        return jnp.expand_dims(numbers, tuple(range(-self.ndim, 0)))

    @abc.abstractmethod
    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raises `ValueError`, saying what arrived and what to do, where no point fits `shape`."""

    @abc.abstractmethod
    def project(self, point: Float[Array, "..."]) -> Float[Array, "..."]:
        """The nearest point of the set, in the Frobenius norm."""

    @abc.abstractmethod
    def tangent(
        self, point: Float[Array, "..."], vector: Float[Array, "..."]
    ) -> Float[Array, "..."]:
        """The orthogonal projection of `vector` onto the tangent space at `point`."""

    @abc.abstractmethod
    def norm(self, vector: Float[Array, "..."]) -> Float[Array, "..."]:
        """The norm, relative to the manifold's scale, in which directions are steepest."""

    def init_carried(self, shape: tuple[int, ...]) -> chex.ArrayTree:
        """The cold start of `carried_norm` for points of this shape; see `Norm.init_carried`."""
        return ()

    def carried_norm(
        self, vector: Float[Array, "..."], carried: chex.ArrayTree, effort: Effort
    ) -> tuple[Float[Array, "..."], chex.ArrayTree]:
        """`norm` at the price of a training step; see `Norm.carried_norm`."""
        return self.norm(vector), carried

    @abc.abstractmethod
    def init_dual(self, shape: tuple[int, ...]) -> chex.ArrayTree:
        """The cold start of `steepest` for points of this shape; `()` for a closed form."""

    @abc.abstractmethod
    def steepest(
        self, point: Float[Array, "..."], grad: Float[Array, "..."], dual: chex.ArrayTree
    ) -> Steepest:
        """The tangent direction of norm at most 1 with the largest `<grad, direction>`."""

    @abc.abstractmethod
    def retract(
        self, point: Float[Array, "..."], vector: Float[Array, "..."]
    ) -> Float[Array, "..."]:
        """A point of the set near `point + vector`, for a tangent `vector`."""

    @abc.abstractmethod
    def random_point(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype) -> Float[Array, "..."]:
        """A random point (uniform on the set where that means something)."""

    @abc.abstractmethod
    def distance(self, point: Float[Array, "..."]) -> Float[Array, "..."]:
        """How far each point is from the set, relative to the scale; leading axes.

        For matrices the largest `|sigma_i / scale - 1|`, for vectors `|norm / scale - 1|`,
        for flat space 0.
        """
