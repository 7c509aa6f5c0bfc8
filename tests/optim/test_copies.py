"""Leading axes are copies where the geometry declares them; `init` warns of others."""

import contextlib
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from manifoldmuon import contrib, optim
from manifoldmuon.manifolds import EmbeddingRows, Euclidean, Hypersphere, Stiefel
from manifoldmuon.norms import ConvRMSToRMS, RMSToRMS
from tests.optim.training import drawn

FLAT, SPHERE = Euclidean(RMSToRMS()), Hypersphere(ndim=2)
ADAM, SHAPE = optax.scale_by_adam(), (6, 2, 3)
EVERY: dict[str, Any] = {
    "scale_by_steepest": (optim.scale_by_steepest, Stiefel()),
    "retract": (optim.retract, Stiefel()),
    "keep_norms": (optim.keep_norms, SPHERE),
    "normalize": (lambda g: optim.normalize(ADAM, g), Stiefel()),
    "descend": (lambda g: optim.descend(0.1, g), Stiefel()),
    "manifold_muon": (lambda g: optim.manifold_muon(0.1, g, weight_decay=0.1), FLAT),
    "muon": (lambda g: optim.muon(0.1, g, rest=optax.adam(0.1)), FLAT),
    "muonh": (lambda g: optim.muonh(0.1, g, rest=optax.adam(0.1)), SPHERE),
    "adamh": (lambda g: optim.adamh(0.1, g), SPHERE),
    "hyperball": (lambda g: optim.hyperball(ADAM, 0.1, g), SPHERE),
    "riemannian_adam": (lambda g: optim.riemannian_adam(0.1, g), Stiefel()),
    "riemannian_sgd": (lambda g: optim.riemannian_sgd(0.1, g), Stiefel()),
    "normuon": (lambda g: contrib.normuon(0.1, g), FLAT),
    "quantized": (lambda g: contrib.quantized(optim.muon(0.1, g)), FLAT),
    "master copies": (lambda g: optim.with_master_copies(optim.muonh(0.1, g)), SPHERE),
    "MultiSteps": (lambda g: optax.MultiSteps(optim.muon(0.1, g), 2), FLAT),
    "by hand": (
        lambda g: optim.chain(optim.scale_by_steepest(g), optax.scale(-0.1), optim.retract(g)),
        Stiefel(),
    ),
}


