"""Parameters that start far from their manifolds are refused, under `jax.jit`, too."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from manifoldmuon import contrib, manifolds, optim
from manifoldmuon.modules import Linear
from manifoldmuon.norms import FanRatio
from tests.compiled import ask
from tests.optim.instances import abstract
from tests.optim.training import drawn

GEOMETRY = {
    "he": manifolds.Stiefel().transposed(),
    "near": manifolds.Stiefel(),
    "table": manifolds.EmbeddingRows(),
    "free": manifolds.Euclidean(),
}


def params():
    given = drawn(3, {"he": (6, 16), "near": (16, 6), "table": (9, 4), "free": (4,)})
    projected = optim.project_tree(GEOMETRY, given)
    return projected | {"he": given["he"] * 0.5, "near": 1.05 * projected["near"]}


@pytest.mark.parametrize("make", [optim.manifold_muon, optim.riemannian_sgd])
def test_init_error_names_path_and_distance(make):
    given = params()
    distance = float(optim.monitor_distance(GEOMETRY, given)["he"])
    words = re.escape(f"far from their manifolds: 'he' (distance {distance:.2g}). ")
    with pytest.raises(ValueError, match=f"{words}.*project_tree"):
        make(0.1, GEOMETRY).init(given)
    assert distance > 0.3


def test_many_far_parameters_give_one_error():
    far = [jnp.full((4, 2), 3.0)] * 9
    with pytest.raises(ValueError, match=r"'0' .*'4' \(distance [^,]*, 4 more\."):
        optim.retract([manifolds.Stiefel()] * 9).init(far)


SETS = {
    "stiefel": (manifolds.Stiefel(2.0).transposed(), (2, 5, 3)),
    "grassmann": (manifolds.Grassmann(), (6, 2)),
    "rotations": (manifolds.Rotations(), (3, 3)),
    "rows": (manifolds.EmbeddingRows(), (4, 3)),
    "sphere": (manifolds.Hypersphere(ndim=2), (3, 4)),
    "ball": (manifolds.SpectralBall(), (5, 3)),
    "band": (manifolds.SpectralBand(0.9, 1.1), (3, 5)),
    "spectral sphere": (manifolds.SpectralSphere(FanRatio()), (5, 3)),
}
SPACES = {name: space.stacked(len(shape) - space.ndim) for name, (space, shape) in SETS.items()}
SHAPES = abstract({name: shape for name, (_, shape) in SETS.items()})
NEAR = ask(lambda key: optim.init_tree(SPACES, key, SHAPES), jax.random.key(0))
COMPILED_INIT = jax.jit(optim.retract(SPACES).init)
WORDS = re.compile(r"parameters are far from their manifolds: .*|keep_norms: .*")


def complaint(init, params):
    """Return the error of `init` without the traceback of its callback, or no words."""
    try:
        jax.block_until_ready(init(params))
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        return WORDS.findall(str(error))[0]
    return ""


@pytest.mark.parametrize("factor", [0.02, 0.8, 0.94, 1.06, 1.3, 40.0, np.nan, np.inf])
def test_compiled_init_gives_words_of_eager_init(factor):
    given = {name: np.float32(factor) * x for name, x in NEAR.items()}
    eager = complaint(optim.retract(SPACES).init, given)
    compiled = complaint(COMPILED_INIT, given)
    number = re.compile(r"(?<=distance )[^)]*")
    assert number.sub("", compiled) == number.sub("", eager)
    found, wanted = ([float(x) for x in number.findall(text)] for text in (compiled, eager))
    np.testing.assert_allclose(found, wanted, rtol=0.06)  # 1 %, rounded to two digits


SPHERE = {"w": manifolds.Hypersphere(ndim=2), "b": None}
NET = Linear(3, 4, manifolds.Stiefel()) @ Linear(4, 3, manifolds.Stiefel())
ON, OFF = ({"w": np.float32(x) * jnp.eye(4) / 2, "b": jnp.ones(3)} for x in (1, 3))
FULL = {"w": manifolds.Hypersphere(ndim=2), "b": manifolds.Euclidean()}
LAYERS = [jax.tree.map(lambda x, f=f: f * x, NET.init(jax.random.key(0))) for f in (1, 3)]
COMPLETE = {
    "retract": (optim.retract(FULL), ON, OFF),
    "descend": (optim.descend(0.1, FULL), ON, OFF),
    "manifold_muon": (optim.manifold_muon(0.1, SPHERE, rest=optax.adamw(0.1), clip=1.0), ON, OFF),
    "riemannian_adam": (optim.riemannian_adam(0.1, FULL), ON, OFF),
    "riemannian_sgd": (optim.riemannian_sgd(0.1, FULL, 0.9), ON, OFF),
    "hybrid": (optim.hybrid(optim.retract(SPHERE), SPHERE, optax.sgd(0.1)), ON, OFF),
    "master copies": (optim.with_master_copies(optim.retract(FULL)), ON, OFF),
    "quantized": (contrib.quantized(optim.manifold_muon(0.1, FULL), 8), ON, OFF),
    "MultiSteps": (optax.MultiSteps(optim.retract(FULL), 2), ON, OFF),
    "inject": (optax.inject_hyperparams(optim.riemannian_sgd)(0.1, FULL), ON, OFF),
    "modular": (optim.modular(0.1, NET), *LAYERS),
    "normed": (optim.normed(0.1, optax.scale_by_adam(), NET), *LAYERS),
    "keep_norms": (optim.keep_norms(FULL), OFF, OFF | {"w": 0 * OFF["w"]}),
    "muonh": (optim.muonh(0.1, SPHERE, rest=optax.adamw(0.1)), OFF, OFF | {"w": np.inf * OFF["w"]}),
    "adamh": (optim.adamh(0.1, SPHERE, rest=optax.adamw(0.1)), OFF, OFF | {"w": 0 * OFF["w"]}),
}


@pytest.mark.parametrize("name", COMPLETE)
def test_every_optimizer_checks_first_weights_under_jit(name):
    tx, near, far = COMPLETE[name]
    init = jax.jit(tx.init)
    assert not complaint(init, near)
    assert complaint(init, far)
    unchecked = optim.start_anywhere(optax.GradientTransformation(tx.init, tx.update))
    assert "callback" not in jax.jit(unchecked.init).lower(far).as_text()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_program_stops_on_every_device(kind):
    """Were the error on one device alone, the others would wait in the sums that follow."""
    tx = optim.retract(manifolds.Stiefel())

    def init(x):
        state = tx.init(x)
        for _ in range(3):
            x = jnp.sin(x) * jnp.sum(jnp.cos(x))
        return state, x

    place = NamedSharding(jax.make_mesh((8,), ("x",), (kind,)), PartitionSpec(None, "x"))
    near, compiled = jax.device_put(jnp.eye(16, 8), place), jax.jit(init)
    assert "'' (distance 2)." in complaint(compiled, 3 * near)
    assert not complaint(compiled, near)  # last: `jax.effects_barrier` raises a last error


def test_batched_init_has_a_single_callback():
    init = jax.jit(jax.vmap(optim.retract(manifolds.Stiefel()).init))
    assert init.lower(jnp.ones((9, 4, 3))).as_text().count("python_cpu_callback") == 1


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_init_lowers_for_other_platforms(platform):
    """From a machine with CPUs alone, as when compiling for a pod."""
    text = jax.jit(optim.retract(manifolds.Stiefel()).init).trace(SHAPES["grassmann"])
    assert text.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.slow
def test_check_survives_transformations_of_jax():
    tx = optim.retract(manifolds.Stiefel())

    def loss(x):
        tx.init(x)
        return jnp.sum(x**2)

    def in_loop(x):
        return jax.lax.scan(lambda carry, _: (carry, tx.init(carry)), x, length=2)

    near, far = jnp.eye(4, 3), 3 * jnp.eye(4, 3)
    for function in (
        jax.jit(lambda x: (tx.init(x), jnp.sin(x)), donate_argnums=0),
        jax.jit(jax.grad(jax.checkpoint(loss))),
        jax.jit(in_loop),
        jax.jit(tx.init).lower(near).compile(),
        lambda x: jax.vmap(tx.init)(x[None]),
        lambda x: jax.jit(jax.vmap(tx.init))(jnp.stack([near, x])),
    ):
        assert not complaint(function, near.copy())
        assert "(distance 2)." in complaint(function, far.copy())


@pytest.mark.parametrize(
    "manifold", [manifolds.EmbeddingRows(), manifolds.EmbeddingRows(2.0).transposed()]
)
def test_zero_embedding_rows_pass(manifold):
    table = optim.project_tree(manifold, drawn(4, (6, 6)))
    row = np.s_[:, 2] if isinstance(manifold, manifolds.LaidOut) else np.s_[2]
    optim.retract(manifold).init(table.at[row].set(0))
    with pytest.raises(ValueError, match="distance 0.5"):
        optim.retract(manifold).init(table.at[row].multiply(0.5))
