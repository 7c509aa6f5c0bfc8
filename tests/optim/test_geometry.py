"""Assignment of manifolds to parameters, and errors that name the parameter."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from manifoldmuon import optim
from manifoldmuon._internal.trees.paths import path_string
from manifoldmuon.manifolds import Euclidean, Hypersphere, Layout, Stiefel
from tests.optim.instances import abstract

W, B = Stiefel(), Euclidean()
TREE = abstract({"blocks": [{"w": (4, 3), "b": (4,)}, {"w": (4, 3), "b": (4,)}], "head": (3, 3)})
WANTED = {"blocks": [{"w": W, "b": B}, {"w": W, "b": B}], "head": W}


@pytest.mark.parametrize(
    "geometry",
    [
        WANTED,
        {"blocks": {"0": {"w": W, "b": B}, "1": {"w": W, "b": B}}, "head": W},
        lambda path, leaf: B if path[-1] == jax.tree_util.DictKey("b") else W,
        lambda path, leaf: B if path_string(path).endswith("/b") else W,
        optim.by_path({"blocks/*/b": B, "**/w": W, "head": W}),
        optim.by_path({"**/b": B, "**": W}),
        optim.by_path({re.compile(r"blocks/\d/b"): B, re.compile(r".*"): W}),
        optim.by_path({"blocks/?/b": B, "blocks/**/w": W, "head/**": W}),
    ],
)
def test_equivalent_geometries_resolve_to_same_tree(geometry):
    assert optim.resolve_geometry(geometry, TREE) == WANTED


def test_prefix_covers_whole_branch():
    tree = abstract({"mlp/~/linear": {"w": (3, 2)}, "mlp": {"x": (2, 2)}})
    assert optim.resolve_geometry({"mlp/~/linear": W, "mlp/x": W}, tree)["mlp/~/linear"] == {"w": W}
    assert optim.resolve_geometry(W, tree)["mlp"] == {"x": W}


@pytest.mark.parametrize("hole", [None, optax.MaskedNode()])
@pytest.mark.parametrize(
    "geometry",
    [{"a": W, "b": {"deep": B}}, optim.by_path({"a": W, "b/**": B}), lambda path, leaf: W],
)
def test_holes_pass_through_any_geometry(hole, geometry):
    found = optim.resolve_geometry(geometry, {"a": jnp.ones((3, 2)), "b": hole})
    assert found == {"a": W, "b": hole}


def test_patterns_for_masked_branch_may_be_unused():
    geometry = optim.by_path({"a": W, "b/kernel": W, "b/bias": B})
    tree = {"a": jnp.ones((3, 2)), "b": optax.MaskedNode()}
    assert optim.resolve_geometry(geometry, tree)["a"] == W


@pytest.mark.parametrize(
    ("geometry", "error", "message"),
    [
        ({"blocks": WANTED["blocks"]}, ValueError, "no entry for the parameter 'head'"),
        (WANTED | {"tail": W}, ValueError, "['tail'] describe no parameter"),
        (WANTED | {"head": {"deeper": W}}, ValueError, "no entry for the parameter 'head'"),
        (WANTED | {"head": "stiefel"}, TypeError, "'head' is 'stiefel', not a Manifold"),
        (Stiefel, TypeError, "parentheses"),
        (optim.by_path({"**/w": W, "**/b": B}), ValueError, "no pattern .*['head']"),
        (optim.by_path({"**": W, "**/b": B}), ValueError, "the patterns ['**/b'] match"),
        (optim.by_path({"*": W, "blocks/*": B}), ValueError, "no pattern .*'blocks/0/b'"),
        (W, ValueError, "'blocks/0/b': .*"),
        (WANTED | {"head": W.with_axes(0, (1, 2))}, ValueError, "'head': .*"),
        (WANTED | {"head": Layout()}, TypeError, "not a Manifold; write Manifold.with_axes"),
        ({"**/w": W, "**": B}, ValueError, "geometry has no entry for .*Put patterns into by_path"),
    ],
)
def test_errors_name_the_path(geometry, error, message):
    message = re.escape(message).replace(r"\.\*", ".*")
    with pytest.raises(error, match=message):
        optim.resolve_geometry(geometry, TREE)


def test_geometry_functions_are_not_cached():
    chosen: dict[str, Any] = {"b": B}

    def geometry(path, leaf):
        return chosen.get(path[-1].key, W)

    params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
    assert optim.resolve_geometry(geometry, params) == {"w": W, "b": B}
    chosen["b"] = Hypersphere()
    assert optim.resolve_geometry(geometry, params) == {"w": W, "b": Hypersphere()}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"a": jnp.ones((3, 2)), "f": jax.nn.relu}, "the leaf 'f' is a .*, not an array. Take the"),
        ({"a": jnp.ones((3, 2)), "name": "x"}, "the leaf 'name' is a str, not an array."),
        ({"a": W}, "the leaf 'a' is a Stiefel.*: were the two exchanged?"),
        (optim.by_path({"**": W}), "the leaf '' is a ByPath.*: were the two exchanged?"),
    ],
)
def test_errors_name_non_array_leaves(params, message):
    with pytest.raises(TypeError, match=message):
        optim.monitor_distance(W, params)


def test_ambiguous_paths_raise():
    params = {"a/b": jnp.ones((3, 2)), "a": {"b": jnp.ones((3, 2))}}
    with pytest.raises(ValueError, match="'a/b'.* more than once"):
        optim.resolve_geometry(W, params)