def warned(function: Any, *args: Any) -> list[str]:
    """Return the warnings of a call."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        function(*args)
    return [str(x.message) for x in found]


def start(path: str, manifold: Any) -> Any:
    return {path: manifold.random_point(jax.random.key(0), SHAPE, jnp.float32)}


@pytest.mark.slow_except("retract", "keep_norms")
@pytest.mark.parametrize("name", EVERY)
def test_undeclared_copies_warn_once_at_init_and_not_at_update(name):
    make, manifold = EVERY[name]
    params = start(name, manifold)  # the path is new in this process
    tx = make(manifold)
    (message,) = warned(tx.init, params)
    assert f"'{name}' (6, 2, 3) as 6 of 2 x 3" in message
    assert all(x in message for x in (".stacked()", ".with_axes(", "manifoldmuon.frameworks"))
    assert warned(tx.update, params, tx.init(params), params) == []
    declared = {f"declared {name}": params[name]}
    assert warned(make(manifold.stacked()).init, declared) == []


FUNCTIONS: dict[str, Any] = {
    "tabulate": optim.tabulate,
    "project_tree": optim.project_tree,
    "monitor_distance": optim.monitor_distance,
    "init_tree": lambda g, p: optim.init_tree(g, jax.random.key(0), p),
    "check_chain": lambda g, p: optim.check_chain(optim.manifold_muon(0.1, g), g, p),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_undeclared_copies_warn_once_in_functions_of_trees(name):
    params = start(f"tree of {name}", Stiefel())
    assert len(warned(FUNCTIONS[name], Stiefel(), params)) == 1
    assert warned(FUNCTIONS[name], Stiefel().stacked(), params) == []


def test_warning_lists_five_parameters():
    params = {f"five/{i}": jnp.ones(SHAPE) for i in range(8)}
    (message,) = warned(optim.tabulate, FLAT, params)
    assert message.count("as 6 of 2 x 3") == 5
    assert "'five/4'" in message
    assert ", 3 more. If they are copies" in message


LEADING: list[tuple[Any, tuple[int, ...], str]] = [
    (Stiefel(), (4, 3), ""),
    (Stiefel(), (1, 4, 3), ""),  # a single copy
    (Stiefel().stacked(2), (2, 5, 4, 3), ""),
    (Stiefel().transposed().stacked(), (5, 4, 3), ""),
    (Stiefel().with_axes(0, (1, 2)), (8, 2, 4), ""),
    (Stiefel().with_axes(0, 2), (8, 2, 4), ""),  # an unnamed axis within the layout
    (Stiefel().with_axes(-2, -1, ndim=3), (5, 4, 3), ""),
    (Stiefel().with_axes(out_blocks=3), (6, 2), ""),
    (Stiefel().with_axes(-2, -1, taps=(-4, -3)), (3, 3, 4, 8), ""),
    (Euclidean(ConvRMSToRMS()), (3, 3, 4, 8), ""),
    (Hypersphere(), (5, 4, 3), ""),  # rows are points
    (Hypersphere().stacked(), (5, 4, 3), ""),
    (Euclidean(), (5, 4, 3), ""),
    (EmbeddingRows().stacked(), (2, 9, 3), ""),
    (None, (5, 4, 3), ""),
    (Stiefel(), (48, 16, 3, 3), "768 of 3 x 3"),  # OIHW
    (Stiefel().transposed(), (64, 2, 32), "64 of 2 x 32"),  # Flax's attention
    (Stiefel().transposed().stacked(), (3, 64, 2, 32), "3 of 64 x 2 x 32"),
    (Stiefel().with_axes(-3, (-2, -1)), (3, 8, 2, 4), "3 of 8 x 2 x 4"),
    (Euclidean(ConvRMSToRMS()).with_axes(-2, -1, (-4, -3)), (2, 3, 3, 4, 8), "2 of 3 x 3 x 4 x 8"),
    (EmbeddingRows(), (2, 9, 3), "2 of 9 x 3"),
]


@pytest.mark.parametrize(("entry", "shape", "words"), LEADING)
def test_only_axes_beyond_a_layout_warn(entry, shape, words):
    path = f"{entry} {shape}"
    messages = warned(optim.tabulate, {path: entry}, {path: jnp.ones(shape)})
    assert len(messages) == bool(words)
    assert all(f"{path!r} {shape} as {words}" in message for message in messages)


@pytest.mark.slow_except("plain-none")
@pytest.mark.filterwarnings("ignore:the geometry takes leading axes")
@pytest.mark.parametrize("kind", ["none", "Auto", "Explicit"])
@pytest.mark.parametrize("plain", [Stiefel(), FLAT.transposed()], ids=["plain", "kernel"])
def test_declaration_changes_no_compiled_program(plain, kind):
    shapes = {"a": (8, 6, 4), "b": (8, 6, 4), "c": (6, 4)}
    params = jax.tree.map(jnp.asarray, drawn(0, shapes))

    def lowered(stack: Any) -> str:
        tx = optim.manifold_muon(0.1, {"a": stack, "b": plain, "c": plain})
        state = jax.eval_shape(tx.init, params)
        return jax.jit(tx.update).lower(params, state, params).as_text()

    context: Any = contextlib.nullcontext()
    if kind != "none":
        mesh = jax.make_mesh((8,), ("x",), (getattr(AxisType, kind),))
        specs = {k: PartitionSpec(*("x",) * (len(s) > 2)) for k, s in shapes.items()}
        params = {k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in params.items()}
        context = jax.set_mesh(mesh)
    with context:
        assert lowered(plain.stacked()) == lowered(plain)
