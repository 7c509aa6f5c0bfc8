"""A learning rate computed in every step from the loss and its slope, by a rule."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from manifoldmuon._internal.arguments import check_arguments, check_fields, one_of
from manifoldmuon._internal.links import require
from manifoldmuon._internal.mesh import match_varying_axes
from manifoldmuon._internal.paths import is_hole


class StepRule(abc.ABC):
    """Rule for the length of a step along a direction of norm 1: a frozen value without arrays.

    Examples:
      >>> DeepTrust().length(jnp.array(2.0), jnp.array(1.0)).round(3).item()
      0.693...
    """

    @abc.abstractmethod
    def length(self, slope: Float[Array, ""], value: Float[Array, ""]) -> Float[Array, ""]:
        """Return the learning rate.

        Args:
          slope: `<gradient, direction>`, positive; the dual norm of the gradient where the
            direction is the steepest.
          value: the loss.
        """


@dataclasses.dataclass(frozen=True)
class SquareLossSmoothness(StepRule):
    """`slope / (alpha sqrt(2 value) + 1)`, for the loss `|f - y|_RMS^2 / 2`, batch mean.

    A network whose second derivative in the weights is at most `alpha` (`module.sharpness.alpha`)
    makes this loss `sigma alpha + tau`-smooth in the modular norm, with `sigma = sqrt(2 loss)`
    and `tau = 1` (modular norm, arXiv:2405.14813, proposition 5); steepest descent in a norm has
    this step. It holds as far as the network's declared sensitivities and sharpness do: for
    weights and inputs of norm at most 1, and not across the kinks of a ReLU.

    Attributes:
      alpha: the sharpness of the network in its weights, 0 or more.

    Examples:
      >>> SquareLossSmoothness(1.0).length(jnp.array(6.0), jnp.array(2.0)).item()
      2.0
    """

    alpha: float

    def __post_init__(self):
        check_fields(self, alpha="[0, inf)")

    def length(self, slope: Float[Array, ""], value: Float[Array, ""]) -> Float[Array, ""]:
        return slope / (self.alpha * jnp.sqrt(2 * value) + 1)


@dataclasses.dataclass(frozen=True)
class DeepTrust(StepRule):
    """`log((1 + sqrt(1 + 4 slope)) / 2)`: the step of automatic gradient descent, in any norm.

    It minimises `-eta slope + (exp(eta) - 1)^2 / 2` (arXiv:2304.05187, theorem 2), for networks
    that are a product of layers of norm 1, the square loss `|f - y|_RMS^2 / 2`, and budgets that
    add up to 1. With a spectral norm for each layer the paper's second assumption, that gradients
    have rank one, is not needed.

    Examples:
      >>> DeepTrust().length(jnp.array(0.0), jnp.array(1.0)).item()
      0.0
    """

    def length(self, slope: Float[Array, ""], value: Float[Array, ""]) -> Float[Array, ""]:
        # So written, a tiny slope gives itself and not the logarithm of 1.
        return jnp.log1p(2 * slope / (1 + jnp.sqrt(1 + 4 * slope)))


class ScaleByRuleState(NamedTuple):
    """State of `scale_by_rule`: measurements of the last step.

    Attributes:
      learning_rate: the length of the step; float32.
      slope: `<gradient, direction>`; float32.
    """

    learning_rate: Float[Array, ""]
    slope: Float[Array, ""]


@check_arguments(rule=one_of(StepRule))
def scale_by_rule(rule: StepRule) -> optax.GradientTransformationExtraArgs:
    """Scale updates by minus a learning rate that a rule computes from the loss and its slope.

    `update` takes the loss and the gradient as Optax's line searches do:
    `tx.update(grads, state, params, value=loss, grad=grads)`. It flips the sign. Directions of
    negative slope (momentum may point uphill) give no step; a NaN in the gradient makes the
    whole step NaN.

    Args:
      rule: how the length follows from the loss and the slope along the direction.

    Returns:
      A transformation whose state is a `ScaleByRuleState`.

    Raises:
      ValueError: on use, without `value` or `grad`.

    Examples:
      >>> net = mm.modules.Linear(3, 4)
      >>> steepest = mm.optim.scale_by_duality(net.geometry(), net.budgets())
      >>> rule = scale_by_rule(SquareLossSmoothness(net.sharpness.alpha))
      >>> tx = mm.optim.chain(steepest, rule, mm.optim.retract(net.geometry()))
    """

    def init_fn(params: Any) -> ScaleByRuleState:
        state = ScaleByRuleState(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))
        return match_varying_axes(state, params)

    def update_fn(updates, state, params=None, *, value=None, grad=None, **extra_args):
        del state, params, extra_args
        require("scale_by_rule", value=value, grad=grad)
        slope = inner(grad, updates)
        rate = rule.length(slope, jnp.asarray(value, jnp.float32))
        # Not `slope > 0`: a NaN has to stay visible.
        rate = jnp.where(slope <= 0, 0.0, rate)
        return scaled(updates, -rate), ScaleByRuleState(rate, slope)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def inner(grads: Any, updates: Any, dtype: Any = jnp.float32) -> Float[Array, ""]:
    """Sum `<grads, updates>` over a tree in float32 or wider and return it in `dtype`.

    Places without an update do not count.
    """

    def product(update, grad):
        if is_hole(update) or is_hole(grad):
            return jnp.zeros(())
        kind = jnp.promote_types(jnp.result_type(update, grad), jnp.float32)
        return jnp.sum(jnp.asarray(update, kind) * jnp.asarray(grad, kind))

    products = jax.tree.map(product, updates, grads, is_leaf=is_hole)
    return sum(jax.tree.leaves(products), jnp.zeros(())).astype(dtype)


def scaled(updates: Any, factor: Float[Array, ""]) -> Any:
    """Return every update times a number, in the update's dtype."""

    def scale(update):
        return update if is_hole(update) else update * factor.astype(jnp.result_type(update))

    return jax.tree.map(scale, updates, is_leaf=is_hole)


def cast_like(updates: Any, tree: Any) -> Any:
    """Return every update in the dtype of the other tree's leaf."""

    def cast(update, other):
        return update if is_hole(update) else update.astype(jnp.result_type(other))

    return jax.tree.map(cast, updates, tree, is_leaf=is_hole)
