"""`check_manifold` and `check_slopes` detect manifolds with a single defect."""

import jax
import jax.numpy as jnp
import pytest

from manifoldmuon.linalg import SVD
from manifoldmuon.manifolds import (
    EmbeddingRows,
    Euclidean,
    Hypersphere,
    Orthogonal,
    SpectralBall,
    Stiefel,
)
from manifoldmuon.manifolds.retractions import QR
from manifoldmuon.norms import Frobenius, Spectral
from manifoldmuon.testing import check_manifold, check_slopes
from tests.broken import broken, doubled_in_vmap

KEY, SPHERE = jax.random.key(0), Hypersphere()


def slanted(sound, point, vector):
    """Project idempotently onto the tangent space, but along a slanted direction."""
    away = point + jnp.roll(point, 1)
    return vector - away * (jnp.sum(point * vector) / jnp.sum(point * away))


def with_epsilon(sound, point, grad, dual=()):
    """Add an epsilon to the denominator."""
    tangent = sound.project_tangent(point, grad)
    length = jnp.linalg.norm(tangent, axis=-1, keepdims=True)
    return sound.steepest(point, grad)._replace(direction=tangent / (length + 1e-8))


def tangent_gradient(sound, point, grad, dual=()):
    """Return the tangent part of the gradient with the gap of the steepest direction."""
    tangent = sound.project_tangent(point, grad)
    size, whole = (sound.norm.norm(x)[..., None, None] for x in (tangent, grad))
    noise = size <= 1e-5 * whole
    direction = jnp.where(noise, 0, tangent / jnp.where(noise, 1, size))
    return sound.steepest(point, grad)._replace(direction=direction)


def scaled(factor):
    """Scale directions, without changing the gap."""

    def steepest(sound, point, grad, dual=()):
        answer = sound.steepest(point, grad)
        return answer._replace(direction=(factor * answer.direction).astype(grad.dtype))

    return steepest


def divided_by_copies(sound, point, grad, dual=()):
    answer = sound.steepest(point, grad)
    return answer._replace(direction=answer.direction / jnp.sqrt(answer.gap.size))


def loop_from_constants(sound, point, vector):
    """Loop with a carry that varies over the mesh only after the first iteration."""
    nothing = jnp.zeros(point.shape, vector.dtype)
    moved = jax.lax.fori_loop(0, 2, lambda _, moved: moved + vector / 2, nothing)
    return sound.retract(point, moved)


def rest_together(sound, point, vector):
    """Move no copy if any copy has a zero step."""
    still = jnp.any(jnp.linalg.norm(vector, axis=-1) == 0)
    return jnp.where(still, point, sound.retract(point, vector))


def project_none_if_one_is_there(sound, point):
    there = jnp.any(sound.distance(point) < 1e-6)
    return jnp.where(there, point, sound.project(point))


def hide_nan_of_gap(sound, *arguments):
    answer = sound.steepest(*arguments)
    return answer._replace(gap=jnp.nan_to_num(answer.gap))


def with_small_bound(sound, *arguments):
    """Divide by a bound on the gain that is 10 % too small."""
    answer = sound.steepest(*arguments)
    return answer._replace(gap=jnp.maximum(1 - (1 - answer.gap) / 0.9, 0))


def drawn(function):
    """Apply a function to random points."""
    return lambda sound, *arguments: function(sound.random_point(*arguments))


def upper_half(point):
    return jnp.where(point[..., :1] < 0, -point, point)


def slanted_half(point):
    """Keep points of positive sum, which leaves every entry both signs."""
    return jnp.where(jnp.sum(point, axis=-1, keepdims=True) < 0, -point, point)


def rotation(point):
    """Turn reflections into rotations: half of the orthogonal matrices."""
    sign = jnp.linalg.det(point.astype(jnp.float32)).astype(point.dtype)
    return point.at[..., 0].multiply(sign[..., None])


def half_of_frames(sound, key, shape, dtype):
    """Keep frames on one side of a random plane."""
    point = sound.random_point(key, shape, dtype)
    plane = jax.random.normal(jax.random.key(7), shape, dtype)
    side = jnp.sum(point * plane, axis=(-2, -1), keepdims=True)
    return jnp.where(side < 0, -point, point)


