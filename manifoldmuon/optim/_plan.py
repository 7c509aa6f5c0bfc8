"""The plan of a tree: the manifold of each weight, found and checked once for a structure."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from manifoldmuon._internal.meshes.mesh import placed_like, replicated_like, whole_along
from manifoldmuon._internal.trees.matching import Matched, refuse_repeated
from manifoldmuon._internal.trees.paths import (
    flatten_with_path,
    if_complex,
    is_hole,
    nest,
    path_string,
)
from manifoldmuon.manifolds import Entry, LaidOut, Manifold
from manifoldmuon.optim._geometry import Geometry, match_geometry, warn_of_copies


class Weight(NamedTuple):
    """A parameter with its manifold, or one of the unequal blocks of a fused parameter.

    Attributes:
      keys: keys of the path as text; the last of a block is its index.
      index: of the parameter in the flattened tree.
      entry: its manifold, or a manifold in a layout.
      block: axis, start and end of the block; None for a whole parameter.
    """

    keys: tuple[str, ...]
    index: int
    entry: Entry
    block: tuple[int, int, int] | None = None

    @property
    def path(self) -> str:
        """Return the keys joined by `/`; of a block `qkv/kernel/0`."""
        return "/".join(self.keys)

    @property
    def manifold(self) -> Manifold:
        return self.entry.manifold if isinstance(self.entry, LaidOut) else self.entry

    def of(self, leaf: Any) -> Any:
        """Return this weight's block of a leaf; all of a leaf, such as a budget, without blocks."""
        shape = getattr(leaf, "shape", ())
        if self.block is None or len(shape) < -self.block[0] or shape[self.block[0]] == 1:
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.eval_shape(self.of, leaf)
        axis, start, end = self.block
        after = (slice(None),) * (-1 - axis)
        return whole_along(leaf, axis)[(..., slice(start, end), *after)]

    def shape(self, leaf: Any) -> tuple[int, ...]:
        """Return the shape of this weight's points, with copies, in the manifold's layout."""
        shape = list(jnp.shape(leaf))
        if self.block is not None:
            axis, start, end = self.block
            shape[axis] = end - start
        entry = self.entry
        return entry.layout.inner_shape(tuple(shape)) if isinstance(entry, LaidOut) else (*shape,)

    def inward(self, x: Any) -> Any:
        """Rearrange an array of this weight into the manifold's layout."""
        return self.entry.layout.inward(x) if isinstance(self.entry, LaidOut) else x

    def outward(self, x: Any, shape: tuple[int, ...]) -> Any:
        """Undo `inward` for an array of the shape `shape`."""
        return self.entry.layout.outward(x, shape) if isinstance(self.entry, LaidOut) else x

    def copies(self, leaf: Any) -> tuple[int, ...]:
        """Return the leading axes of `shape`, which count independent points."""
        shape = self.shape(leaf)
        return shape[: len(shape) - self.manifold.ndim]


