"""The interface of manifolds: the methods that each supplies, and the laws that they keep."""

from __future__ import annotations

import abc
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PRNGKeyArray

from manifoldmuon._internal.arguments import check_axes, check_dtype, check_kind, check_number
from manifoldmuon._internal.matrices import arrays
from manifoldmuon._internal.matrices.arrays import Floats, Matrices, Tall
from manifoldmuon._internal.matrices.powers_of_two import scale_to_unit_exponent
from manifoldmuon._internal.matrices.rounding import keep_if_zero, noise_share, scale_invariant
from manifoldmuon._internal.scales import ScaleRule, scale_of
from manifoldmuon._internal.values import Value
from manifoldmuon.manifolds._layout import AxisNumbers, Layout
from manifoldmuon.manifolds.solvers import DouglasRachford, Steepest
from manifoldmuon.norms import Norm, Spectral


class Manifold(Value, abc.ABC):
    """A space of weights with a norm for its steps: a frozen, hashable value without arrays.

    The trailing `ndim` axes of an array are one point; all leading axes are independent copies,
    which a geometry declares (see `stacked`).
    Methods take the point first and must be traceable: they are traced outside of `jax.jit`, too.
    Dtype in = dtype out; arithmetic is done in float32 or wider. A manifold is not a pytree node.

    By default the norm of a direction is relative to the manifold's scale, so that a learning rate
    is an angle to first order: on a sphere of radius r a direction has Euclidean norm r, on the
    Stiefel manifold of scale s it has spectral norm at most s. (A retraction that projects turns by
    arctan(lr): an eighth of a turn at rate 1.)

    Laws (checked by `manifoldmuon.testing.check_manifold`):

    1. Shapes and dtypes are kept; gaps, residuals and distances are one number per point.
    2. `project` is idempotent and returns a point of the set, the nearest unless checked with
       `nearest=False`; `distance` is zero on the set and grows away from it; `random_point` is on
       the set, depends on its key and leaves out no half; `for_training` keeps set and norm.
    3. `project_tangent(p, .)` is linear (unless `has_boundary`), idempotent and orthogonal.
    4. `steepest` is tangent, `norm.norm(direction) <= 1`, it is the same for G and c*G with c > 0,
       and its gap is a true bound.
    5. A zero gradient gives a zero direction, and `retract(p, 0) == p`.
    6. d/dt retract(p, t*v) at 0 is v, and the result is on the set.
    7. A stack of points gives the results of a loop over the points, and a NaN stays visible, in
       its own copy.
    8. Unless `constrained`, `project` and `project_tangent` change nothing, and `retract` adds.

    Attributes:
      constrained: False for flat space: optimizers decay its weights, and add updates in place of a
        retraction.
      has_boundary: True if the gradient at a minimum need not be zero: see `minimize`.
      factor_ndim: the number of trailing axes of a factor, where the set is a product: 1 for a
        table of rows, 0 for flat space; otherwise `ndim`.

    Examples:
      >>> sphere, point = Hypersphere(5.0), jnp.array([3.0, 4.0])
      >>> found = sphere.steepest(point, jnp.array([0.0, 1.0]))
      >>> [f"{x:.2f}" for x in sphere.retract(point, -0.1 * found.direction)]
      ['3.38', '3.68']
    """

    constrained: bool = True
    has_boundary: bool = False

    def __init_subclass__(cls, **arguments):
        super().__init_subclass__(**arguments)
        for name in ("project_tangent", "steepest", "retract"):
            if name in vars(cls):
                setattr(cls, name, _guarded(vars(cls)[name], name))
        for name in ("project", "distance"):
            if name in vars(cls):
                setattr(cls, name, _of_fitting_points(vars(cls)[name]))
        if "random_point" in vars(cls):
            cls.random_point = _checked(cls.random_point)

    @property
    @abc.abstractmethod
    def ndim(self) -> int:
        """Return the number of trailing axes of a point."""

    @property
    @abc.abstractmethod
    def norm(self) -> Norm:
        """Return the norm in which directions are steepest, scale included."""

    @property
    def factor_ndim(self) -> int:
        return self.ndim

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise `ValueError` if no point fits `shape`; by default, if it has too few axes."""
        check_axes(self, shape)

    @abc.abstractmethod
    def project(self, point: Floats) -> Floats:
        """Return the nearest point of the set, in the Frobenius norm.

        At a tie (a rank-deficient matrix, a zero vector) the choice is deterministic, and each
        manifold documents it.
        """

    @abc.abstractmethod
    def project_tangent(self, point: Floats, vector: Floats) -> Floats:
        """Project `vector` orthogonally onto the tangent space at `point`.

        A subclass gets vectors of moderate size, scaled by a power of two.
        """

    def init_dual(self, shape: tuple[int, ...]) -> Any:
        """Return the cold start of `steepest` for points of this shape; `()` for a closed form."""
        return ()

    def _dual(self, dual: Any, shape: tuple[int, ...]) -> Any:
        return self.init_dual(shape) if isinstance(dual, tuple) and not dual else dual

    @abc.abstractmethod
    def steepest(self, point: Floats, grad: Floats, dual: Any = ()) -> Steepest:
        """Return the tangent direction of norm at most 1 with the largest `<grad, direction>`.

        Args:
          point: a point on or near the set.
          grad: the gradient, at any scale.
          dual: the dual variables returned for a nearby problem, or `init_dual`; by default a cold
            start.

        A subclass computes in float32 or wider. Its gradient arrives so, its point in its own
        dtype: in float16 and bfloat16 it is off the set by rounding, and a factor of the direction
        becomes zero if the gradient has no larger tangent part than its rounding to that dtype. The
        direction is returned in the dtype of the gradient, and the gap includes all of this.
        """

    @abc.abstractmethod
    def retract(self, point: Floats, vector: Floats) -> Floats:
        """Return a point of the set near `point + vector`, for a tangent `vector`.

        A zero `vector` leaves the point as it is, whatever a subclass returns.
        """

    @abc.abstractmethod
    def random_point(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype) -> Floats:
        """Return a random point, uniform on the set if possible; shape and dtype are checked."""

    @abc.abstractmethod
    def distance(self, point: Floats) -> Floats:
        """Return the distance of each point from the set, relative to the scale; leading axes.

        For matrices the largest `|sigma_i / scale - 1|`, for vectors `|norm / scale - 1|`,
        for flat space 0; otherwise the length of `point - project(point)`.
        """

    def for_training(self) -> "Manifold":
        """Return the same set with cheaper steps; by default with `norm.for_training()`.

        * Spectral norms without a method take `linalg.BOUNDED_MSIGN`.
        * Multipliers take one or two signs per step; `EmbeddingRows` in other norms up to four
          maps.
        * `Stiefel` takes `ProjectedPolar()`.
        * Balls and bands leave their boundary to the retraction; the default retraction of a ball
          becomes `Clip(TRAINING_MSIGN)`.

        Gaps include the cost; for balls and bands they then refer to flat space. A norm relative to
        the scale becomes fixed: choose the scale first.
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
        """Return this manifold for arrays of another layout; see `Layout` for the arguments."""
        return LaidOut(self, Layout(in_axes, out_axes, taps, ndim, in_blocks, out_blocks))

    def transposed(self) -> "LaidOut":
        """Return this manifold with the trailing two axes swapped.

        For Flax kernels (in, out) and tables (d, vocabulary).
        """
        return self.with_axes(in_axes=-2, out_axes=-1)

    def stacked(self, axes: int = 1) -> "Manifold | LaidOut":
        """Return this manifold for arrays with leading axes of independent copies.

        For scanned layers and for experts. Steps are the same without it, but `optim` warns of
        copies that nobody declared, since a kernel (d, heads, head_dim) is not a stack of d
        matrices. A manifold of vectors does not change: each row is a point.

        Args:
          axes: the number of leading axes; 2 for layers of experts.
        """
        check_number("stacked(axes)", axes, within="[0, inf)", whole=True)
        if self.ndim < 2 or axes == 0:
            return self
        return LaidOut(self, Layout(ndim=self.ndim + axes))


