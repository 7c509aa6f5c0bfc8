"""The interface of a weight space: what every manifold supplies, and the laws it keeps."""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import Any, ClassVar, TypeVar, cast

from jaxtyping import PRNGKeyArray

from manifoldmuon._internal.arguments import check_axes, check_kind
from manifoldmuon._internal.arrays import Floats, Matrices
from manifoldmuon._internal.scales import ScaleRule, scale_of
from manifoldmuon._internal.values import Value
from manifoldmuon.manifolds._layout import AxisNumbers, Layout
from manifoldmuon.manifolds.solvers import DouglasRachford, Steepest
from manifoldmuon.norms import Norm, Spectral

FAR = 0.005
"""Relative distance from the set beyond which a point stands for its projection."""


class Manifold(Value, abc.ABC):
    """A space of weights and the norm of its steps, as a frozen, hashable value without arrays.

    The trailing `ndim` axes of an array are one point; all leading axes are independent copies.
    Methods take the point first, and are traced outside of `jax.jit`, too. Dtype in = dtype out;
    arithmetic is done in float32 or wider. A manifold is not a pytree node.

    The norm of a direction is by default relative to the manifold's own scale, so that a learning
    rate is an angle to first order: a direction on a sphere of radius r has Euclidean norm r, a
    direction on the Stiefel manifold of scale s has spectral norm at most s. (A retraction that
    projects turns by arctan(lr): at rate 1 by an eighth of a turn.)

    Laws (checked by `manifoldmuon.testing.check_manifold`):

    1. Shapes and dtypes are kept; gaps, residuals and distances are one number for each point.
    2. `project` is idempotent and lands on the set, on the nearest point (or is checked with
       `nearest=False`); `distance` is zero there and grows with the distance from it;
       `random_point` is on the set, by its key; `fast` is the same set.
    3. `project_tangent(p, .)` is linear (unless `has_boundary`), idempotent and orthogonal.
    4. `steepest` is tangent, `norm.norm(direction) <= 1`, it is the same for G and c*G with c > 0,
       and its gap is a true bound.
    5. A zero gradient gives a zero direction, and `retract(p, 0) == p`.
    6. d/dt retract(p, t*v) at 0 is v, and the result is on the set.
    7. A stack of points gives what a loop over them gives, and a NaN stays visible, in its copy.
    8. Unless `constrained`, `project` and `project_tangent` change nothing, and `retract` adds.

    Attributes:
      constrained: False for all of space, whose weights optimizers decay, and add to in place of a
        retraction.
      has_boundary: True where the gradient at a minimum need not be zero: see `minimize`.

    Examples:
      >>> sphere, point = Hypersphere(5.0), jnp.array([3.0, 4.0])
      >>> found = sphere.steepest(point, jnp.array([0.0, 1.0]))
      >>> [f"{x:.2f}" for x in sphere.retract(point, -0.1 * found.direction)]
      ['3.38', '3.68']
    """

    constrained: bool = True
    has_boundary: bool = False

    @property
    @abc.abstractmethod
    def ndim(self) -> int:
        """Return how many trailing axes make one point."""

    @property
    @abc.abstractmethod
    def norm(self) -> Norm:
        """Return the norm, scale included, in which directions are steepest."""

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise `ValueError` where no point fits `shape`: here, where it has too few axes."""
        check_axes(self, shape)

    @abc.abstractmethod
    def project(self, point: Floats) -> Floats:
        """Return the nearest point of the set, in the Frobenius norm.

        Where several are equally near, at a rank-deficient matrix or a zero vector, it is one of
        them, always the same: the manifold says which.
        """

    @abc.abstractmethod
    def project_tangent(self, point: Floats, vector: Floats) -> Floats:
        """Project `vector` orthogonally onto the tangent space at `point`."""

    def init_dual(self, shape: tuple[int, ...]) -> Any:
        """Return the cold start of `steepest` for points of this shape; `()` for a closed form."""
        return ()

    def _dual(self, dual: Any, shape: tuple[int, ...]) -> Any:
        return self.init_dual(shape) if isinstance(dual, tuple) and not dual else dual

    @abc.abstractmethod
    def steepest(self, point: Floats, grad: Floats, dual: Any = ()) -> Steepest:
        """Return the tangent direction of norm at most 1 with the largest `<grad, direction>`.

        Args:
          point: a point of the set, or near it.
          grad: the gradient at any scale.
          dual: what the last, nearby problem returned, or `init_dual`; by default a cold start.
        """

    @abc.abstractmethod
    def retract(self, point: Floats, vector: Floats) -> Floats:
        """Return a point of the set near `point + vector`, for a tangent `vector`."""

    @abc.abstractmethod
    def random_point(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype) -> Floats:
        """Return a random point (uniform on the set where that means something)."""

    @abc.abstractmethod
    def distance(self, point: Floats) -> Floats:
        """Return how far each point is from the set, relative to the scale; leading axes.

        For matrices the largest `|sigma_i / scale - 1|`, for vectors `|norm / scale - 1|`,
        for flat space 0.
        """

    def fast(self) -> "Manifold":
        """Return this set at the price of a training step; here with `norm.fast()` for its steps.

        Norms take `linalg.BOUNDED_MSIGN` unless they name a method, multipliers one or two signs a
        step, Stiefel points `ProjectedPolar()`; balls and bands leave their boundary to the
        retraction, which in a ball is `Clip(TRAINING_MSIGN)` where it is the default. Certificates
        say what it costs; those of balls and bands are of flat space then. A norm that
        was relative to the scale is fixed: choose the scale first.
        """
        return with_fast_norm(self) if hasattr(self, "step_norm") else self

    def with_axes(
        self,
        in_axes: AxisNumbers = -1,
        out_axes: AxisNumbers = -2,
        taps: AxisNumbers = (),
        ndim: int = 0,
        *,
        in_blocks: int = 1,
        out_blocks: int | tuple[int, ...] = 1,
    ) -> "LaidOut":
        """This manifold for arrays of another layout; see `Layout` for the arguments."""
        return LaidOut(self, Layout(in_axes, out_axes, taps, ndim, in_blocks, out_blocks))

    def transposed(self) -> "LaidOut":
        """The trailing two axes swapped: Flax kernels (in, out), tables (d, vocabulary)."""
        return self.with_axes(in_axes=-2, out_axes=-1)


class ScaledMatrices(Manifold):
    """Base of sets of matrices whose steps are measured by spectral norm, relative to the scale.

    A subclass is a dataclass with these fields.
    """

    scale: float | ScaleRule
    step_norm: Norm | None
    ndim: ClassVar[int] = 2

    @property
    def norm(self) -> Norm:
        return _spectral(scale=self.scale) if self.step_norm is None else self.step_norm

    def _scale(self, point: Matrices) -> float:
        return scale_of(self.scale, point.shape[-2:])


_spectral = functools.lru_cache(Spectral)  # checked once

AnyManifold = TypeVar("AnyManifold", bound=Manifold)


@dataclasses.dataclass(frozen=True)
class LaidOut(Value):
    """A manifold for arrays of another layout: an entry of a geometry, not itself a manifold.

    Made by `Manifold.with_axes` and `Manifold.transposed`. Optimizers bring the array into the
    manifold's layout, once, and the results back.

    Attributes:
      manifold: what the rearranged array belongs to; its points have at least two axes.
      layout: how the array is laid out.

    Examples:
      >>> Stiefel().transposed().ndim
      2
    """

    manifold: Manifold
    layout: Layout

    def __post_init__(self):
        check_kind(self, "manifold", Manifold)
        check_kind(self, "layout", Layout)
        if self.manifold.ndim < 2:
            raise ValueError(
                f"a layout arranges matrices, but a point of {type(self.manifold).__name__} has "
                f"{self.manifold.ndim} axes; use that manifold without one"
            )

    @property
    def ndim(self) -> int:
        """How many trailing axes of the array make one weight."""
        return max(self.layout.ndim, self.manifold.ndim)

    def fast(self) -> "LaidOut":
        """The same layout of `Manifold.fast`."""
        return dataclasses.replace(self, manifold=self.manifold.fast())

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise `ValueError` where no point fits an array of this shape."""
        self.layout.check_shape(shape)
        parts, layout = [tuple(shape)], self.layout
        if cut := layout.cut:
            at, layout = cut.axis % len(shape), layout.of_parts()
            parts = [(*shape[:at], length, *shape[at + 1 :]) for length in cut.lengths]
        for part in parts:
            try:
                self.manifold.check_shape(layout.inner_shape(part))
            except ValueError as error:
                raise ValueError(
                    f"{error} ({self.layout} made that of the shape {tuple(shape)})"
                ) from None


def require_projection(manifold: Manifold, solver: object) -> None:
    """Raise `ValueError` where the solver takes a projection that the norm of steps lacks."""
    if isinstance(solver, DouglasRachford) and type(manifold.norm).project is Norm.project:
        raise ValueError(
            f"{type(manifold).__name__}.solver takes step_norm.project, which {manifold.norm!r} "
            "does not define: define it, or choose a solver that takes the duality map alone"
        )


def with_fields(manifold: AnyManifold, **changes: Any) -> AnyManifold:
    """`dataclasses.replace`, for one of the package's manifolds."""
    return dataclasses.replace(cast(Any, manifold), **changes)


def with_fast_norm(manifold: AnyManifold, **changes: Any) -> AnyManifold:
    """A manifold whose `step_norm` is `norm.fast()`, where that differs, and other fields."""
    norm = manifold.norm.fast()
    return with_fields(manifold, **changes | ({} if norm == manifold.norm else {"step_norm": norm}))
