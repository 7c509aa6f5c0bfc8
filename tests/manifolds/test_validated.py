"""`Validated`: silent where all is well, names what is not, inside of loops and outside."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manifoldmuon import optim
from manifoldmuon.manifolds import Hypersphere, Stiefel
from manifoldmuon.manifolds.retractions import Cayley
from manifoldmuon.minimize import TrustRegion, minimize
from manifoldmuon.testing import Validated

POINT, TANGENT = jnp.array([1.0, 0.0, 0.0]), jnp.array([0.0, 0.5, 0.0])
SLANTED = jnp.array([0.5, 0.5, 0.0])


class Broken(Hypersphere):
    """Everything comes out wrong."""

    def project(self, point):
        return 2 * super().project(point)

    def project_tangent(self, point, vector):
        return 2 * vector

    def steepest(self, point, grad, dual=()):
        return super().steepest(point, grad, dual)._replace(direction=2 * grad)

    def retract(self, point, vector):
        return point + vector

    def random_point(self, key, shape, dtype):
        return 2 * super().random_point(key, shape, dtype)


SPHERE, BROKEN = Validated(Hypersphere()), Validated(Broken())
WRONG = {
    "project.result": lambda: BROKEN.project(POINT),
    "project_tangent.point": lambda: SPHERE.project_tangent(2 * POINT, TANGENT),
    "project_tangent.result": lambda: BROKEN.project_tangent(POINT, SLANTED),
    "steepest.point": lambda: SPHERE.steepest(2 * POINT, TANGENT),
    "steepest.direction": lambda: BROKEN.steepest(POINT, SLANTED),
    "steepest.norm": lambda: Validated(Broken(), ("steepest.direction",)).steepest(
        POINT, 2 * TANGENT
    ),
    "retract.point": lambda: SPHERE.retract(2 * POINT, TANGENT),
    "retract.vector": lambda: SPHERE.retract(POINT, SLANTED),
    "retract.result": lambda: Validated(Broken(), ("retract.vector",)).retract(POINT, TANGENT),
    "random_point.result": lambda: BROKEN.random_point(jax.random.key(0), (3,), jnp.float32),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_check_names_itself(name):
    with pytest.raises(AssertionError, match=f"law broken: .*{name} is"):
        WRONG[name]()


def test_a_named_exemption_is_silent():
    exempt = Validated(Hypersphere(), ("retract.vector",))
    np.testing.assert_array_equal(
        exempt.retract(POINT, SLANTED), Hypersphere().retract(POINT, SLANTED)
    )
    with pytest.raises(AssertionError, match="retract.point"):
        exempt.retract(2 * POINT, SLANTED)


def test_a_nan_is_found():
    with pytest.raises(AssertionError, match="retract.vector"):
        SPHERE.retract(POINT, jnp.nan * TANGENT)


@pytest.mark.parametrize("wrap", [jax.jit, jax.vmap], ids=["jit", "vmap"])
def test_inside_of_jit_and_vmap_the_message_is_that_of_the_runtime(wrap, capfd):
    points, vectors = jnp.stack([POINT, POINT]), jnp.stack([TANGENT, SLANTED])
    function = jax.jit(wrap(SPHERE.retract))
    with pytest.raises(jax.errors.JaxRuntimeError, match="retract.vector is tangent"):
        jax.block_until_ready(function(points, vectors))
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # again, of the effect
        jax.effects_barrier()
    capfd.readouterr()


@pytest.mark.parametrize(
    ("manifold", "shape"), [(Hypersphere(), (4, 6)), (Stiefel(), (6, 2))], ids=["sphere", "Stiefel"]
)
def test_training_gives_the_same_numbers(manifold, shape):
    params = manifold.random_point(jax.random.key(0), shape, jnp.float32)
    target = jax.random.normal(jax.random.key(1), shape)

    def trained(geometry):
        tx = optim.manifold_muon(0.1, geometry)

        def step(carry, _):
            params, state = carry
            grads = jax.grad(lambda x: jnp.sum((x - target) ** 2))(params)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.jit(lambda p: jax.lax.scan(step, (p, tx.init(p)), None, length=5)[0][0])(params)

    np.testing.assert_allclose(trained(Validated(manifold)), trained(manifold), atol=1e-6)


def test_minimising_with_derivatives_gives_the_same_numbers():
    a = jnp.diag(jnp.array([4.0, 2.0, 1.0]))
    start = Hypersphere().project(jnp.ones(3))

    def largest(a, manifold):
        method = TrustRegion()
        return minimize(lambda x, a: -x @ a @ x, manifold, start, (a,), method=method).value

    found = jax.grad(largest)(a, Validated(Hypersphere()))
    np.testing.assert_allclose(found, jax.grad(largest)(a, Hypersphere()), atol=1e-6)


def test_drift_is_found():
    """Cayley's transform hands on what rounding leaves; from a point slightly off it shows."""
    manifold = Validated(Stiefel(retraction=Cayley()), tolerance=1e-3)
    off = 1.002 * jnp.eye(4, 2)
    with pytest.raises(AssertionError, match="retract.point is on the set"):
        manifold.retract(off, jnp.zeros((4, 2)))


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"no checks \['retract'\]; there are \['project.result'"):
        Validated(Hypersphere(), ("retract",))