@dataclasses.dataclass(frozen=True, eq=False)
class Plan(Matched):
    """A flattened tree of parameters, and the weights that have a manifold.

    Attributes:
      rest: indices of the parameters that another optimizer updates; not in `real`.
      weights: every parameter of `real`, or its blocks, in the order of the tree.
    """

    rest: tuple[int, ...]
    weights: tuple[Weight, ...]

    def join(self, new: list[Any], tree: Any, like: Any) -> Any:
        """Return `tree` with the new array of each weight; None keeps the leaf.

        Joined blocks get the shardings of `like`, the parameters.
        """
        leaves, blocks = self.leaves(tree), {}
        for weight, x in zip(self.weights, new, strict=True):
            if weight.block is not None:
                blocks.setdefault(weight.index, []).append((x, weight))
            elif x is not None:
                leaves[weight.index] = x
        for i, pairs in blocks.items():
            if any(x is not None for x, _ in pairs):
                arrays = [weight.of(leaves[i]) if x is None else x for x, weight in pairs]
                whole = jnp.concatenate(arrays, pairs[0][1].block[0])
                leaves[i] = placed_like(whole, self.leaves(like)[i])
        return jax.tree.unflatten(self.treedef, leaves)

    def by_path(self, make: Callable[[Weight, Any], Any], params: Any) -> dict[str, Any]:
        """Return `make(weight, leaf)` for every weight by path, replicated over its mesh.

        Weights with the result None are left out.
        """
        leaves = self.leaves(params)
        made = {w.path: (make(w, leaves[w.index]), leaves[w.index]) for w in self.weights}
        return {path: replicated_like(x, leaf) for path, (x, leaf) in made.items() if x is not None}

    def nest(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return values by path as nested dictionaries: the fields of a state."""
        return nest({w.keys: values[w.path] for w in self.weights if w.path in values})

    def flat(self, tree: Any) -> dict[str, Any]:
        """Return the values of nested dictionaries by path; weights without any are left out."""
        values = {}
        for weight in self.weights:
            node = tree
            for key in weight.keys:
                if not isinstance(node, dict) or key not in node:
                    break
                node = node[key]
            else:
                values[weight.path] = node
        return values


def make_plan(geometry: Geometry, params: Any, *, rest: bool = False, warn: bool = True) -> Plan:
    """Return the plan of a tree of parameters; cached by structure, shapes and dtypes.

    `rest` allows the entry None; `warn` warns of copies that the geometry does not declare.
    """
    matched = match_geometry(geometry, params)
    if warn:
        warn_of_copies(matched, params)
    plan = _plan_weights(matched)
    if plan.rest and not rest:
        raise ValueError(
            f"the geometry leaves {[plan.paths[i] for i in plan.rest]} to another optimizer"
            " (None): give it, as in manifold_muon(0.02, geometry, rest=optax.adamw(3e-4)), or wrap"
            " a chain of your own in optim.hybrid(tx, geometry, optax.adamw(3e-4))."
        )
    return plan


@functools.lru_cache(maxsize=512)
def _plan_weights(matched: Matched) -> Plan:
    real = tuple([i for i in matched.real if matched.values[i] is not None])
    rest = tuple([i for i in matched.real if matched.values[i] is None])
    weights = []
    for i in real:
        keys, entry = matched.keys[i], matched.values[i]
        blocks = entry.layout.blocks if isinstance(entry, LaidOut) else ()
        if not blocks:
            weights.append(Weight(keys, i, entry))
            continue
        entry = dataclasses.replace(entry, layout=entry.layout.of_block())
        weights += [Weight((*keys, str(k)), i, entry, block) for k, block in enumerate(blocks)]
    refuse_repeated([weight.path for weight in weights])  # `q/0`, of a block and of a key
    return Plan(matched.keys, matched.values, real, matched.treedef, rest, tuple(weights))


def plan_updates(
    name: str, geometry: Geometry, updates: Any, params: Any, *, rest: bool = False
) -> Plan:
    """Return the plan of the parameters; raise unless the updates fit them, see `map_leaves`."""
    if params is None:
        raise ValueError(
            f"{name} needs the current parameters: call tx.update(updates, state, params)."
        )
    structures = [jax.tree.structure(tree, is_leaf=is_hole) for tree in (updates, params)]
    if structures[0] != structures[1]:
        raise ValueError(f"{name}: {_difference(updates, params, *structures)}")
    plan = make_plan(geometry, params, rest=rest, warn=False)
    pairs = zip(plan.paths, plan.leaves(params), plan.leaves(updates), strict=True)
    for i, (path, param, update) in enumerate(pairs):
        if is_hole(param) or isinstance(update, optax.MaskedNode):
            continue
        if update is None:
            if i in plan.rest:
                continue
            raise TypeError(
                f"{name}: the update of {path!r} is None; give zeros, or make the entry of the"
                " geometry None, for `rest=` or hybrid."
            )
        if jnp.shape(update) != jnp.shape(param):
            raise ValueError(
                f"{name}: the update of {path!r} has shape {jnp.shape(update)}, the parameter"
                f" {jnp.shape(param)}."
            )
        dtype = jnp.result_type(update)
        if not jnp.issubdtype(dtype, jnp.floating) and i not in plan.rest:
            raise TypeError(
                f"{name}: the update of {path!r} has dtype {dtype}; give the gradient of a real"
                f" floating point parameter{if_complex(dtype)}."
            )
    return plan


def _difference(updates: Any, params: Any, *structures: Any) -> str:
    given, wanted = (
        [path_string(path) for path, _ in flatten_with_path(tree, is_leaf=is_hole)[0]]
        for tree in (updates, params)
    )
    missing = [path for path in wanted if path not in given]
    extra = [path for path in given if path not in wanted]
    if not missing and not extra:
        given, wanted = structures
        return (
            f"updates and parameters are trees of different containers: {given} against {wanted}."
        )
    hint = ""
    if not set(given) & set(wanted):
        hint = " The call is tx.update(updates, state, params): were two exchanged?"
    return (
        "updates and parameters are different trees: parameters without an update"
        f" {missing}, updates without a parameter {extra}.{hint}"
    )
