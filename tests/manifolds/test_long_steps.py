"""Steps of any finite length end on the manifold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manifoldmuon import manifolds
from manifoldmuon.contrib import ComplexStiefel
from manifoldmuon.manifolds.retractions import QR, Cayley, Exponential, Geodesic, Polar, SoftCap
from tests.compiled import ask

LONG = {
    **{
        f"{type(r).__name__} {shape}": (manifolds.Stiefel(retraction=r), shape)
        for r in (Polar(), QR(), Cayley(), Exponential())
        for shape in ((8, 3), (3, 3), (2, 3, 7))
    },
    "rotations": (manifolds.Rotations(), (3, 3)),
    "rotations by QR": (manifolds.Rotations(retraction=QR()), (4, 4)),
    "rotations by Cayley": (manifolds.Rotations(retraction=Cayley()), (4, 4)),
    "complex": (ComplexStiefel(), (2, 4, 3)),
    "subspace": (manifolds.Grassmann(), (6, 2)),
    "sphere": (manifolds.Hypersphere(2.0), (3, 5)),
    "great circles": (manifolds.Hypersphere(2.0, retraction=Geodesic()), (3, 5)),
    "spectral sphere": (manifolds.SpectralSphere(2.0), (6, 4)),
    "ball": (manifolds.SpectralBall(2.0), (6, 4)),
    "soft ball": (manifolds.SpectralBall(retraction=SoftCap()), (6, 4)),
    "band": (manifolds.SpectralBand(), (5, 3)),
}


@pytest.mark.slow_except("Polar (8, 3)-float32", "QR (8, 3)-float32")
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("name", LONG)
def test_steps_of_any_length_end_on_the_set(name, dtype):
    """Rounding a Gram matrix of size 1 + 8^2 costs 65 eps, and a singular value half as much."""
    (manifold, shape), dtype = LONG[name], jnp.dtype(dtype)
    with jax.enable_x64(dtype == jnp.float64):

        def distances(keys, lengths):
            point = manifold.random_point(keys[0], shape, dtype)
            vector = manifold.project_tangent(point, jax.random.normal(keys[1], shape, dtype))
            moved = jax.lax.map(lambda t: manifold.retract(point, t * vector), lengths)
            return manifold.distance(moved)

        lengths = jnp.asarray(10.0 ** np.arange(0, 31, 3), dtype)
        found = ask(distances, jax.random.split(jax.random.key(0), 2), lengths)
    wide = jnp.promote_types(dtype, jnp.float32)
    short = float(jnp.finfo(dtype).eps) * 2 * max(shape) if dtype == jnp.bfloat16 else 0.0
    assert np.all(found <= 33 * float(jnp.finfo(wide).eps) + short)
