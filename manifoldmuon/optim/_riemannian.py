"""Riemannian Adam and SGD: Optax's transformations between tangent projections."""

from __future__ import annotations

from typing import Any

import jax
import optax
from jax.typing import DTypeLike

from manifoldmuon._internal.arguments import Decay, Epsilon, Momentum, Rate, checked
from manifoldmuon._internal.matrices.arrays import upcast
from manifoldmuon.optim._chain import chain
from manifoldmuon.optim._geometry import Geometry
from manifoldmuon.optim._links import project_tangent, retract


@checked
def riemannian_adam(
    learning_rate: Rate,
    geometry: Geometry,
    b1: Decay = 0.9,
    b2: Decay = 0.999,
    eps: Epsilon = 1e-8,
    *,
    nesterov: bool = False,
    accumulator_dtype: DTypeLike | None = "float32",
) -> optax.GradientTransformationExtraArgs:
    r"""Adam on manifolds, entry by entry in the coordinates of the surrounding space.

    With the tangent projection $P$ and the retraction $R$ at $W_t$, entry by entry:

    $$
    \begin{aligned}
    m_t &= \beta_1 m_{t-1} + (1-\beta_1)\, P G_t, \qquad
    v_t = \beta_2 v_{t-1} + (1-\beta_2)\, (P G_t)^2,\\
    W_{t+1} &= R_{W_t}\!\left(-\eta_t\, P\, \frac{m_t/(1-\beta_1^t)}
    {\sqrt{v_t/(1-\beta_2^t)} + \epsilon}\right).
    \end{aligned}
    $$

    The chain is: `project_tangent`, `optax.scale_by_adam`, `project_tangent`,
    `optax.scale_by_learning_rate`, `retract`; on unconstrained leaves it is `optax.adam`.
    (Bécigneul and Ganea, arXiv:1810.00760, keep a single second moment for each point, which does
    not depend on coordinates.)

    The averages stay in the surrounding space, and only the resulting step is projected; textbooks
    project the averages onto the tangent space at each new point.

    Args:
      learning_rate: a number or an Optax schedule: about the root mean square of a step's entries,
        as in flat space, not an angle. The entries of an m x n Stiefel matrix have the root mean
        square `1/sqrt(m)` (m is the longer side), so the best rate falls with the width. Long
        steps are safe: the default retractions project onto the manifold from anywhere.
      geometry: the manifold of each parameter; see `resolve_geometry`. Norms play no role.
      b1: decay of the averaged gradient.
      b2: decay of the averaged square.
      eps: added to the root of the averaged square.
      nesterov: whether to look ahead along the average.
      accumulator_dtype: dtype of the averaged gradient; None for that of the averaged square,
        float32 or wider.

    Examples:
      >>> tx, w = riemannian_adam(0.1, mm.manifolds.Stiefel()), jnp.eye(4, 2)
      >>> state = tx.init(w)
      >>> for _ in range(4):
      ...     loss, grad = jax.value_and_grad(lambda w: jnp.sum((w - jnp.eye(4, 2)[::-1]) ** 2))(w)
      ...     updates, state = tx.update(grad, state, w)
      ...     w = optax.apply_updates(w, updates)
      ...     print(f"{loss:.2f}", end=" ")
      4.00 3.60 3.18 2.74
    """
    return chain(
        project_tangent(geometry),
        scale_by_wide_adam(b1, b2, eps, accumulator_dtype, nesterov),
        project_tangent(geometry),
        optax.scale_by_learning_rate(learning_rate),
        retract(geometry),
    )


def scale_by_wide_adam(
    b1: Any, b2: Any, eps: Any, mu_dtype: Any = None, nesterov: bool = False
) -> optax.GradientTransformation:
    """Return `optax.scale_by_adam` with moments in float32 or wider (`mu` in `mu_dtype`)."""
    adam: Any = optax.scale_by_adam(b1, b2, eps, mu_dtype=mu_dtype, nesterov=nesterov)

    def init_fn(params: Any) -> Any:
        first = adam.init(params)
        mu = jax.tree.map(upcast, first.mu) if mu_dtype is None else first.mu
        return first._replace(mu=mu, nu=jax.tree.map(upcast, first.nu))

    def update_fn(updates, state, params=None):
        return adam.update(jax.tree.map(upcast, updates), state, params)

    return optax.GradientTransformation(init_fn, update_fn)


@checked
def riemannian_sgd(
    learning_rate: Rate,
    geometry: Geometry,
    momentum: Momentum = None,
    *,
    nesterov: bool = False,
    accumulator_dtype: DTypeLike | None = "float32",
) -> optax.GradientTransformationExtraArgs:
    r"""Riemannian stochastic gradient descent, with momentum or without.

    With the tangent projection $P$ and the retraction $R$ at $W_t$:

    $$
    M_t = \mu M_{t-1} + P G_t, \qquad W_{t+1} = R_{W_t}(-\eta_t\, P M_t).
    $$

    The chain is: `project_tangent`, `optax.trace` and `project_tangent` if there is momentum,
    `optax.scale_by_learning_rate`, `retract`; on unconstrained leaves it is `optax.sgd`. Momentum
    stays in the surrounding space: see `riemannian_adam`. For gradient clipping write
    `chain(optax.clip_by_global_norm(1.0), riemannian_sgd(...))`.

    Args:
      learning_rate: a number or an Optax schedule; steps grow with the gradient.
      geometry: the manifold of each parameter; see `resolve_geometry`. Norms play no role.
      momentum: decay of the momentum; None turns momentum off.
      nesterov: whether to look ahead along the momentum.
      accumulator_dtype: see `manifold_muon`.

    Examples:
      >>> tx, w = riemannian_sgd(0.1, mm.manifolds.Stiefel()), jnp.eye(4, 2)
      >>> state = tx.init(w)
      >>> for _ in range(4):
      ...     loss, grad = jax.value_and_grad(lambda w: jnp.sum((w - jnp.eye(4, 2)[::-1]) ** 2))(w)
      ...     updates, state = tx.update(grad, state, w)
      ...     w = optax.apply_updates(w, updates)
      ...     print(f"{loss:.2f}", end=" ")
      4.00 3.22 2.48 1.83
    """
    transformations = [project_tangent(geometry)]
    if momentum is not None:
        transformations += [
            optax.trace(momentum, nesterov, accumulator_dtype),
            project_tangent(geometry),
        ]
    return chain(*transformations, optax.scale_by_learning_rate(learning_rate), retract(geometry))
