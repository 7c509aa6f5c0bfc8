"""The training methods in the study of weight erasure."""

import abc
import dataclasses
import math
from typing import Any, NamedTuple

import optax

from manifoldmuon.linalg import MODULA_SIX_STEP, MsignMethod, NewtonSchulz
from manifoldmuon.manifolds import (
    EmbeddingRows,
    Euclidean,
    Hypersphere,
    Manifold,
    Orthogonal,
    Stiefel,
)
from manifoldmuon.norms import FanRatio, Frobenius, L1ToRMS, Norm, RMSToRMS
from manifoldmuon.optim import chain, manifold_muon, normalize
from studies.retractions.spaces import MATRIX, SPHERE

Shape = tuple[int, int]

MIDDLE = 1
"""The index of the middle matrix among the three."""

BUDGET = 1 / 3
"""Each layer's budget: three layers of equal mass, activations of sensitivity 1 (as published)."""

SIX_STEPS = NewtonSchulz(MODULA_SIX_STEP, frobenius=True)
"""The published iteration: it does not bring small singular values all the way to 1."""


class Update(abc.ABC):
    """A map from gradients to updates; implementations are frozen dataclasses."""

    @abc.abstractmethod
    def transformation(self, rate: Any) -> optax.GradientTransformation:
        """Return the optimizer for a learning rate, which may be traced."""


@dataclasses.dataclass(frozen=True)
class Gradient(Update):
    """Plain gradient descent."""

    def transformation(self, rate: Any) -> optax.GradientTransformation:
        return optax.scale_by_learning_rate(rate)


@dataclasses.dataclass(frozen=True)
class Adam(Update):
    """Adam, with Optax's decay rates."""

    def transformation(self, rate: Any) -> optax.GradientTransformation:
        return optax.chain(optax.scale_by_adam(), optax.scale_by_learning_rate(rate))


@dataclasses.dataclass(frozen=True)
class Normalized(Update):
    """Gradients scaled to RMS-to-RMS norm 1: the size of dualized updates, with unchanged rank."""

    def transformation(self, rate: Any) -> optax.GradientTransformation:
        links = normalize(optax.identity(), Euclidean(RMSToRMS()), BUDGET)
        return chain(links, optax.scale_by_learning_rate(rate))


@dataclasses.dataclass(frozen=True)
class Steepest(Update):
    """Steepest descent on a geometry.

    Attributes:
      geometry: a manifold for every layer.
      budgets: a budget for every layer.
    """

    geometry: tuple[Manifold, ...]
    budgets: tuple[float, ...] = (BUDGET,) * 3

    def transformation(self, rate: Any) -> optax.GradientTransformation:
        return manifold_muon(rate, list(self.geometry), momentum=None, budgets=list(self.budgets))


class Method(NamedTuple):
    """A training method.

    Attributes:
      update: the optimizer.
      start: the manifold onto which the masked middle matrix is projected before the first
        step; None does not project.
      constraint: the manifold of the middle matrix during training; None for no constraint.
    """

    update: Update
    start: Manifold | None = None
    constraint: Manifold | None = None


FLAT = "flat"
"""The variant of a constrained method without the constraint: its twin."""

DUALIZED: dict[str, MsignMethod | None] = {"exact": None, "six-steps": SIX_STEPS}
RETRACTIONS = {
    "stiefel": MATRIX,
    "orthogonal": MATRIX,
    "hypersphere": SPHERE,
    "rows": SPHERE,
}
VARIANTS: dict[str, tuple[str, ...]] = {
    "gradient": (),
    "normalized": (),
    "adam": (),
    "dualized": tuple(DUALIZED),
    **{space: (*names, FLAT) for space, names in RETRACTIONS.items()},
}


def twin_of(name: str) -> str | None:
    """Return the unconstrained twin of a constrained method; None for other methods."""
    space, variant = split(name)
    if space not in RETRACTIONS or variant == FLAT:
        return None
    return f"{'stiefel' if space == 'orthogonal' else space}:{FLAT}"


def split(name: str) -> tuple[str, str]:
    """Split a name into method and variant, by default the first variant.

    Raises:
      ValueError: there is no such method, or it has no such variant.
    """
    method, colon, variant = name.partition(":")
    if method not in VARIANTS:
        raise ValueError(f"methods are {', '.join(VARIANTS)}; got {name!r}")
    variants = VARIANTS[method]
    if colon and variant not in variants:
        choice = f"takes one of {', '.join(variants)}" if variants else "has no variants"
        raise ValueError(f"the method {method} {choice}; got {name!r}")
    return method, variant or (variants[0] if variants else "")


def method_of(name: str, shapes: tuple[Shape, ...]) -> Method:
    """Return the method for a name such as `adam`, `dualized:six-steps` or `stiefel:QR`.

    Args:
      name: see `VARIANTS`.
      shapes: the shapes `(fan_out, fan_in)` of the three matrices.

    Raises:
      ValueError: see `split`; or the middle matrix does not fit on the manifold.
    """
    kind, variant = split(name)
    if kind in _FREE:
        return Method(_FREE[kind])
    if kind == "dualized":
        return Method(Steepest((Euclidean(RMSToRMS(DUALIZED[variant])),) * 3))
    flat = variant == FLAT
    retraction = None if flat else RETRACTIONS[kind][variant]
    manifolds = [_manifold(kind, retraction, shape) for shape in shapes]
    if kind == "orthogonal":  # only the middle matrix is square; the others stay unconstrained
        manifolds = [m if i == MIDDLE else Euclidean(RMSToRMS()) for i, m in enumerate(manifolds)]
    middle = manifolds[MIDDLE]
    try:
        middle.check_shape(shapes[MIDDLE])
    except ValueError as error:
        raise ValueError(f"the method {kind} does not fit the middle matrix: {error}") from None
    if not flat:
        return Method(Steepest(tuple(manifolds)), middle, middle)
    norms, units = zip(*(_norm(kind, shape) for shape in shapes), strict=True)
    budgets = tuple(BUDGET * unit for unit in units)
    return Method(Steepest(tuple(map(Euclidean, norms)), budgets), middle)


_FREE: dict[str, Update] = {"gradient": Gradient(), "normalized": Normalized(), "adam": Adam()}


def _manifold(kind: str, retraction: Any, shape: Shape) -> Manifold:
    """Return the manifold, scaled to contain matrices with all singular values
    `sqrt(fan_out / fan_in)`."""
    given = {} if retraction is None else {"retraction": retraction}
    if kind == "stiefel":
        return Stiefel(FanRatio(), **given)
    if kind == "orthogonal":
        return Orthogonal(FanRatio(), **given)
    if kind == "hypersphere":
        return Hypersphere(_length(shape), ndim=2, **given)
    return EmbeddingRows(_length(shape) / math.sqrt(shape[0]), **given)


def _norm(kind: str, shape: Shape) -> tuple[Norm, float]:
    """Return an unscaled norm with the manifold's steepest directions, and the value in it of a
    unit step on the manifold."""
    if kind == "hypersphere":
        return Frobenius(), _length(shape)
    if kind == "rows":
        return L1ToRMS(), _length(shape) / math.sqrt(shape[0] * shape[1])
    return RMSToRMS(), 1.0


def _length(shape: Shape) -> float:
    """Return the Frobenius norm of a matrix on `Stiefel(FanRatio())`."""
    return math.sqrt(min(shape)) * FanRatio().of(shape)
