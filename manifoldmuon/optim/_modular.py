"""Whole optimizers for an architecture: its geometry and budgets in chains of the links."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import optax
from jax.typing import ArrayLike, DTypeLike

from manifoldmuon._internal.arguments import shown
from manifoldmuon.norms import PowerIterations
from manifoldmuon.optim._aliases import decay_links, manifold_muon
from manifoldmuon.optim._arguments import checked
from manifoldmuon.optim._budget import Budgets
from manifoldmuon.optim._geometry import Geometry
from manifoldmuon.optim._normalize import normalize
from manifoldmuon.optim._retract import chain, retract


@runtime_checkable
class Architecture(Protocol):
    """A network as an optimizer sees it: two trees of plain data.

    Every `manifoldmuon.modules.Module` is one. Neither needs the structure of the parameters: it
    is enough that they are prefix trees, compared by path.
    """

    def geometry(self) -> Geometry:
        """Return which manifold each parameter lives on; see `resolve`."""
        ...

    def budgets(self) -> Budgets:
        """Return the target norm of each parameter; see `scale_by_budget`."""
        ...


def _check_architecture(name: str, value: object) -> None:
    if isinstance(value, type) or not isinstance(value, Architecture):
        raise TypeError(f"{name} must have geometry() and budgets(); got {shown(value)}")


@checked(architecture=_check_architecture)
def modular(
    learning_rate: optax.ScalarOrSchedule,
    architecture: Architecture,
    momentum: ArrayLike | None = 0.95,
    *,
    nesterov: bool = True,
    accumulator_dtype: DTypeLike | None = "float32",
    clip: ArrayLike | optax.GradientTransformation | None = None,
    weight_decay: optax.ScalarOrSchedule | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Steepest descent in the modular norm of an architecture (arXiv:2405.14813).

    With the budgets $b_k$ of the architecture and the norm $\|\cdot\|_k$ of each leaf:

    $$
    W_k \leftarrow R_{W_k}(-\eta\, b_k A_k), \qquad A_k = \operatorname*{arg\,max}_A\
    \langle \mu M_k + G_k, A\rangle \ \text{ over tangent } A \text{ with } \|A\|_k \le 1.
    $$

    The chain is that of `manifold_muon`: momentum, each leaf's steepest direction, the
    architecture's budgets, weight decay (unconstrained leaves), learning rate, retraction. An
    update of learning rate 1 has modular norm 1, and moves the output of the network by at most 1
    to first order. Where a hand-written tree says the same as an architecture, pass it to
    `manifold_muon(learning_rate, geometry, budgets=budgets)`.

    Args:
      learning_rate: this argument and all that are not listed are those of `manifold_muon`.
      architecture: anything with `geometry()` and `budgets()`.

    Returns:
      The chain. `update` needs `params`.

    Examples:
      >>> net = mm.modules.Linear(10, 256) @ mm.modules.ReLU() @ mm.modules.Linear(256, 784)
      >>> tx = modular(0.1, net)
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


@checked(architecture=_check_architecture)
def normed(
    learning_rate: optax.ScalarOrSchedule,
    base: optax.GradientTransformation,
    architecture: Architecture,
    *,
    weight_decay: optax.ScalarOrSchedule | None = None,
    iterations: PowerIterations = PowerIterations(),
) -> optax.GradientTransformationExtraArgs:
    r"""Any optimizer in the modular norm of an architecture: normed Adam, normed SGD.

    With the updates $U_k$ of the base (their tangent part, if the leaf is constrained):

    $$
    W_k \leftarrow R_{W_k}\!\left(-\eta\, b_k\, \frac{U_k}{\|U_k\|_k}\right).
    $$

    The chain is: `normalize` around the base, weight decay (unconstrained leaves), learning rate,
    retraction. For hand-written trees put the same chain together from its links.

    Args:
      learning_rate: a number or an Optax schedule.
      base: what makes the updates; it must ascend (`optax.scale_by_adam()`); see `normalize`.
      architecture: anything with `geometry()` and `budgets()`.
      weight_decay: see `manifold_muon`.
      iterations: see `normalize`.

    Returns:
      The chain. `update` needs `params`.

    Examples:
      >>> tx = normed(0.1, optax.scale_by_adam(), mm.modules.Linear(10, 784))
    """
    geometry = architecture.geometry()
    return chain(
        normalize(base, geometry, architecture.budgets(), iterations=iterations),
        *decay_links(weight_decay, geometry),
        optax.scale_by_learning_rate(learning_rate),
        retract(geometry),
    )
