"""The leaf engine: budgets, and a short way from a link to the work."""

import functools
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import manifoldmuon
from manifoldmuon import optim
from manifoldmuon.manifolds import Euclidean, Stiefel

PACKAGE = str(manifoldmuon.__path__[0])


def depths_of(rooms: tuple[str, ...], function: Callable[[], Any]) -> dict[str, int]:
    """The most frames of the package above the first one in each room, that one included."""
    found = dict.fromkeys(rooms, 0)

    def look(frame: FrameType, event: str, _: Any) -> None:
        own = event == "call" and frame.f_code.co_filename.startswith(PACKAGE)  # not NumPy's linalg
        for room in rooms if own else ():
            if f"/{room}/" in frame.f_code.co_filename:
                files = [f.f_code.co_filename for f, _ in traceback.walk_stack(frame)]
                files = [file for file in files if file.startswith(PACKAGE)]
                if sum(f"/{room}/" in file for file in files) == 1:
                    found[room] = max(found[room], len(files))

    sys.setprofile(look)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found


def test_few_frames_lie_between_a_link_and_the_work():
    """On the shortest way: the default manifold, on the machine that runs the suite."""
    params = {"a": jnp.eye(12, 4), "b": jnp.eye(12, 4)}
    tx = optax.chain(optim.scale_by_steepest(Stiefel()), optim.retract(Stiefel()))
    state = tx.init(params)
    step = functools.partial(jax.eval_shape, tx.update, params, state, params)
    found = depths_of(("linalg", "retractions"), step)
    assert 0 < found["linalg"] <= 8
    assert 0 < found["retractions"] <= 5


def test_few_functions_are_called_in_an_update():
    """Of the package, the first time, in the default optimizer."""
    params = {"a": jnp.eye(8), "b": jnp.eye(12, 8)}
    tx = optim.manifold_muon(0.1, Stiefel())
    step = functools.partial(jax.eval_shape, tx.update, params, tx.init(params), params)
    called = set()

    def look(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name[0] != "<":
            called.add((code.co_filename, code.co_qualname))

    sys.setprofile(look)
    try:
        step()
    finally:
        sys.setprofile(None)
    assert 0 < len(called) <= 105


def test_map_leaves_stacks_leaves_and_passes_others_through():
    """Layouts, states by path, and leaves that are not selected."""
    geometry = {"a": Stiefel(), "b": Stiefel().transposed(), "bias": Euclidean()}
    params = {"a": jnp.eye(3, 2), "b": jnp.eye(2, 3), "bias": jnp.ones(2)}
    updates = jax.tree.map(lambda x: 2 * x, params)
    shapes = []

    def scale(manifold, point, update, factor):
        shapes.append(point.shape)
        return factor[..., None, None] * update, jnp.max(point, axis=(-2, -1))

    found, largest = optim.map_leaves(
        scale,
        geometry,
        updates,
        params,
        select=lambda manifold: manifold.constrained,
        carried={"a": jnp.array(3.0), "b": jnp.array(5.0)},
    )
    assert shapes == [(2, 3, 2)]  # one call for both, in the manifold's layout
    assert {path: float(x) for path, x in largest.items()} == {"a": 1, "b": 1}
    for name, factor in {"a": 6, "b": 10, "bias": 2}.items():
        np.testing.assert_array_equal(found[name], factor * params[name])
    with pytest.raises(ValueError, match=r"map_leaves: the state knows no parameters \['a', 'b'\]"):
        optim.map_leaves(scale, geometry, updates, params, carried={"bias": jnp.array(1.0)})


def test_a_few_stacks_of_one_kind_are_solved_by_one_program():
    """One after the other, where a larger stack would have to be written and read."""
    rng, shapes = np.random.default_rng(0), []
    params = {name: jnp.asarray(rng.standard_normal((3, 4, 2)), jnp.float32) for name in "qkvo"}
    factors = {name: jnp.float32(i) for i, name in enumerate(params)}

    def scale(manifold, point, update, factor):
        shapes.append(point.shape)
        return factor * update, jnp.sum(point)

    found, sums = optim.map_leaves(scale, Stiefel(), params, params, carried=factors)
    assert shapes == [(3, 4, 2)]
    for name, point in params.items():
        np.testing.assert_array_equal(found[name], factors[name] * point)
        np.testing.assert_allclose(sums[name], np.sum(point), rtol=1e-5)


def test_the_cache_does_not_hide_wrong_types():
    """Equal in Python is not equal in kind: `True == 1.0`."""
    updates = {"a": jnp.ones(2)}
    scaled: Any
    scaled, _ = optim.scale_by_budget({"a": 1.0}).update(updates, optax.EmptyState())
    np.testing.assert_array_equal(scaled["a"], 1)
    with pytest.raises(TypeError, match="the budget of 'a' is True"):
        optim.scale_by_budget({"a": True}).update(updates, optax.EmptyState())
    with pytest.raises(TypeError, match="the budget of 'a' is True"):
        optim.scale_by_budget(optim.by_path({"a": True})).update(updates, optax.EmptyState())


def test_budgets_may_be_traced():
    """They cannot be kept, and are read anew."""

    @jax.jit
    def scale(budget, updates):
        return optim.scale_by_budget({"a": budget}).update(updates, optax.EmptyState())[0]

    for budget in (0.5, 2.0):
        np.testing.assert_array_equal(scale(budget, {"a": jnp.ones(2)})["a"], budget)


@pytest.mark.parametrize(
    "returned",
    [
        lambda point: point[..., :1],
        lambda point: [point],
        lambda point: (point, (), ()),
        lambda point: (point[0], ()),
    ],
    ids=["shape", "list", "three", "shape in a tuple"],
)
@pytest.mark.parametrize("names", ["a", "ab"])
def test_map_leaves_refuses_results_that_are_no_updates(returned, names):
    params = {name: jnp.eye(3, 2) for name in names}
    with pytest.raises(ValueError, match="map_leaves: for a point of shape .* must return"):
        optim.map_leaves(lambda manifold, point, update: returned(point), Stiefel(), params, params)
