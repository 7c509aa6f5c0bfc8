"""Complete optimizers for an architecture, built from its geometry and budgets."""

from __future__ import annotations

from typing import Annotated, Protocol, runtime_checkable

import optax
from jax.typing import DTypeLike

from manifoldmuon._internal import arguments
from manifoldmuon.norms import PowerIterations
from manifoldmuon.optim._aliases import decay_transformations, manifold_muon
from manifoldmuon.optim._budget import Budgets
from manifoldmuon.optim._chain import chain
from manifoldmuon.optim._geometry import Geometry
from manifoldmuon.optim._links import retract
from manifoldmuon.optim._normalize import normalize


@runtime_checkable
class Architecture(Protocol):
    """The interface of a network to an optimizer: its geometry and budgets.

    Every `manifoldmuon.modules.Module` implements it. Both methods may return prefix trees,
    compared with the parameters by path.
    """

    def geometry(self) -> Geometry:
        """Return the manifold of each parameter; see `resolve_geometry`."""
        ...

    def budgets(self) -> Budgets:
        """Return the target norm of each parameter; see `scale_by_budget`."""
        ...


def _check_architecture(name: str, value: object) -> None:
    if isinstance(value, type) or not isinstance(value, Architecture):
        raise TypeError(f"{name} must have geometry() and budgets(); got {arguments.shown(value)}")


@arguments.checked
def modular(
    learning_rate: arguments.Rate,
    architecture: Annotated[Architecture, _check_architecture],
    momentum: arguments.Momentum = 0.95,
    *,
    nesterov: bool = True,
    accumulator_dtype: DTypeLike | None = "float32",
    clip: arguments.ClipNorm = None,
    weight_decay: arguments.WeightDecay = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Steepest descent in the modular norm of an architecture (arXiv:2405.14813).

    With the budgets $b_k$ of the architecture and the norm $\|\cdot\|_k$ of each leaf:

    $$
    W_k \leftarrow R_{W_k}(-\eta\, b_k A_k), \qquad A_k = \operatorname*{arg\,max}_A\
    \langle \mu M_k + G_k, A\rangle \ \text{ over tangent } A \text{ with } \|A\|_k \le 1.
    $$

    The chain is the same as in `manifold_muon`: clipping, momentum, each leaf's steepest direction,
    the architecture's budgets, weight decay (unconstrained leaves), learning rate, retraction. An
    update with learning rate 1 has modular norm 1, and moves the output of the network by at most
    1 to first order. With hand-written trees in place of an architecture call
    `manifold_muon(learning_rate, geometry, budgets=budgets)`.

    Args:
      learning_rate: see `manifold_muon`, also for the arguments not listed here.
      architecture: any object with `geometry()` and `budgets()`.

    Examples:
      >>> net = mm.modules.Linear(1, 8) @ mm.modules.ReLU() @ mm.modules.Linear(8, 3)
      >>> tx, params = modular(0.5, net), net.init(jax.random.key(0))
      >>> state = tx.init(params)
      >>> cost = lambda p: jnp.mean((net.apply(p, jnp.eye(3)) - 2) ** 2)
      >>> for _ in range(4):
      ...     loss, grad = jax.value_and_grad(cost)(params)
      ...     updates, state = tx.update(grad, state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     print(f"{loss:.2f}", end=" ")
      4.00 3.41 2.81 2.18
    """
    return manifold_muon(
        learning_rate,
        architecture.geometry(),
        momentum,
        nesterov=nesterov,
        accumulator_dtype=accumulator_dtype,
        clip=clip,
        weight_decay=weight_decay,
        budgets=architecture.budgets(),
    )


@arguments.checked
def normed(
    learning_rate: arguments.Rate,
    base: optax.GradientTransformation,
    architecture: Annotated[Architecture, _check_architecture],
    *,
    weight_decay: arguments.WeightDecay = None,
    iterations: Annotated[PowerIterations, arguments.one_of(PowerIterations)] = PowerIterations(),
) -> optax.GradientTransformationExtraArgs:
    r"""Any optimizer in the modular norm of an architecture: normed Adam, normed SGD.

    With the updates $U_k$ of the base (their tangent part, if the leaf is constrained):

    $$
    W_k \leftarrow R_{W_k}\!\left(-\eta\, b_k\, \frac{U_k}{\|U_k\|_k}\right).
    $$

    The chain is: `normalize` around the base, weight decay (unconstrained leaves), learning rate,
    retraction. With hand-written trees build the same chain from its transformations.

    Args:
      learning_rate: a number or an Optax schedule.
      base: the transformation that computes the updates; it must ascend (`optax.scale_by_adam()`);
        see `normalize`.
      architecture: any object with `geometry()` and `budgets()`.
      weight_decay: see `manifold_muon`.
      iterations: see `normalize`.

    Examples:
      >>> net = mm.modules.Linear(2, 2)
      >>> tx, w = normed(0.1, optax.scale_by_adam(), net), jnp.eye(2)
      >>> state = tx.init(w)
      >>> for _ in range(4):
      ...     loss, grad = jax.value_and_grad(lambda w: jnp.sum((w - 1) ** 2))(w)
      ...     updates, state = tx.update(grad, state, w)
      ...     w = optax.apply_updates(w, updates)
      ...     print(f"{loss:.2f}", end=" ")
      2.00 1.62 1.28 0.98
    """
    geometry = architecture.geometry()
    return chain(
        normalize(base, geometry, architecture.budgets(), iterations=iterations),
        *decay_transformations(weight_decay, geometry),
        optax.scale_by_learning_rate(learning_rate),
        retract(geometry),
    )
