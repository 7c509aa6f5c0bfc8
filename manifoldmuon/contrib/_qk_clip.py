"""QK-Clip: scale down a head's queries and keys when its attention logits grow too large."""

from __future__ import annotations

from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from manifoldmuon._internal.arguments import checked, number
from manifoldmuon._internal.matrices.arrays import expand_trailing, upcast
from manifoldmuon._internal.trees.matching import Matched, match
from manifoldmuon._internal.trees.paths import Spec, match_prefix
from manifoldmuon._internal.trees.transformations import (
    Terminal,
    difference,
    gradient_transformation,
    require_arguments,
)
from manifoldmuon.manifolds import Euclidean, LaidOut, Layout, Manifold
from manifoldmuon.norms import Frobenius
from manifoldmuon.optim import Geometry, map_leaves, resolve_geometry

Heads = Spec[Layout | None]
"""A prefix tree, a `by_path` object, or a function of path and leaf: a `Layout`, or None."""


@checked
def with_qk_clip(
    inner: optax.GradientTransformation,
    geometry: Geometry,
    heads: Heads,
    threshold: Annotated[ArrayLike, number("(0, inf)")] = 100.0,
    power: Annotated[ArrayLike, number("(0, inf)")] = 0.5,
) -> optax.GradientTransformationExtraArgs:
    """Keep attention logits below a threshold by scaling query and key weights: QK-Clip.

    If the largest logit `S` of a head in this batch is above `threshold`, the head's query and key
    weights are multiplied by `(threshold / S)**power` after the step of `inner`. With power 1/2 for
    both, the logits are multiplied by `threshold / S` (Kimi K2, arXiv:2507.20534, section 2.1 and
    algorithm 1). Steps of other heads are unchanged. `with_qk_clip(muon(...), ...)` is MuonClip.

    `update` takes the logits of the gradient's forward pass:
    `tx.update(grads, state, params, max_logits=...)`. They are a prefix tree over the parameters,
    matched by path: an array for an attention layer, `{"layers/0/attention": s}`, or for each of
    its weights. An array has a number for each head and, for a stack of layers, a row for each
    layer; a scalar applies to all heads. The numbers are the largest logits over batch and
    positions, including the softmax's scale (`1 / sqrt(head_dim)`).

    * If queries share a key (grouped queries), give the key the largest logit of its group:
      `{".../query": s, ".../key": s.reshape(key_heads, -1).max(-1)}`.
    * In a fused array of q, k and v, 0 leaves a head unchanged: `concatenate([s, s, 0 * s])`.
    * Multi-head latent attention scales rotary queries, which share a key, by `threshold / S`:
      wrap twice, the second time with these weights and `power=1.0`.
    * Biases are not scaled. With a bias in q or k the logits shrink by less.
    * `optax.MultiSteps` uses only the logits of the last batch: give a running maximum.

    It wraps the whole optimizer and is the last transformation; `with_master_copies` or another
    `with_qk_clip` may go around it. Weights on constrained manifolds are refused, because the set
    fixes their size.

    Args:
      inner: the optimizer.
      geometry: manifold of each parameter; see `resolve_geometry`.
      heads: layout of each parameter's heads: a `Layout` with a matrix for each head, such as
        `Layout(0, 2)` for (d_model, heads, head_dim) or `Layout(out_blocks=heads)` for
        (heads head_dim, d_model), or None for parameters that are not clipped. The layout for
        directions may be different.
      threshold: largest logit allowed; 100 in the report.
      power: exponent of the factor, for each of these weights.

    Returns:
      A transformation with the state of `inner`. Updates have the parameters' dtypes, rounded so
      that `W + u` is next to the scaled weight. A logit that is NaN or infinite clips nothing.

    Examples:
      >>> g, h = mm.manifolds.Euclidean(mm.norms.RMSToRMS()), mm.manifolds.Layout(out_blocks=4)
      >>> heads = mm.optim.by_path({"**/query": h, "**/key": h, "**": None})
      >>> tx = with_qk_clip(mm.optim.muon(0.02, g), g, heads)
    """
    inner = optax.with_extra_args_support(inner)

    def init_fn(params: Any) -> Any:
        _find_heads(heads, geometry, params)
        return inner.init(params)

    def update_fn(updates, state, params=None, *, max_logits=None, **extra_args):
        require_arguments("with_qk_clip", max_logits=max_logits, params=params)
        steps, state = inner.update(updates, state, params, max_logits=max_logits, **extra_args)
        matched = _find_heads(heads, geometry, params)
        clipped = [i for i in matched.real if matched.values[i] is not None]
        logits = _match_logits(max_logits, clipped, matched)
        leaves, factors = matched.leaves(params), {}
        entries: dict[int, Any] = dict.fromkeys(matched.real, _WHOLE)
        for i, given in zip(clipped, logits, strict=True):
            path, layout = matched.paths[i], matched.values[i]
            entries[i] = LaidOut(Euclidean(Frobenius(2)), layout)
            shape = layout.inner_shape(jnp.shape(leaves[i]))[:-2]
            factors[path] = _factors(path, shape, given, threshold, power)
        steps, _ = map_leaves(
            _clip,
            matched.fill(params, entries),
            steps,
            params,
            name="with_qk_clip",
            select=lambda manifold: manifold.ndim == 2,
            carried=factors,
            stack=False,
        )
        return steps, state

    return gradient_transformation(update_fn, init_fn, inner.init, Terminal)


