"""The ways of training that the study of weight erasure compares."""

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
"""The place of the middle matrix among the three."""

BUDGET = 1 / 3
"""The mass of each layer: three of one mass, behind activations of sensitivity 1 (as published)."""

SIX_STEPS = NewtonSchulz(MODULA_SIX_STEP, frobenius=True)
"""The published iteration: small singular values do not arrive at 1."""


class Update(abc.ABC):
    """A way from gradients to updates; an implementation is a frozen dataclass."""

    @abc.abstractmethod
    def transformation(self, rate: Any) -> optax.GradientTransformation:
        """The optimizer for a learning rate, which may be traced."""


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
    """Gradients of RMS-to-RMS norm 1: their size is that of a dualized update, not their shape."""

    def transformation(self, rate: Any) -> optax.GradientTransformation:
        links = normalize(optax.identity(), Euclidean(RMSToRMS()), BUDGET)
        return chain(links, optax.scale_by_learning_rate(rate))


@dataclasses.dataclass(frozen=True)
class Steepest(Update):
    """Steepest descent on a geometry.

    Attributes:
      geometry: a manifold for every layer.
      budgets: of every layer.
    """

    geometry: tuple[Manifold, ...]
    budgets: tuple[float, ...] = (BUDGET,) * 3

    def transformation(self, rate: Any) -> optax.GradientTransformation:
        return manifold_muon(rate, list(self.geometry), momentum=None, budgets=list(self.budgets))


class Method(NamedTuple):
    """A way of training.

    Attributes:
      update: what happens in a step.
      start: where the masked middle matrix is put before the first step; None: it stays.
      constraint: where the middle matrix lies during training; None: anywhere.
    """

    update: Update
    start: Manifold | None = None
    constraint: Manifold | None = None


FLAT = "flat"
"""The variant of a constrained method that differs from it in nothing but the constraint."""

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
    """The method without the constraint that a constrained method is compared with."""
    space, variant = split(name)
    if space not in RETRACTIONS or variant == FLAT:
        return None
    return f"{'stiefel' if space == 'orthogonal' else space}:{FLAT}"


def split(name: str) -> tuple[str, str]:
    """Method and variant, the first one if none is named.

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
    """The method of a name such as `adam`, `dualized:six-steps` or `stiefel:QR`.

    Args:
      name: see `VARIANTS`.
      shapes: of the three matrices, `(fan_out, fan_in)`.

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
    if kind == "orthogonal":  # the only square matrix; the others stay free
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
    """The set of the size that holds matrices with all singular values `sqrt(fan_out / fan_in)`."""
    given = {} if retraction is None else {"retraction": retraction}
    if kind == "stiefel":
        return Stiefel(FanRatio(), **given)
    if kind == "orthogonal":
        return Orthogonal(FanRatio(), **given)
    if kind == "hypersphere":
        return Hypersphere(_length(shape), ndim=2, **given)
    return EmbeddingRows(_length(shape) / math.sqrt(shape[0]), **given)


def _norm(kind: str, shape: Shape) -> tuple[Norm, float]:
    """The norm of the manifold's directions, and the size that one of norm 1 there has in it."""
    if kind == "hypersphere":
        return Frobenius(), _length(shape)
    if kind == "rows":
        return L1ToRMS(), _length(shape) / math.sqrt(shape[0] * shape[1])
    return RMSToRMS(), 1.0


def _length(shape: Shape) -> float:
    """The Frobenius norm of a matrix on `Stiefel(FanRatio())`."""
    return math.sqrt(min(shape)) * FanRatio().of(shape)