def _checked(random_point: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(random_point)
    def checked(self: Manifold, key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        check_dtype(f"{type(self).__name__}.random_point(dtype)", dtype)
        self.check_shape(shape)
        return random_point(self, key, shape, dtype)

    return checked


def _of_fitting_points(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def checked(self: Manifold, point: Any) -> Any:
        self.check_shape(np.shape(point))
        return method(self, point)

    return checked


def _guarded(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Let the formula of a method treat bad shapes, tiny and huge numbers, rounding, zero steps.

    A tangent projection gets vectors of moderate size, `steepest` gradients in float32 or wider.
    """
    names = tuple(inspect.signature(method).parameters)[1:3]
    first, second = names if len(names) == 2 else ("point", "vector")

    @functools.wraps(method)
    def guarded(self: Manifold, *args: Any, **options: Any) -> Any:
        given = dict(zip((first, second), args, strict=False)) | options
        if not {first, second} <= set(given):
            return method(self, *args, **options)  # refuses them
        point, vector = given[first], given[second]
        if np.shape(point) != np.shape(vector):
            raise ValueError(
                f"{type(self).__name__}.{name}: {second} has the shape {np.shape(vector)}, and"
                f" {first} {np.shape(point)}. Give both the same shape"
            )
        self.check_shape(np.shape(point))
        arrays.check_floating(jnp.result_type(point))
        arrays.check_floating(jnp.result_type(vector))
        ndim = self.factor_ndim
        if name != "steepest" and not self.constrained:
            return method(self, *args, **options)
        if name == "retract":
            return keep_if_zero(point, vector, method(self, *args, **options), ndim)
        if name == "project_tangent":
            return scale_invariant(lambda v: method(self, point, v), vector, ndim)
        wide = arrays.upcast(vector)
        args, options = args[2:], {k: x for k, x in options.items() if k not in (first, second)}
        result = method(self, point, wide, *args, **options)
        if not isinstance(result, Steepest):
            raise TypeError(
                f"{type(self).__name__}.steepest returns a Steepest (direction, dual, residual,"
                f" gap); got a {type(result).__name__}"
            )
        if self.constrained and (arrays.is_short(point.dtype) or arrays.is_short(vector.dtype)):
            share = noise_share(point.dtype, vector.dtype)
            result = _without_noise(self, result, point, wide, share)
        return result.rounded(vector.dtype, wide, ndim)

    return guarded


def _without_noise(
    manifold: Manifold, result: Steepest, point: Floats, grad: Floats, share: float
) -> Steepest:
    """Set the direction to zero in each factor where the gradient is normal up to rounding.

    Where a direction gains more than `share ||g|| ||a||`, the tangent part of g is longer than
    `share ||g||`: only few gradients have to be projected.
    """
    ndim, (scaled, _) = manifold.factor_ndim, scale_to_unit_exponent(grad, manifold.ndim)
    gained = arrays.inner_product(scaled, result.direction, ndim)
    length, whole = (arrays.frobenius_norm(x, ndim) for x in (result.direction, scaled))
    few = (gained <= share * whole * length) & (length > 0)  # false for a NaN

    def nearly_normal(vector: Floats) -> Bool[Array, "..."]:
        tangent = manifold.project_tangent(point, -vector)
        return few & (arrays.frobenius_norm(tangent, ndim) <= share * whole)

    noise = jax.lax.cond(jnp.any(few), nearly_normal, lambda _: few, scaled)
    gap = result.gap_without(jnp.where(noise, jnp.maximum(gained, 0), 0), scaled)
    direction = jnp.where(arrays.expand_trailing(noise, ndim), 0, result.direction)
    factors, entries = tuple(range(gap.ndim, noise.ndim)), arrays.trailing(grad, manifold.ndim)
    nothing = jnp.any(noise, factors) & jnp.all(direction == 0, entries)
    return result._replace(direction=direction, gap=jnp.where(nothing, 1, gap))


class ScaledMatrices(Manifold):
    """Base of matrix manifolds with a scale; by default steps have a spectral norm relative to it.

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

    def _unit(self, point: Matrices) -> Tall:
        """Return the point, tall and of unit scale."""
        return arrays.tall(arrays.upcast(point) / self._scale(point))


_spectral = functools.lru_cache(Spectral)  # validates each scale once

AnyManifold = TypeVar("AnyManifold", bound=Manifold)


@dataclasses.dataclass(frozen=True)
class LaidOut(Value):
    """A manifold for arrays of another layout: an entry of a geometry, not itself a manifold.

    Made by `Manifold.with_axes`, `transposed` and `stacked`. Optimizers rearrange the array into
    the manifold's layout once, and move the results back.

    Attributes:
      manifold: the manifold of the rearranged array; its points have at least two axes.
      layout: the layout of the array.
    """

    manifold: Manifold
    layout: Layout

    def __post_init__(self):
        check_kind(self, "manifold", Manifold)
        check_kind(self, "layout", Layout)
        if self.manifold.ndim < 2:
            raise ValueError(
                f"a layout arranges matrices, but a point of {type(self.manifold).__name__} has "
                f"{self.manifold.ndim} axes; use the manifold without a layout"
            )
        layout, taken = self.layout, self.manifold.ndim - 2
        given = len(cast(tuple[int, ...], layout.taps))
        blocked = (layout.in_blocks, layout.out_blocks) != (1, 1)
        if taken and taken != given and (given or blocked):
            raise ValueError(
                f"a point of {self.manifold} has {taken} axes of taps, and {self.layout} names"
                f" {given}: write ConvRMSToRMS(tap_axes={given}), or Hypersphere(ndim={given + 2})"
            )

    @property
    def ndim(self) -> int:
        """Return the number of trailing axes of a weight, with its declared copies."""
        return max(self.layout.ndim, self.manifold.ndim)

    def stacked(self, axes: int = 1) -> "LaidOut":
        """Return this entry for arrays with further leading axes of independent copies."""
        check_number("stacked(axes)", axes, within="[0, inf)", whole=True)
        layout = dataclasses.replace(self.layout, ndim=self.ndim + axes)
        return dataclasses.replace(self, layout=layout)

    def for_training(self) -> "LaidOut":
        """Return the same layout of `Manifold.for_training`."""
        return dataclasses.replace(self, manifold=self.manifold.for_training())

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise `ValueError` if no point fits an array of this shape."""
        self.layout.check_shape(shape)
        shapes, layout = [tuple(shape)], self.layout
        if layout.blocks:
            at, layout = layout.blocks[0][0] % len(shape), layout.of_block()
            lengths = [end - start for _, start, end in self.layout.blocks]
            shapes = [(*shape[:at], length, *shape[at + 1 :]) for length in lengths]
        for block in shapes:
            try:
                self.manifold.check_shape(layout.inner_shape(block))
            except ValueError as error:
                raise ValueError(
                    f"{error} ({self.layout} arranges the array of shape {tuple(shape)})"
                ) from None


def require_projection(manifold: Manifold, solver: object) -> None:
    """Raise `ValueError` if the solver needs a projection that the norm of steps lacks."""
    if isinstance(solver, DouglasRachford) and type(manifold.norm).project is Norm.project:
        raise ValueError(
            f"{type(manifold).__name__}.solver takes step_norm.project, which {manifold.norm!r} "
            "does not define: define it, or choose a solver that takes the duality map alone"
        )


def with_fast_norm(manifold: AnyManifold, **changes: Any) -> AnyManifold:
    """Return a manifold with `norm.for_training()` as `step_norm`, and other changes."""
    norm = manifold.norm.for_training()
    changes |= {} if norm == manifold.norm else {"step_norm": norm}
    return dataclasses.replace(cast(Any, manifold), **changes)


Entry = Manifold | LaidOut
"""An entry of a geometry, beside None."""