_WHOLE = Euclidean(Frobenius(0))


def _find_heads(heads: Heads, geometry: Geometry, params: Any) -> Matched:
    """Return the layout of every clipped parameter, None for the others."""
    matched = match(heads, params, _check_heads, "heads")
    manifolds = matched.leaves(resolve_geometry(geometry, params))
    clipped = [i for i in matched.real if matched.values[i] is not None]
    entries = {matched.paths[i]: getattr(manifolds[i], "manifold", manifolds[i]) for i in clipped}
    if constrained := [path for path, entry in entries.items() if entry and entry.constrained]:
        raise ValueError(
            f"with_qk_clip: {constrained} are constrained, and scaling would take them off their"
            " manifolds; leave them out (None), or choose Euclidean with a norm"
        )
    return matched


def _check_heads(path: str, layout: Any, leaf: jax.ShapeDtypeStruct) -> None:
    if layout is None:
        return
    if not isinstance(layout, Layout):
        raise TypeError(
            f"with_qk_clip: the entry of {path!r} is {layout!r}; give a Layout of its heads, or"
            " None for a parameter that is not clipped"
        )
    try:
        layout.check_shape(leaf.shape)
    except ValueError as error:
        raise ValueError(f"with_qk_clip: the parameter {path!r}: {error}") from error


def _match_logits(max_logits: Any, clipped: list[int], matched: Matched) -> list[Any]:
    """Return the entry of `max_logits` above each clipped parameter."""
    if not clipped:
        return []
    paths = [matched.paths[i] for i in clipped]
    others = {path: None for path in matched.paths if path not in paths}
    return match_prefix(max_logits, paths, others, "with_qk_clip: max_logits")


def _factors(
    path: str, heads: tuple[int, ...], logits: Any, threshold: ArrayLike, power: ArrayLike
) -> jax.Array:
    """Return the factor of each head."""
    shape = None if logits is None else jnp.shape(logits)
    if shape not in ((), heads):
        raise ValueError(
            f"with_qk_clip: max_logits of {path!r} must have the shape of its heads, {heads}, or be"
            f" a single number; got shape {shape}. A key shared by several queries takes the"
            " largest logit of its group"
        )
    logits = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), heads)
    above = jnp.isfinite(logits) & (logits > threshold)
    return jnp.where(above, (threshold / jnp.where(above, logits, threshold)) ** power, 1.0)


def _clip(manifold: Manifold, point: jax.Array, update: jax.Array, factor: jax.Array) -> jax.Array:
    factor = expand_trailing(factor, manifold.ndim)
    scaled = difference(factor * (upcast(point) + upcast(update)), point)
    return jnp.where(factor == 1, update.astype(point.dtype), scaled)
