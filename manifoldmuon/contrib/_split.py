"""Parameters in parts: q, k and v of a fused projection as matrices of their own."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from manifoldmuon._internal.arguments import check_arguments
from manifoldmuon._internal.links import LastLink, Link, link
from manifoldmuon._internal.paths import Pattern, is_box, is_hole, path_string
from manifoldmuon.optim import by_path


@check_arguments()
def split_parameters(
    inner: optax.GradientTransformation, sizes: Mapping[Pattern, Sequence[int]], axis: int = -1
) -> Link:
    """Train parts of a parameter as parameters of their own, such as q, k and v of one kernel.

    Grouped queries make q longer than k and v, so that no number of equal blocks (`out_blocks` of
    `Layout`) cuts their kernel into these three matrices. Here `inner` sees a tuple of arrays in
    its place: the parts of `qkv/kernel` have the paths `qkv/kernel/0`, `qkv/kernel/1`, ..., and
    each its own manifold, momentum and step.

    Args:
      inner: any transformation, such as a whole `muon`, `hybrid` or `hyperball`. Its geometry is
        of the parts; an entry for `qkv/kernel`, as `frameworks` reads it, holds for all of them.
      sizes: the lengths of the parts, by patterns on the path as in `optim.by_path`. Parameters
        without a pattern stay whole.
      axis: which is cut: -1, the outputs of a kernel (in, out), or -2 of a matrix (out, in).

    Returns:
      The transformation, for the parameters as they are. Its state is that of `inner`, of the
      parts: `optax.tree_utils.tree_map_params` finds it, but takes no second tree of the whole
      parameters. It counts as a last link where `inner` does.

    Raises:
      TypeError: `inner` is no transformation, `sizes` no dictionary.
      ValueError: on use: the sizes do not add up to the length of the axis, or a pattern matches
        no parameter.

    Examples:
      >>> kernel = mm.manifolds.Euclidean(mm.norms.RMSToRMS()).transposed()
      >>> tx = split_parameters(mm.optim.muon(0.02, kernel), {"**/qkv": (8, 2, 2)})
      >>> params = {"qkv": jnp.ones((8, 12))}  # four queries, one key, one value, of two entries
      >>> updates, _ = tx.update(params, tx.init(params), params)
      >>> updates["qkv"].shape
      (8, 12)
    """
    base, rules = optax.with_extra_args_support(inner), by_path(sizes)

    def cut(tree: Any) -> Any:
        pairs, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_whole)
        found = [(path_string(path), leaf) for path, leaf in pairs]
        chosen = [rules.first_match(path) for path, _ in found]
        unused = [rule for i, (rule, _) in enumerate(rules.rules) if i not in chosen]
        masked = any(isinstance(leaf, optax.MaskedNode) for _, leaf in found)
        if unused and not masked and not all(is_hole(leaf) for _, leaf in found):
            raise ValueError(
                f"split_parameters: the patterns {unused} match no parameter; the parameters are "
                f"{[path for path, _ in found]}"
            )
        parts = [
            leaf if rule is None else _parts(path, leaf, rules.rules[rule][1], axis)
            for (path, leaf), rule in zip(found, chosen, strict=True)
        ]
        return jax.tree.unflatten(treedef, parts)

    def joined(tree: Any, like: Any) -> Any:
        treedef = jax.tree.structure(like, is_leaf=_is_whole)
        # A `MaskedNode` is a tuple as well.
        found = [_join(x, axis) if type(x) is tuple else x for x in treedef.flatten_up_to(tree)]
        return jax.tree.unflatten(treedef, found)

    def init_fn(params: Any) -> Any:
        return base.init(cut(params))

    def update_fn(updates, state, params=None, **extra_args):
        parts = None if params is None else cut(params)
        steps, state = base.update(cut(updates), state, parts, **extra_args)
        return joined(steps, updates), state

    return link(update_fn, init_fn, base.init, LastLink if isinstance(inner, LastLink) else Link)


def _is_whole(node: Any) -> bool:
    return is_hole(node) or is_box(node)


def _parts(path: str, leaf: Any, sizes: Sequence[int], axis: int) -> tuple[Any, ...]:
    """Return the parts of an array, or boxes with them."""
    for x in jax.tree.leaves(leaf):
        if x.shape[axis] != sum(sizes):
            raise ValueError(
                f"split_parameters: the sizes {tuple(sizes)} of {path!r} must add up to the length "
                f"of axis {axis} of its shape {x.shape}"
            )
    ends = itertools.accumulate(sizes)
    return tuple(
        jax.tree.map(functools.partial(_part, end - size, end, axis), leaf)
        for size, end in zip(sizes, ends, strict=True)
    )


def _part(start: int, end: int, axis: int, x: Any) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.eval_shape(functools.partial(_part, start, end, axis), x)
    return jax.lax.slice_in_dim(x, start, end, axis=axis)


def _join(parts: tuple[Any, ...], axis: int) -> Any:
    return jax.tree.map(lambda *own: jnp.concatenate(own, axis), *parts)
