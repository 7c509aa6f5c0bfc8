"""Optimizers that follow from an architecture."""

from typing import Any, Protocol, runtime_checkable

import optax
from jax.typing import ArrayLike, DTypeLike

from manifoldmuon.optim._aliases import manifold_muon


@runtime_checkable
class Architecture(Protocol):
    """What an optimizer needs to know of a network: two trees of plain data.

    Every `manifoldmuon.modules.Module` is one. Neither needs the structure of the parameters: it
    is enough that they are prefix trees, compared by path.
    """

    def geometry(self) -> Any:
        """Which manifold each parameter lives on; see `resolve`."""
        ...

    def budgets(self) -> Any:
        """The target norm of each parameter; see `scale_by_budget`."""
        ...


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
    """Steepest descent in the modular norm of an architecture (arXiv:2405.14813).

    The chain is that of `manifold_muon`: momentum, each leaf's steepest direction, the
    architecture's budgets, weight decay (flat leaves), learning rate, retraction. An update of
    learning rate 1 has modular norm 1, and moves the output of the network by at most 1 to first
    order. Where a hand-written tree says the same as an architecture, pass it to
    `manifold_muon(learning_rate, geometry, budgets=budgets)`.

    Args:
      learning_rate: a number or an Optax schedule.
      architecture: anything with `geometry()` and `budgets()`.
      momentum: see `manifold_muon`.
      nesterov: see `manifold_muon`.
      accumulator_dtype: see `manifold_muon`.
      clip: see `manifold_muon`.
      weight_decay: see `manifold_muon`.

    Returns:
      The chain. `update` needs `params`.

    Raises:
      TypeError: on use; see `resolve` and `scale_by_budget`.
      ValueError: on use; see `resolve` and `scale_by_budget`.
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
