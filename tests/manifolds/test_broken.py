"""`check_manifold` and `check_slopes` detect manifolds with a single defect."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from manifoldmuon.manifolds import Hypersphere, SpectralBall, Stiefel
from manifoldmuon.manifolds.retractions import QR
from manifoldmuon.testing import check_manifold, check_slopes


class OffTheSet(Hypersphere):
    def retract(self, point, vector):
        return point + vector


class NotTangent(Hypersphere):
    def project_tangent(self, point, vector):
        return vector


class NotOrthogonal(Hypersphere):
    """Projects idempotently onto the tangent space, but along a slanted direction."""

    def project_tangent(self, point, vector):
        slanted = point + jnp.roll(point, 1)
        radial = jnp.sum(point * vector) / jnp.sum(point * slanted)
        return vector - slanted * radial


class ForgetsThePoint(Hypersphere):
    """Drops the derivative with respect to the point: Hessians are wrong."""

    def project_tangent(self, point, vector):
        return super().project_tangent(jax.lax.stop_gradient(point), vector)


class EpsilonInTheDenominator(Hypersphere):
    def steepest(self, point, grad, dual):
        tangent = self.project_tangent(point, grad)
        length = jnp.linalg.norm(tangent, axis=-1, keepdims=True)
        answer = super().steepest(point, grad, dual)
        return answer._replace(direction=tangent / (length + 1e-8))


class GapTooSmall(Hypersphere):
    """Returns half the best direction with the gap of the whole."""

    def steepest(self, point, grad, dual):
        answer = super().steepest(point, grad, dual)
        return answer._replace(direction=answer.direction / 2)


class SlightlyShort(Hypersphere):
    """Returns 97 % of the best direction with a gap of zero."""

    def steepest(self, point, grad, dual):
        answer = super().steepest(point, grad, dual)
        direction = (0.97 * answer.direction).astype(grad.dtype)
        return answer._replace(direction=direction, gap=0 * answer.gap)


class TangentGradient(Stiefel):
    """Returns the tangent part of the gradient with the gap of the steepest direction."""

    def steepest(self, point, grad, dual=()):
        tangent = self.project_tangent(point, grad)
        size, whole = (self.norm.norm(x)[..., None, None] for x in (tangent, grad))
        noise = size <= 1e-5 * whole
        direction = jnp.where(noise, 0, tangent / jnp.where(noise, 1, size))
        return super().steepest(point, grad, dual)._replace(direction=direction)


class DirectionAlone(Hypersphere):
    def steepest(self, point, grad, dual):
        return super().steepest(point, grad, dual).direction


class NoGap(Hypersphere):
    def steepest(self, point, grad, dual):
        return super().steepest(point, grad, dual)._replace(gap=None)


class Descends(Hypersphere):
    def steepest(self, point, grad, dual):
        answer = super().steepest(point, grad, dual)
        return answer._replace(direction=-answer.direction)


class SwallowsNaN(Hypersphere):
    def steepest(self, point, grad, dual):
        return super().steepest(point, jnp.nan_to_num(grad), dual)


class MixesCopies(Hypersphere):
    def steepest(self, point, grad, dual):
        answer = super().steepest(point, grad, dual)
        return answer._replace(direction=answer.direction / jnp.sqrt(answer.gap.size))


class TooFast(Hypersphere):
    def retract(self, point, vector):
        return super().retract(point, 1.1 * vector)


class KeepsTheLength(Hypersphere):
    """Reaches the set only from points near it."""

    def retract(self, point, vector):
        length = jnp.linalg.norm(point, axis=-1, keepdims=True)
        return super().retract(point, vector) * jnp.where(jnp.abs(length - 1) < 0.01, 1, length)


class Widens(Hypersphere):
    def project_tangent(self, point, vector):
        return super().project_tangent(point, vector).astype(jnp.float32)


class BeginsWithConstants(Hypersphere):
    """Loops with a carry that varies over the mesh only after the first iteration."""

    def retract(self, point, vector):
        nothing = jnp.zeros(point.shape, vector.dtype)
        moved = jax.lax.fori_loop(0, 2, lambda _, moved: moved + vector / 2, nothing)
        return super().retract(point, moved)


class SeesNoDistance(Hypersphere):
    def distance(self, point):
        return 0 * super().distance(point)


class SeesAThousandth(Hypersphere):
    def distance(self, point):
        return super().distance(point) / 1000


class HidesNaNOfPoints(Hypersphere):
    def distance(self, point):
        return jnp.nan_to_num(super().distance(point))


class IgnoresTheKey(Hypersphere):
    def random_point(self, key, shape, dtype):
        return super().random_point(jax.random.key(5), shape, dtype)


class RestsTogether(Hypersphere):
    """Moves no copy if any copy has a zero step."""

    def retract(self, point, vector):
        lengths = jnp.linalg.norm(vector, axis=-1)
        return jnp.where(jnp.any(lengths == 0), point, super().retract(point, vector))


class ProjectsNoneIfOneIsThere(Hypersphere):
    def project(self, point):
        there = jnp.any(self.distance(point) < 1e-6)
        return jnp.where(there, point, super().project(point))


class BallWithoutBoundary(SpectralBall):
    """Wrongly declares that it has no boundary."""

    has_boundary = False


class FastIsAnother(Stiefel):
    def for_training(self):
        return Stiefel(2.0)


BROKEN = [
    (SeesNoDistance, "distance sees how far"),
    (SeesAThousandth, "distance sees how far"),
    (HidesNaNOfPoints, "a NaN in a point stays visible"),
    (IgnoresTheKey, "random_point differs from key to key"),
    (RestsTogether, "stack = loop .moved."),
    (ProjectsNoneIfOneIsThere, "stack = loop .projected."),
    (OffTheSet, "retract lands on the set"),
    (NotTangent, "x - project.x. is normal to the set"),
    (NotOrthogonal, "self-adjoint|is normal"),
    (EpsilonInTheDenominator, "steepest.p, c g. == steepest.p, g."),
    (GapTooSmall, "the gap is a true bound"),
    (SlightlyShort, "the gap is a true bound"),
    (DirectionAlone, "steepest returns a Steepest .*Tracer"),
    (NoGap, "gap"),
    (Descends, "direction ascends"),
    (SwallowsNaN, "a NaN stays visible .direction."),
    (MixesCopies, "stack = loop .direction."),
    (TooFast, "d/dt retract"),
    (KeepsTheLength, "from He: a step ends on the set"),
    (Widens, "dtype in = dtype out .tangent."),
]


@pytest.mark.slow_except("OffTheSet", "GapTooSmall", "NotTangent", "MixesCopies", "SwallowsNaN")
@pytest.mark.parametrize(("broken", "law"), BROKEN, ids=[kind.__name__ for kind, _ in BROKEN])
def test_broken_manifold_is_found(broken, law):
    with pytest.raises(AssertionError, match=f"law broken: .*({law})"):
        check_manifold(broken(), (5,), jax.random.key(0), thorough=False)


def test_undeclared_boundary_is_found():
    with pytest.raises(AssertionError, match=r"3\. law broken: .*where has_boundary is False"):
        check_manifold(
            BallWithoutBoundary(), (5, 3), jax.random.key(0), thorough=False, convex=True
        )


def test_suboptimal_direction_is_found():
    """It reports the steepest direction's gap, about 4e-5 in place of 0.2."""
    with pytest.raises(AssertionError, match=r"4\. law broken: the gap is a true bound"):
        check_manifold(TangentGradient(), (10, 4), jax.random.key(0), thorough=False)


