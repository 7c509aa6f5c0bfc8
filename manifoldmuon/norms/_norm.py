"""The interface of a norm on weights."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, cast

from manifoldmuon._internal.arguments import check_fields
from manifoldmuon._internal.matrices.arrays import Floats, inner_product, relative_gap, upcast
from manifoldmuon._internal.matrices.powers_of_two import scale_to_unit_exponent
from manifoldmuon._internal.scales import ScaleRule
from manifoldmuon._internal.values import Value
from manifoldmuon.linalg import BOUNDED_MSIGN


@dataclasses.dataclass(frozen=True)
class PowerIterations(Value):
    """Power-iteration step counts, for norms estimated in every training step.

    Attributes:
      warm: steps from the vector of the previous training step (two suffice under momentum: modular
        norm, arXiv:2405.14813, appendix A.3).
      cold_start_steps: steps without such a vector: in the first training step, and in the first
        training step after only zeros.

    Examples:
      >>> tx = mm.optim.normalize(optax.identity(), mm.manifolds.Euclidean(),
      ...                         iterations=PowerIterations(warm=1))
    """

    warm: int = 2
    cold_start_steps: int = 16

    def __post_init__(self):
        check_fields(self, warm="[1, inf)", cold_start_steps="[1, inf)")


class Norm(Value, abc.ABC):
    """A norm on weights, as a frozen, hashable value without arrays.

    The trailing `ndim` axes of an array are a weight; leading axes are independent copies. A matrix
    is `(fan_out, fan_in)`; `manifoldmuon.manifolds.Layout` converts other layouts. Every norm is
    relative to its `scale`, the size of a weight of norm 1.

    Laws, for every gradient `g` and weight `w` (checked by `manifoldmuon.testing.check_norm`):

    1. Shapes are kept; norms, gaps, bounds and estimates are a number per weight. Dtype in = dtype
       out; arithmetic is done in float32 or wider, and gaps are returned in float32 or wider.
    2. `norm` and `dual_norm` are norms, and `<g, w> <= dual_norm(g) * norm(w)`.
    3. `<g, dualize(g)> == dual_norm(g)` and `norm(dualize(g)) == 1`; if several directions fit, the
       shortest; `dualize(c * g) == dualize(g)` for `c > 0` and `-dualize(g)` for `c < 0`.
    4. `gap(g, a)` bounds `1 - <g, a> / dual_norm(g)` from above, by products alone, for
       `a = dualize(g)` and for an inexact `a`, with some singular values too short.
    5. Everything is zero for zero.
    6. `norm(w) <= bound(w) <= 2 * norm(w)`; `estimate(w)` is at most `norm(w)` and, from its own
       vectors, at least 0.8 of it.
    7. `project(w)`, if defined, is the nearest weight of norm at most 1.
    8. `for_training()` is the same norm; its `dualize(g)` has norm at most 1, gains at least half
       of the dual norm, and its gap is a bound, too.
    9. A stack gives the same results as a loop over it, and a NaN stays visible, in its copy.

    Attributes:
      scale: the size of a weight of norm 1: a number or a rule; 1 for norms without this field.
      is_euclidean: whether the norm is the length of all entries, so that its directions are
        projections.
      has_products: whether `dualize` multiplies matrices. Optimizers then bring matrices that a
        mesh divides together; otherwise weights that are free, or on a product of rows, stay where
        they are.

    Examples:
      >>> norm, grad = MaxAbs(), jnp.array([[3.0, -4.0]])
      >>> norm.dualize(grad).tolist(), float(norm.dual_norm(grad))
      ([[1.0, -1.0]], 7.0)
    """

    scale: float | ScaleRule = 1.0
    is_euclidean: ClassVar[bool] = False
    has_products: ClassVar[bool] = True

    @property
    @abc.abstractmethod
    def ndim(self) -> int:
        """Return the number of trailing axes of a weight."""

    @abc.abstractmethod
    def norm(self, weight: Floats) -> Floats:
        """Return the norm of each weight; the result has the leading axes' shape."""

    @abc.abstractmethod
    def dual_norm(self, grad: Floats) -> Floats:
        """Return max <grad, a> over norm(a) <= 1; the result has the leading axes' shape."""

    @abc.abstractmethod
    def dualize(self, grad: Floats) -> Floats:
        """Return an `a` of norm at most 1 that attains the dual norm."""

    def gap(self, grad: Floats, direction: Floats) -> Floats:
        """Return a cheap upper bound on `1 - <grad, direction> / dual_norm(grad)`.

        For every training step, so without decompositions. By default computed from its definition,
        for norms with a cheap dual norm.

        Args:
          grad: the argument of `dualize`.
          direction: the result of `dualize`, preferably before rounding to a short dtype. It may be
            too short (see the laws), but must not point elsewhere.

        Returns:
          Not negative, 0 for a zero gradient; float32 or wider; the leading axes' shape.
        """
        scaled, _ = scale_to_unit_exponent(grad, self.ndim)
        optimum = upcast(self.dual_norm(scaled))
        value = inner_product(scaled, direction, self.ndim)
        return relative_gap(optimum, value)

    def for_training(self) -> "Norm":
        """Return this norm with a duality map that is cheap enough for every training step.

        Spectral norms without an explicit `method` take `linalg.BOUNDED_MSIGN`; other norms are
        returned unchanged.
        """
        unnamed = getattr(self, "method", self) is None
        return dataclasses.replace(cast(Any, self), method=BOUNDED_MSIGN) if unnamed else self

    def project(self, weight: Floats) -> Floats:
        """Return the nearest weight of norm at most 1, in the Frobenius norm.

        Only `DouglasRachford` uses it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no projection onto its ball: define `project`, or choose a "
            "solver that asks for the duality map alone"
        )

    def bound(self, weight: Floats) -> Floats:
        """Return the norm, or slightly more if that is cheaper: used to shorten steps."""
        return upcast(self.norm(weight))

    def init_vectors(self, shape: tuple[int, ...]) -> Any:
        """Return initial vectors of `estimate` for weights of this shape; `()` if it needs none."""
        return ()

    def estimate(
        self, weight: Floats, vectors: Any, iterations: PowerIterations
    ) -> tuple[Floats, Any]:
        """Return a norm estimate, cheap enough for every training step, and vectors for the next.

        By default the exact `norm`, if it is that cheap. Spectral norms iterate from the singular
        vectors of the previous call, and so give a lower bound, close if the weight changes slowly.
        """
        return self.norm(weight), vectors