TOO_FAST = {"retract": lambda s, p, v: s.retract(p, 1.1 * v)}
SLANTED = {"project_tangent": slanted}
HALF = "random_point leaves out no half"
# fmt: off
BROKEN = {  # methods of a sphere with a defect
    "sees no distance": ({"distance": lambda s, p: 0 * s.distance(p)}, "distance sees how far"),
    "sees a thousandth": ({"distance": lambda s, p: s.distance(p) / 1000}, "distance sees how far"),
    "hides NaN of points": ({"distance": lambda s, p: jnp.nan_to_num(s.distance(p))},
                            "a NaN in a point stays visible"),
    "sees no distance inside": ({"distance": lambda s, p: s.distance(p) * (jnp.sum(p**2, -1) > 1)},
                                "distance sees how far .* at (p - v|0.9 p)"),
    "sees no distance outside": ({"distance": lambda s, p: s.distance(p) * (jnp.sum(p**2, -1) < 1)},
                                 "distance sees how far .* at (p . v|1.1 p)"),
    "projects NaN": ({"project": lambda s, p: s.project(jnp.nan_to_num(p))},
                     "a NaN stays visible .projected."),
    "hides NaN of gaps": ({"steepest": hide_nan_of_gap}, "a NaN stays visible .gap."),
    "draws from a half": ({"random_point": drawn(upper_half)}, HALF),
    "draws from a slanted half": ({"random_point": drawn(slanted_half)}, HALF),
    "draws positive entries": ({"random_point": drawn(jnp.abs)}, HALF),
    "ignores the key": ({"random_point": lambda s, key, *x: s.random_point(KEY, *x)},
                        "random_point differs from key to key"),
    "rests together": ({"retract": rest_together}, "stack = loop .moved."),
    "projects none if one is there": ({"project": project_none_if_one_is_there},
                                      "stack = loop .projected."),
    "off the set": ({"retract": lambda s, p, v: p + v}, "retract lands on the set"),
    "not tangent": ({"project_tangent": lambda s, p, v: v}, "x - project.x. is normal to the set"),
    "not orthogonal": (SLANTED, "self-adjoint|is normal"),
    "epsilon": ({"steepest": with_epsilon}, "steepest.p, c g. == steepest.p, g."),
    "half a direction": ({"steepest": scaled(0.5)}, "the gap is a true bound"),
    "slightly short": ({"steepest": scaled(0.97)}, "the gap is a true bound"),
    "direction alone": ({"steepest": lambda s, *x: s.steepest(*x).direction},
                        "steepest returns a Steepest .*Tracer"),
    "no gap": ({"steepest": lambda s, *x: s.steepest(*x)._replace(gap=None)}, "gap"),
    "descends": ({"steepest": scaled(-1)}, "direction ascends"),
    "swallows NaN": ({"steepest": lambda s, p, g, dual: s.steepest(p, jnp.nan_to_num(g))},
                     "a NaN stays visible .direction."),
    "mixes copies": ({"steepest": divided_by_copies}, "stack = loop .direction."),
    "too fast": (TOO_FAST, "d/dt retract"),
    "widens": ({"project": lambda s, p: s.project(p).astype("f4")},
               "dtype in = dtype out .project."),
}
# fmt: on


@pytest.mark.slow_except("half a direction")
@pytest.mark.parametrize("defect", BROKEN)
def test_broken_manifold_is_found(defect):
    methods, law = BROKEN[defect]
    with pytest.raises(AssertionError, match=f"law broken: .*({law})"):
        check_manifold(broken(SPHERE, **methods), (5,), KEY, thorough=False)


class BallWithoutBoundary(SpectralBall):
    """Wrongly declares that it has no boundary."""

    has_boundary = False


class TrustsItsStart(Hypersphere):
    """Correct only from a cold start."""

    def init_dual(self, shape):
        return jnp.zeros(shape, jnp.float32)

    def steepest(self, point, grad, dual):
        used = jnp.where(dual == 0, grad, dual).astype(grad.dtype)
        return super().steepest(point, used)._replace(dual=jnp.sign(grad).astype(jnp.float32))


class CallableSphere(Hypersphere):
    """Optax would treat a callable as a schedule."""

    def __call__(self, step):
        return step


def too_large(point, grad):
    """Return more than the optimum."""
    return 1.01 * float(jnp.linalg.norm(grad - point * (point @ grad)))


def blind_in_bf16(sound, point):
    return sound.distance(point) * (point.dtype != jnp.bfloat16)


def too_long_in_bf16(sound, key, shape, dtype):
    return sound.random_point(key, shape, dtype) * (1.1 if dtype == jnp.bfloat16 else 1)