@pytest.mark.slow
def test_fast_variant_on_another_set_is_found():
    with pytest.raises(AssertionError, match=r"2\. law broken: fast\(\) keeps the set"):
        check_manifold(FastIsAnother(), (5, 3), jax.random.key(0))


def test_all_broken_laws_are_named():
    """Laws are named by their numbers in the docstring of `Manifold`."""

    class Several(SeesNoDistance, TooFast, SwallowsNaN):
        pass

    with pytest.raises(AssertionError) as caught:
        check_manifold(Several(), (5,), jax.random.key(0), thorough=False)
    lines = str(caught.value).splitlines()
    assert list(dict.fromkeys(line[:2] for line in lines[:-1])) == ["2.", "6.", "7."]
    assert "`Manifold`" in lines[-1]


class TrustsItsStart(Hypersphere):
    """Correct only from a cold start."""

    def init_dual(self, shape):
        return jnp.zeros(shape, jnp.float32)

    def steepest(self, point, grad, dual):
        used = jnp.where(dual == 0, grad, dual).astype(grad.dtype)
        return super().steepest(point, used)._replace(dual=jnp.sign(grad).astype(jnp.float32))


@pytest.mark.slow
def test_solver_trusting_its_warm_start_is_found():
    with pytest.raises(AssertionError, match="the gap is a true bound"):
        check_manifold(TrustsItsStart(), (5,), jax.random.key(0))


