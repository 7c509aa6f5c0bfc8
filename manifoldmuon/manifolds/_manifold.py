"""The interface of a weight space: what every manifold supplies, and the laws it keeps."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from manifoldmuon._internal.arguments import shown
from manifoldmuon._internal.arrays import expand_trailing, frobenius_norm, nonzero_or_one
from manifoldmuon._internal.powers_of_two import normalize, scale_to_unit_exponent
from manifoldmuon.manifolds._layout import AxisNumbers, Layout
from manifoldmuon.manifolds.solvers import DouglasRachford, Steepest
from manifoldmuon.norms import Norm


class Manifold(abc.ABC):
    """A space of weights and the norm of its steps, as a frozen, hashable value without arrays.

    The trailing `ndim` axes of an array are one point; all leading axes are independent copies.
    Methods take the point first, and are traced outside of `jax.jit`, too. Dtype in = dtype out;
    arithmetic is done in float32 or wider. A manifold is not a pytree node.

    The norm of a direction is by default relative to the manifold's own scale, so that a learning
    rate is an angle to first order: a direction on a sphere of radius r has Euclidean norm r, a
    direction on the Stiefel manifold of scale s has spectral norm at most s. (A retraction that
    projects turns by arctan(lr): at rate 1 by an eighth of a turn.)

    Laws (checked by `manifoldmuon.testing.check_manifold`):

    * `project` is idempotent and lands on the set, also from zero; `distance` is zero there;
    * `tangent(p, .)` is linear and idempotent;
    * `steepest` is tangent, `norm.norm(direction) <= 1`, it is the same for G and c*G with c > 0,
      a zero gradient gives a zero direction, and its gap is a true bound;
    * `retract(p, 0) == p`, d/dt retract(p, t*v) at 0 is v, and the result is on the set;
    * a stack of points gives what a loop over them gives;
    * unless `constrained`, `project` and `tangent` change nothing, and `retract` is addition.
    """

    @property
    @abc.abstractmethod
    def ndim(self) -> int:
        """How many trailing axes make one point."""

    @property
    @abc.abstractmethod
    def norm(self) -> Norm:
        """The norm, scale included, in which directions are steepest."""

    @property
    def constrained(self) -> bool:
        """True unless the set is all of space.

        Optimizers decay the weights of unconstrained leaves, and add to them instead of
        retracting.
        """
        return True

    @abc.abstractmethod
    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raises `ValueError`, saying what arrived and what to do, where no point fits `shape`."""

    @abc.abstractmethod
    def project(self, point: Float[Array, "..."]) -> Float[Array, "..."]:
        """The nearest point of the set, in the Frobenius norm.

        Where several are equally near, at a rank-deficient matrix or a zero vector, it is one of
        them, always the same: the manifold says which.
        """

    @abc.abstractmethod
    def project_tangent(
        self, point: Float[Array, "..."], vector: Float[Array, "..."]
    ) -> Float[Array, "..."]:
        """The orthogonal projection of `vector` onto the tangent space at `point`."""

    def init_dual(self, shape: tuple[int, ...]) -> Any:
        """The cold start of `steepest` for points of this shape; `()` for a closed form."""
        return ()

    @abc.abstractmethod
    def steepest(
        self, point: Float[Array, "..."], grad: Float[Array, "..."], dual: Any
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

    def fast(self) -> "Manifold":
        """This set at the price of a training step, where that differs from what is asked for.

        Norms take `linalg.BOUNDED_MSIGN` unless they name a method, multipliers one or two signs a
        step, Stiefel points `solvers.FAST`; balls and bands leave their boundary to the retraction,
        which in a ball is `Clip(TRAINING_MSIGN)` where it is the default. Certificates say what it
        costs; those of balls and bands are of flat space then, and know no boundary. A norm that
        was relative to the scale is fixed: choose the scale first.
        """
        return self

    def with_axes(
        self,
        in_axes: AxisNumbers = -1,
        out_axes: AxisNumbers = -2,
        taps: AxisNumbers = (),
        ndim: int = 0,
        *,
        in_blocks: int = 1,
        out_blocks: int = 1,
    ) -> "LaidOut":
        """This manifold for arrays of another layout; see `Layout` for the arguments."""
        return LaidOut(self, Layout(in_axes, out_axes, taps, ndim, in_blocks, out_blocks))

    def transposed(self) -> "LaidOut":
        """The trailing two axes swapped: Flax kernels (in, out), tables (d, vocabulary)."""
        return self.with_axes(in_axes=-2, out_axes=-1)


AnyManifold = TypeVar("AnyManifold", bound=Manifold)


@dataclasses.dataclass(frozen=True)
class LaidOut:
    """A manifold for arrays of another layout: an entry of a geometry, not itself a manifold.

    Made by `Manifold.with_axes` and `Manifold.transposed`. Optimizers bring the array into the
    manifold's layout, once, and the results back.

    Attributes:
      manifold: what the rearranged array belongs to; its points have at least two axes.
      layout: how the array is laid out.
    """

    manifold: Manifold
    layout: Layout

    def __post_init__(self):
        require_kind(self, "manifold", Manifold)
        require_kind(self, "layout", Layout)
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
        """Raises `ValueError` where no point fits an array of this shape."""
        self.layout.check_shape(shape)
        inner = self.layout.inner_shape(shape)
        try:
            self.manifold.check_shape(inner)
        except ValueError as error:
            raise ValueError(
                f"{error} ({self.layout} made that of the shape {tuple(shape)})"
            ) from None


def require_axes(manifold: Manifold, shape: tuple[int, ...]) -> None:
    """Raises `ValueError` where `shape` has too few axes for one point of `manifold`."""
    if len(shape) < manifold.ndim:
        raise ValueError(
            f"{type(manifold).__name__} takes the trailing {manifold.ndim} axes of an array as one "
            f"point, but the shape {tuple(shape)} has {len(shape)}; use a manifold for fewer axes, "
            f"such as Euclidean(Frobenius(ndim={len(shape)}))"
        )


def require_norm(manifold: Manifold, *kinds: type[Norm]) -> None:
    """Raise `ValueError` for a norm of steps that has no solver here, or is for other axes."""
    if not isinstance(norm := manifold.norm, kinds):
        raise ValueError(_wrong_kind(manifold, "step_norm", kinds, norm))
    if norm.ndim != manifold.ndim:
        name, ndim = type(manifold).__name__, manifold.ndim
        raise ValueError(f"{name}.step_norm must be for {ndim} axes; got {shown(norm)}")


def require_kind(manifold: Manifold | LaidOut, field: str, *kinds: type) -> None:
    """Raises `TypeError` where a field of a manifold is of none of these kinds."""
    if not isinstance(value := getattr(manifold, field), kinds):
        raise TypeError(_wrong_kind(manifold, field, kinds, value))


def _wrong_kind(holder: object, field: str, kinds: tuple[type, ...], value: object) -> str:
    names = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
    hint = "; write an instance, with parentheses" if callable(value) else ""
    return f"{type(holder).__name__}.{field} must be {names}; got {shown(value)}{hint}"


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


def stay_if_still(
    point: Float[Array, "..."],
    vector: Float[Array, "..."],
    moved: Float[Array, "..."],
    ndim: int,
) -> Float[Array, "..."]:
    """`moved`, except that a point whose step is zero is returned untouched.

    Rounding would move it by some 1e-8, and a point that cannot be normalised (all zeros) would
    become NaN: a zero update must leave both alone. A NaN in the step is not a zero.
    """
    axes = tuple(range(-ndim, 0))
    still = jnp.all(vector == 0, axis=axes, keepdims=True)
    return jnp.where(still, point, moved.astype(point.dtype))


def euclidean_direction(
    grad: Float[Array, "..."], tangent: Callable[[Any], Any], ndim: int, magnified: float = 1.0
) -> tuple[Float[Array, "..."], Float[Array, "..."], Float[Array, "..."]]:
    """The direction of the tangent part of each gradient: steepest in the Euclidean norm.

    A gradient that is normal to the set has a tangent part made of rounding errors alone; dividing
    it by its own length would turn noise into a full step. Below a few units of rounding, relative
    to the gradient, the direction is therefore zero.

    Args:
      grad: gradients at any scale, in their own dtype: it says what they are rounded to.
      tangent: the orthogonal projection onto the tangent space, of arrays of moderate size.
      ndim: how many trailing axes make one gradient.
      magnified: by what the projection magnifies rounding errors.

    Returns:
      `(direction, gap, residual)`: unit or zero arrays, float32 or wider; the gap of each, with
      what rounding may have turned it by; and how much of it, before a second projection, was
      normal.
    """
    scaled, _ = scale_to_unit_exponent(grad, ndim)
    part = tangent(scaled)
    length, whole = frobenius_norm(part, ndim), frobenius_norm(scaled, ndim)
    unit = float(jnp.finfo(scaled.dtype).eps)
    noise = 8 * magnified * unit * whole
    heard = ~(length <= jnp.maximum(noise, rounding_loss(grad.dtype) * whole))
    # Once more: where the tangent part is small, the first pass left relatively much behind.
    direction = normalize(part, ndim)
    again = tangent(direction)
    residual = jnp.where(heard, frobenius_norm(direction - again, ndim), 0)
    turned = (noise / nonzero_or_one(length)) ** 2
    gap = jnp.where(whole == 0, 0, jnp.where(heard, turned + 4 * unit, 1))
    # Not where the length is above the noise: a NaN has to stay.
    return jnp.where(expand_trailing(heard, ndim), normalize(again, ndim), 0), gap, residual


def never_fused(product: Float[Array, "..."]) -> Float[Array, "..."]:
    """Entry by entry products, rounded a bit further: what is subtracted from vectors.

    XLA may compute a difference once for its length and again for its entries, and fuse product and
    difference into one rounding in one of them only: a small difference would be two vectors.
    """
    info = jnp.finfo(product.dtype)
    return jax.lax.reduce_precision(product, info.nexp, info.nmant - 1)


def rounding_loss(dtype) -> float:
    """Return what rounding to this dtype costs a direction, relatively; 0 for float32."""
    eps = float(jnp.finfo(dtype).eps)
    return eps / 2 if eps > jnp.finfo(jnp.float32).eps else 0.0


def rounded(answer: Steepest, grad: Float[Array, "..."]) -> Steepest:
    """An answer in the dtype of the gradient, with what that costs in its gap."""
    gap, loss = answer.gap, rounding_loss(grad.dtype)
    gap = gap + loss * (gap > 0) if loss else gap
    return answer._replace(direction=answer.direction.astype(grad.dtype), gap=gap)
