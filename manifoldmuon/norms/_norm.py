"""The interface of a norm on weights: the norm, its dual, and the duality map."""

import abc
import dataclasses

import chex
from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much work goes into a norm that is computed in every training step.

    Attributes:
      steps: of power iteration from the last step's vector (two suffice under momentum: modular
        norm, arXiv:2405.14813, appendix A.3).
      cold_steps: of power iteration where there is no such vector: in the first step, and in the
        first after nothing but zeros.
    """

    steps: int = 2
    cold_steps: int = 16

    def __post_init__(self):
        if min(self.steps, self.cold_steps) < 1:
            raise ValueError(
                f"Effort takes at least one step; got steps={self.steps} and "
                f"cold_steps={self.cold_steps}"
            )


class Norm(abc.ABC):
    """A norm on weights, as a frozen, hashable value without arrays.

    The trailing `ndim` axes of an array are one weight; all leading axes are independent
    copies. A matrix is `(fan_out, fan_in)`; `manifoldmuon.manifolds.Axes` brings other
    layouts into this one.

    Laws, for every gradient `g` and weight `w` (checked by `manifoldmuon.testing.check_norm`):

    * `norm(lmo(g)) <= 1`, with equality unless `g` is zero;
    * `<g, lmo(g)> == dual_norm(g)`, hence `<g, w> <= dual_norm(g) * norm(w)`;
    * `lmo(0) == 0`, `lmo(c * g) == lmo(g)` for `c > 0`, and a NaN in `g` stays visible;
    * `gap(g, lmo(g))` bounds the relative error of `lmo`, by products alone;
    * dtype in = dtype out; arithmetic is done in float32 or wider.
    """

    @property
    @abc.abstractmethod
    def ndim(self) -> int:
        """How many trailing axes make one weight."""

    @abc.abstractmethod
    def norm(self, weight: Float[Array, "..."]) -> Float[Array, "..."]:
        """The norm of each weight; the result has the leading axes' shape."""

    def init_carried(self, shape: tuple[int, ...]) -> chex.ArrayTree:
        """The cold start of `carried_norm` for weights of this shape; `()` where none is needed."""
        return ()

    def carried_norm(
        self, weight: Float[Array, "..."], carried: chex.ArrayTree, effort: Effort
    ) -> tuple[Float[Array, "..."], chex.ArrayTree]:
        """The norm at the price of a training step, and what the next call starts from.

        Where the norm itself is that cheap it is `norm`, as here; the spectral norms iterate
        from singular vectors that are handed on, and so give a lower bound that is close where
        the weight changes slowly from call to call.
        """
        return self.norm(weight), carried

    @abc.abstractmethod
    def dual_norm(self, grad: Float[Array, "..."]) -> Float[Array, "..."]:
        """max <grad, a> over norm(a) <= 1; the result has the leading axes' shape."""

    @abc.abstractmethod
    def lmo(self, grad: Float[Array, "..."]) -> Float[Array, "..."]:
        """The duality map: an `a` of norm at most 1 that attains the dual norm."""

    @abc.abstractmethod
    def gap(self, grad: Float[Array, "..."], direction: Float[Array, "..."]) -> Float[Array, "..."]:
        """A cheap upper bound on `1 - <grad, direction> / dual_norm(grad)`.

        Meant for every training step, where `dual_norm` may be too dear: no decompositions.

        Args:
          grad: what `lmo` was given.
          direction: what `lmo` returned, better before it was rounded to a short dtype.

        Returns:
          Not negative, 0 for a zero gradient; float32 or wider; the leading axes' shape.
        """
