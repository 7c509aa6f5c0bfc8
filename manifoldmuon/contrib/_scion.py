"""Scion: conditional gradients in the ball of each leaf's norm."""

from __future__ import annotations

import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike

from manifoldmuon._internal.arguments import check_arguments, number, one_of
from manifoldmuon.linalg import TRAINING_MSIGN, MsignMethod
from manifoldmuon.optim import Budgets, Geometry, muon


@check_arguments(constrained=one_of(bool, np.bool_))
def scion(
    learning_rate: optax.ScalarOrSchedule,
    geometry: Geometry,
    radius: Budgets = 1.0,
    momentum: ArrayLike | None = 0.9,
    *,
    constrained: bool = True,
    method: MsignMethod | None = TRAINING_MSIGN,
    accumulator_dtype: DTypeLike | None = "float32",
    clip: ArrayLike | optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Scion: conditional gradients in the ball of each leaf's norm (arXiv:2502.07529, alg. 1, 2).

    With the steepest direction $A$ of the averaged gradient in the leaf's norm and the radius $r$:

    $$
    W \leftarrow (1 - \eta)\, W - \eta\, r A .
    $$

    This is a Frank-Wolfe step. It is `muon` without lookahead
    whose weight decay is 1 and whose budgets are the radii. Weights that start in the ball
    `norm(w) <= radius` stay in it, as closely as the method of msign is exact (1.014 radii for the
    default), and others come in; `init_tree` draws weights of norm 1, to be multiplied by the
    radius.

    Args:
      learning_rate: a number in [0, 1], or an Optax schedule of such.
      geometry: `Euclidean` with a norm for every parameter, the paper's choice of which is
        `RMSToRMS()` for matrices, `L1ToRMS()` or `MaxAbs()` for tables and the last layer,
        `Frobenius(1, RootDim())` for biases; see `resolve`.
      radius: of the ball of each leaf, in its norm; see `scale_by_budget`. The paper takes 50 in
        the body of a language model and `3000 / fan_in`, under `MaxAbs()`, for its last layer.
      momentum: 1 minus the weight of the newest gradient in the average (the paper's `alpha`).
      constrained: whether there is a ball. False is its unconstrained variant, without decay.

    Returns:
      The chain. `update` needs `params`.

    Raises:
      ValueError: a learning rate outside of [0, 1] where there is a ball.

    Examples:
      >>> tx = scion(0.05, mm.manifolds.Euclidean(mm.norms.RMSToRMS()), radius=50.0)
    """
    if constrained:  # the share of the way to the edge of the ball
        number("[0, 1]", schedule=True)("scion: learning_rate", learning_rate)
    return muon(
        learning_rate,
        geometry,
        momentum,
        method=method,
        nesterov=False,
        accumulator_dtype=accumulator_dtype,
        clip=clip,
        weight_decay=1.0 if constrained else None,
        budgets=radius,
    )