def test_loop_failing_in_shard_map_is_found():
    with pytest.raises(AssertionError, match="inside of jax.shard_map .arguments 1 vary"):
        check_manifold(BeginsWithConstants(), (5,), jax.random.key(0))


def test_callable_manifold_is_found():
    """Optax would treat a callable as a schedule."""

    @dataclasses.dataclass(frozen=True)
    class Callable(Hypersphere):
        def __call__(self, step):
            return step

    with pytest.raises(AssertionError, match="Callable is not callable"):
        check_manifold(Callable(), (5,), jax.random.key(0))


@pytest.mark.parametrize(
    ("broken", "shape", "order", "law"),
    [
        (TooFast(), (5,), 1, "retract.p, t v. = p"),
        (NotOrthogonal(), (5,), 1, "<project_tangent.p, grad f., v>"),
        (Stiefel(retraction=QR()), (5, 3), 2, "= O.t.3."),
        (ForgetsThePoint(), (5,), 2, "Hess f.v."),
    ],
    ids=["TooFast", "NotOrthogonal", "FirstOrder", "ForgetsThePoint"],
)
def test_wrong_slope_is_found(broken, shape, order, law):
    with pytest.raises(AssertionError, match=f"law broken: .*({law}).*slope"):
        check_slopes(broken, shape, jax.random.key(0), order)


def test_gap_below_given_optimum_is_found():
    def optimum(point, grad):
        return 1.01 * float(jnp.linalg.norm(grad - point * (point @ grad)))

    with pytest.raises(AssertionError, match="the gap is a true bound"):
        check_manifold(Hypersphere(), (5,), jax.random.key(0), thorough=False, optimum=optimum)


@dataclasses.dataclass(frozen=True)
class Ellipsoid(Hypersphere):
    """`sum b_i x_i^2 == 1`: a manifold with data, which projects by scaling."""

    squares: tuple[float, ...] = (1.0, 1.1, 1.2, 1.3, 1.4)

    def length(self, point):
        return jnp.linalg.norm(point * jnp.sqrt(jnp.array(self.squares)), axis=-1, keepdims=True)

    def project(self, point):
        unit = jnp.sqrt(jnp.array(self.squares)) * 5**0.5
        length = self.length(point)
        scaled = jnp.where(length == 0, 1 / unit, point / jnp.where(length == 0, 1, length))
        return scaled.astype(point.dtype)

    def project_tangent(self, point, vector):
        normal = jnp.array(self.squares) * point
        return super().project_tangent(self._unit(normal), vector).astype(vector.dtype)

    def steepest(self, point, grad, dual=()):
        normal = self._unit(jnp.array(self.squares) * point)
        found = super().steepest(normal.astype(point.dtype), grad, dual)
        rest = jnp.all(point == 0, axis=-1, keepdims=True)
        return found._replace(direction=jnp.where(rest, 0, found.direction).astype(grad.dtype))

    def retract(self, point, vector):
        rest = jnp.all(vector == 0, axis=-1, keepdims=True)
        return jnp.where(rest, point, self.project(point + vector))

    def random_point(self, key, shape, dtype):
        return self.project(jax.random.normal(key, shape, dtype))

    def distance(self, point):
        return jnp.abs(self.length(point)[..., 0] - 1).astype(jnp.float32)

    def _unit(self, normal):
        length = jnp.linalg.norm(normal, axis=-1, keepdims=True)
        return normal / jnp.where(length == 0, 1, length)


def test_non_nearest_projection_must_be_declared():
    key = jax.random.key(0)
    check_manifold(Ellipsoid(), (5,), key, thorough=False, nearest=False)
    with pytest.raises(AssertionError, match=r"2\. law broken: x - project\(x\) is normal"):
        check_manifold(Ellipsoid(), (5,), key, thorough=False)
