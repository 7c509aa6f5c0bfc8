"""Automatic gradient descent: step lengths computed from the depth and the gradient."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray

from manifoldmuon._internal.arguments import Rate, checked
from manifoldmuon._internal.matrices.arrays import upcast
from manifoldmuon._internal.meshes.mesh import match_varying_axes
from manifoldmuon._internal.trees.matching import Matched, match
from manifoldmuon._internal.trees.paths import Spec, if_complex, is_hole
from manifoldmuon._internal.trees.transformations import gradient_transformation
from manifoldmuon.manifolds import Euclidean, LaidOut, Layout, Manifold, Stiefel
from manifoldmuon.norms import FanRatio, Frobenius
from manifoldmuon.optim._chain import chain
from manifoldmuon.optim._execute import execute
from manifoldmuon.optim._plan import Weight, plan_updates
from manifoldmuon.optim._trees import init_tree

Layouts = Spec[Layout]
"""A prefix tree of `Layout`, a `by_path` object, or a function `(path, leaf) -> Layout`."""


class ScaleByAGDState(NamedTuple):
    """State of `scale_by_agd`: measurements of the last step.

    Attributes:
      eta: the length of the step, `log((1 + sqrt(1 + 4 summary)) / 2)`; float32.
      summary: the gradient summary `G`, the mean of the scaled gradient norms over the layers;
        float32.
    """

    eta: Float[Array, ""]
    summary: Float[Array, ""]


@checked
def agd(layouts: Layouts, gain: Rate = 1.0) -> optax.GradientTransformationExtraArgs:
    r"""Automatic gradient descent (arXiv:2304.05187, theorem 2): no learning rate, no schedule.

    For a network of `L` layers, trained with the square loss `|f - y|^2 / (2 d_L)`, on inputs
    with `|x| = sqrt(d_0)` and targets with `|y| = sqrt(d_L)`, from `init_semi_orthogonal`:

    $$
    \begin{aligned}
    G &= \frac1L\sum_k s_k \|g_k\|_F, \qquad s_k = \sqrt{d_\text{out}/d_\text{in}}, \qquad
    \eta = \log\frac{1 + \sqrt{1 + 4G}}2,\\
    W_k &\leftarrow W_k - \text{gain}\, \frac{\eta}{L}\, s_k\, \frac{g_k}{\|g_k\|_F}.
    \end{aligned}
    $$

    The taps of a convolution are normalised separately, with `s_k / sqrt(taps)`, and their norms
    are summed (appendix B of the paper). Every copy of a stacked layer counts for the depth `L`.

    Args:
      layouts: the `Layout` of every parameter: a single `Layout`, a prefix tree (compared by
        path), the result of `by_path`, or a function of JAX key path and leaf. Unnamed axes are
        stacked layers. Nothing is guessed from a shape; biases, gains and scalars are refused.
      gain: multiplies the step. 1 is the published method.

    Examples:
      >>> layouts = {"w": mm.manifolds.Layout()}  # (out, in)
      >>> tx, params = agd(layouts), {"w": jnp.eye(4, 3)}
      >>> state = tx.init(params)
      >>> for _ in range(4):
      ...     loss, grad = jax.value_and_grad(lambda p: jnp.sum((p["w"] - 1) ** 2))(params)
      ...     updates, state = tx.update(grad, state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     print(f"{loss:.2f}", end=" ")
      9.00 2.77 0.35 0.00
    """
    return chain(scale_by_agd(layouts), optax.scale_by_learning_rate(gain))


def scale_by_agd(layouts: Layouts) -> optax.GradientTransformationExtraArgs:
    """Replace gradients by the ascending step of `agd`, with gain 1.

    The step length depends on all layers: a NaN in a single gradient makes every update NaN (wrap
    the transformation in `optax.apply_if_finite`), and under `optax.masked` only the remaining
    layers count for the depth. Zero gradients give zero updates. The scale of the gradients
    matters, so clipping or averaging them beforehand changes the step.

    Args:
      layouts: the layout of every parameter; see `agd`.

    Returns:
      A transformation with a `ScaleByAGDState`. Updates have the gradients' dtypes; the arithmetic
      is done in float32 or wider.
    """

    def init_fn(params: Any) -> ScaleByAGDState:
        _match_layouts(layouts, params)  # refuses biases before training
        return match_varying_axes(_start(), params)

    def update_fn(updates, state, params=None, **extra_args):
        del state, extra_args
        points = updates if params is None else params
        matched = _match_layouts(layouts, points)
        leaves, values = matched.leaves(points), matched.values
        norms = {i: Frobenius(2, _fan_ratio(values[i], jnp.shape(leaves[i]))) for i in matched.real}
        entries = {i: LaidOut(Euclidean(norm), values[i]) for i, norm in norms.items()}
        plan = plan_updates("agd", matched.fill(points, entries), updates, points)
        units, sizes = execute("agd", plan, _dualize, (points, updates))
        weights = [weight for weight in plan.weights if weight.path in sizes]
        depth = max(sum(_layers(w, leaves[w.index]) for w in weights), 1)
        summary = sum(map(jnp.sum, sizes.values()), jnp.zeros(())) / depth
        # log((1 + sqrt(1 + 4 G)) / 2), rearranged to be accurate for tiny G.
        eta = jnp.log1p(2 * summary / (1 + jnp.sqrt(1 + 4 * summary)))

        def scaled(unit: Any, update: Any) -> Any:
            if is_hole(unit):
                return unit
            length = (eta / depth).astype(jnp.result_type(unit))
            return (unit * length).astype(jnp.result_type(update))

        state = ScaleByAGDState(eta.astype(jnp.float32), summary.astype(jnp.float32))
        return jax.tree.map(scaled, units, updates, is_leaf=is_hole), state

    return gradient_transformation(update_fn, init_fn, lambda params: _start())


def _start() -> ScaleByAGDState:
    return ScaleByAGDState(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))


def init_semi_orthogonal(layouts: Layouts, key: PRNGKeyArray, params: Any) -> Any:
    """Return random weights for `agd`: semi-orthogonal, of unit RMS-to-RMS norm.

    All singular values of a matrix are `sqrt(d_out / d_in)`; in a convolution every tap is a
    matrix with the singular values `sqrt(d_out / (d_in * taps))` (arXiv:2304.05187, appendix B;
    the factor in the text of section 3.3 is upside down). The values of a leaf depend only on
    `key` and its path.

    Args:
      layouts: the layout of every parameter; see `agd`.
      key: a JAX random key.
      params: arrays or `jax.ShapeDtypeStruct` that give structure, shapes and dtypes.

    Examples:
      >>> init_semi_orthogonal(mm.manifolds.Layout(), jax.random.key(0), jnp.ones((4, 3))).shape
      (4, 3)
    """
    matched = _match_layouts(layouts, params)
    leaves, entries = matched.leaves(params), {}
    for i in matched.real:
        layout, shape = matched.values[i], jnp.shape(leaves[i])
        entry = LaidOut(Stiefel(_fan_ratio(layout, shape)), layout)
        entries[i] = entry.stacked(len(shape) - entry.ndim)
    return init_tree(matched.fill(params, entries), key, params)


def _fan_ratio(layout: Layout, shape: tuple[int, ...]) -> FanRatio:
    """Return the rule `sqrt(d_out / (d_in * taps))`: the size of each matrix of a layer."""
    return FanRatio(1 / math.sqrt(max(math.prod(_tap_sizes(layout, shape)), 1)))


def _layers(weight: Weight, leaf: Any) -> int:
    """Return how many layers an array holds, without taps."""
    layout = weight.entry.layout  # type: ignore
    copies = weight.copies(leaf)
    return math.prod(copies[: len(copies) - len(_tap_sizes(layout, jnp.shape(leaf)))])


def _tap_sizes(layout: Layout, shape: tuple[int, ...]) -> tuple[int, ...]:
    axes = (layout.taps,) if isinstance(layout.taps, int) else layout.taps
    return tuple(shape[axis] for axis in axes)


def _dualize(
    manifold: Manifold, point: jax.Array, grad: jax.Array, given: Any
) -> tuple[jax.Array, jax.Array]:
    """Return unit directions and gradient norms per matrix, each times `_fan_ratio`."""
    wide = upcast(grad)
    return manifold.norm.dualize(wide), manifold.norm.dual_norm(wide)


def _match_layouts(layouts: Layouts, tree: Any) -> Matched:
    return match(layouts, tree, _check_layout, "layouts")


def _check_layout(path: str, layout: Any, leaf: jax.ShapeDtypeStruct) -> None:
    if not isinstance(layout, Layout):
        raise TypeError(
            f"automatic gradient descent: the entry of {path!r} is {layout!r}, not a Layout."
        )
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise TypeError(
            f"automatic gradient descent: {path!r} has dtype {leaf.dtype}, not real floating point."
            f" Take it out with optax.masked or optax.partition{if_complex(leaf.dtype)}."
        )
    try:
        layout.check_shape(leaf.shape)
    except ValueError as error:
        raise ValueError(
            f"{path!r}: {error}. Biases, gains and scalars have no fan-in, and automatic gradient"
            " descent gives no step for them: leave them out of the network, or hand them to"
            " another optimizer with optax.partition; see the page 'Automatic step lengths'."
        ) from None