QUICK = {"thorough": False}
# fmt: off
OTHERS = {
    "boundary": (BallWithoutBoundary(step_norm=Frobenius()), (5, 3), QUICK | {"convex": True},
                 "3. law broken: .*where has_boundary is False"),
    # It reports the steepest direction's gap, about 4e-5 in place of 0.2.
    "suboptimal": (broken(Stiefel(), steepest=tangent_gradient), (10, 4), QUICK,
                   "4. law broken: the gap is a true bound"),
    # After many steps the direction is optimal, and a gap of 0 is true.
    "bound 10 % too small": (
        broken(EmbeddingRows(step_norm=Spectral(SVD())), steepest=with_small_bound), (6, 4),
        QUICK | {"gap": 0.05}, "4. law broken: the gap is a true bound"),
    "fast is another": (broken(Stiefel(), for_training=lambda s: Stiefel(2.0)), (5, 3), {},
                        "2. law broken: for_training.. keeps the set"),
    "fast has another norm": (
        broken(Euclidean(Spectral(scale=3.0)), for_training=lambda s: Euclidean(Spectral())),
        (5, 3), {}, "2. law broken: for_training.. keeps the norm"),
    "fast has another scale": (
        broken(Hypersphere(2.0), for_training=lambda s: Hypersphere()), (5,), {},
        "2. law broken: for_training.. keeps the set"),
    "fast has other steps": (
        broken(Hypersphere(2.0), for_training=lambda s: broken(s, steepest=scaled(0.5))), (5,), {},
        "2. law broken: the gap is a true bound, of for_training"),
    "fast has long steps": (
        broken(Hypersphere(2.0), for_training=lambda s: broken(s, steepest=scaled(2.0))), (5,), {},
        "2. law broken: norm.direction. <= 1, of for_training"),
    "draws rotations": (broken(Orthogonal(), random_point=drawn(rotation)), (3, 3), QUICK,
                        f"2. law broken: {HALF}"),
    "draws a half of frames": (broken(Stiefel(), random_point=half_of_frames), (9, 4), QUICK, HALF),
    "draws one sign": (broken(Orthogonal(), random_point=drawn(jnp.abs)), (1, 1), QUICK, HALF),
    "warm start": (TrustsItsStart(), (5,), {}, "the gap is a true bound"),
    "shard_map": (broken(SPHERE, retract=loop_from_constants), (5,), {},
                  "inside of jax.shard_map .arguments 1 vary"),
    "vmap": (broken(SPHERE, retract=lambda s, p, v: doubled_in_vmap(s.retract(p, v))), (5,), {},
             "7. law broken: vmap = loop .moved."),
    "distance in bf16": (broken(SPHERE, distance=blind_in_bf16), (5,), {},
                         "1. law broken: bf16: float32 arithmetic .distance."),
    "random in bf16": (broken(SPHERE, random_point=too_long_in_bf16), (5,), {},
                       "1. law broken: bf16: a random point is on the set"),
    "callable": (CallableSphere(), (5,), {}, "CallableSphere is not callable"),
    "optimum": (SPHERE, (5,), QUICK | {"optimum": too_large}, "gap is a true bound"),
}
# fmt: on


@pytest.mark.slow_except("callable", "optimum")
@pytest.mark.parametrize("defect", OTHERS)
def test_other_defect_is_found(defect):
    manifold, shape, options, law = OTHERS[defect]
    with pytest.raises(AssertionError, match=law):
        check_manifold(manifold, shape, KEY, **options)


@pytest.mark.slow
def test_all_broken_laws_are_named():
    """Laws are named by their numbers in the docstring of `Manifold`."""
    several = [BROKEN[name][0] for name in ("sees no distance", "too fast", "swallows NaN")]
    distance, retract, steepest = several
    with pytest.raises(AssertionError) as caught:
        check_manifold(broken(SPHERE, **distance, **retract, **steepest), (5,), KEY, thorough=False)
    lines = str(caught.value).splitlines()
    assert [line[:2] for line in lines[:-1]] == ["2.", "6.", "7."]
    assert "`Manifold`" in lines[-1]


def forget_point(sound, point, vector):
    """Drop the derivative with respect to the point: Hessians are wrong."""
    return sound.project_tangent(jax.lax.stop_gradient(point), vector)


@pytest.mark.slow_except("slanted")
@pytest.mark.parametrize(
    ("manifold", "shape", "order", "law"),
    [
        (broken(SPHERE, **TOO_FAST), (5,), 1, "retract.p, t v. = p"),
        (broken(SPHERE, **SLANTED), (5,), 1, "<project_tangent.p, grad f., v>"),
        (Stiefel(retraction=QR()), (5, 3), 2, "= O.t.3."),
        (broken(SPHERE, project_tangent=forget_point), (5,), 2, "Hess f.v."),
    ],
    ids=["too fast", "slanted", "first order", "forgets the point"],
)
def test_wrong_slope_is_found(manifold, shape, order, law):
    with pytest.raises(AssertionError, match=f"law broken: .*({law}).*slope"):
        check_slopes(manifold, shape, KEY, order)


@pytest.mark.slow
def test_non_nearest_projection_must_be_declared():
    def project(sound, point):
        """Shear points that are not on the sphere."""
        on_set = sound.distance(point)[..., None] < 1e-5
        sheared = sound.project(point * jnp.linspace(1, 1.2, 5))
        return jnp.where(on_set, point, sheared).astype(point.dtype)

    sheared = broken(SPHERE, project=project)
    check_manifold(sheared, (5,), KEY, thorough=False, nearest=False)
    with pytest.raises(AssertionError, match=r"2\. law broken: x - project\(x\) is normal"):
        check_manifold(sheared, (5,), KEY, thorough=False)
