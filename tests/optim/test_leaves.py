"""The leaf engine: one resolution for each structure, and a short way from a link to the work."""

import dataclasses
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import manifoldmuon
from manifoldmuon import optim
from manifoldmuon.linalg import DEFAULT_MSIGN, MsignMethod
from manifoldmuon.manifolds import Euclidean, Stiefel
from manifoldmuon.manifolds.retractions import Polar, Retraction
from manifoldmuon.manifolds.solvers import SkewPolar
from manifoldmuon.optim import _geometry

PACKAGE = str(manifoldmuon.__path__[0])


def own_frames() -> list[str]:
    """The package's functions between the caller of a link and this one."""
    frames = [f for f in traceback.extract_stack() if f.filename.startswith(PACKAGE)]
    return [f.name for f in frames]


@dataclasses.dataclass(frozen=True)
class SeenMethod(MsignMethod):
    """The default, and who called it."""

    def polar(self, x):
        SEEN["msign"] = own_frames()
        return DEFAULT_MSIGN.polar(x)


@dataclasses.dataclass(frozen=True)
class SeenRetraction(Retraction):
    order = 2.0

    def retract(self, point, vector):
        SEEN["retraction"] = own_frames()
        return Polar().retract(point, vector)


SEEN: dict[str, list[str]] = {}


@pytest.mark.parametrize("shape", [(12, 4), (5, 4)])  # both representations of the closed form
def test_few_frames_lie_between_a_link_and_the_work(shape):
    geometry = Stiefel(solver=SkewPolar(SeenMethod()), retraction=SeenRetraction())
    params = {"a": jnp.eye(*shape), "b": jnp.eye(*shape)}
    tx = optax.chain(optim.scale_by_steepest(geometry), optim.retract(geometry))
    state = tx.init(params)
    jax.eval_shape(tx.update, params, state, params)
    assert len(SEEN["msign"]) <= 8, SEEN["msign"]
    assert len(SEEN["retraction"]) <= 6, SEEN["retraction"]


def test_a_tree_is_resolved_once_for_each_structure():
    """Not by each link, nor at each trace; the geometry may be a tree, patterns or a function."""
    params = {"w": jnp.eye(6, 3), "b": jnp.ones(4)}
    geometries = [
        {"w": Stiefel(), "b": Euclidean()},
        optim.by_path({"w": Stiefel(), "b": Euclidean()}),
        lambda path, leaf: Stiefel() if leaf.ndim == 2 else Euclidean(),
    ]
    for geometry in geometries:
        _geometry._find_once.cache_clear()
        for rate in (0.1, 0.2):
            tx = optim.manifold_muon(rate, geometry, weight_decay=0.1)
            state = tx.init(params)
            jax.eval_shape(tx.update, params, state, params)
            jax.eval_shape(tx.update, params, state, params)
        assert _geometry._find_once.cache_info().misses == 1
        bigger = params | {"w": jnp.ones((7, 3))}
        optim.resolve(geometry, bigger)
        assert _geometry._find_once.cache_info().misses == 2


def test_what_is_kept_does_not_hide_a_mistake():
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
