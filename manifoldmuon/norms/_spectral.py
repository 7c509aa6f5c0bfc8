"""The spectral norm and its scaled versions: the norms under which Muon is steepest descent."""

import abc
import dataclasses
from typing import Any

from jaxtyping import Array, Float

from manifoldmuon.linalg import MsignMethod, power_iteration, spectral_norm, upcast
from manifoldmuon.norms._matrix import (
    cold_vector,
    fan_ratio,
    nuclear_gap,
    nuclear_norm,
    polar_factor,
)
from manifoldmuon.norms._norm import Effort, Norm


@dataclasses.dataclass(frozen=True)
class _UpToScale(Norm):
    """The spectral norm relative to a size that depends on the shape alone."""

    msign: MsignMethod | None = None

    @abc.abstractmethod
    def _unit(self, matrix: Float[Array, "*batch m n"]) -> float:
        """The largest singular value of the matrices of this shape that have norm 1."""

    @property
    def ndim(self) -> int:
        return 2

    def norm(self, weight: Float[Array, "*batch m n"]) -> Float[Array, "*batch"]:
        return (spectral_norm(weight) / self._unit(weight)).astype(weight.dtype)

    def init_carried(self, shape: tuple[int, ...]) -> Float[Array, "*batch n"]:
        return cold_vector(shape)

    def carried_norm(
        self, weight: Float[Array, "*batch m n"], carried: Any, effort: Effort
    ) -> tuple[Float[Array, "*batch"], Any]:
        size, carried = power_iteration(weight, carried, effort.steps, effort.cold_steps)
        return (size / self._unit(weight)).astype(weight.dtype), carried

    def dual_norm(self, grad: Float[Array, "*batch m n"]) -> Float[Array, "*batch"]:
        return (nuclear_norm(grad) * self._unit(grad)).astype(grad.dtype)

    def lmo(self, grad: Float[Array, "*batch m n"]) -> Float[Array, "*batch m n"]:
        return (polar_factor(grad, self.msign) * self._unit(grad)).astype(grad.dtype)

    def gap(
        self, grad: Float[Array, "*batch m n"], direction: Float[Array, "*batch m n"]
    ) -> Float[Array, "*batch"]:
        return nuclear_gap(grad, upcast(direction) / self._unit(grad))


@dataclasses.dataclass(frozen=True)
class Spectral(_UpToScale):
    """The largest singular value of a matrix: `||W||_2`.

    The dual norm is the nuclear norm (the sum of the singular values) and the duality map is
    `msign(G) = U V^T`. Steepest descent under it is Muon (Jordan 2024) without accumulation.

    `norm` and `dual_norm` compute singular values (no vectors): they are for measuring. `lmo`
    and `gap`, which a training step calls, are as cheap as the method of `msign`.

    Attributes:
      msign: how the duality map is computed; None is the package's default. A method that stops
        short of convergence (Muon's own five steps) returns a direction whose singular values
        lie around 1, with the laws of `Norm` kept as closely as that.
    """

    def _unit(self, matrix: Float[Array, "*batch m n"]) -> float:
        return 1.0


@dataclasses.dataclass(frozen=True)
class RMSToRMS(_UpToScale):
    """The operator norm between root-mean-square norms: `sqrt(d_in / d_out) * ||W||_2`.

    A weight `(d_out, d_in)` of norm 1 maps an input with entries of size about 1 to an output
    with entries of size at most about 1, at every width: the reason why learning rates measured
    in it transfer (modular duality, arXiv:2410.21265). The dual norm is
    `sqrt(d_out / d_in) * ||G||_*`, the duality map `sqrt(d_out / d_in) * U V^T`.

    Attributes:
      msign: how the duality map is computed, as in `Spectral`.
    """

    def _unit(self, matrix: Float[Array, "*batch m n"]) -> float:
        return fan_ratio(matrix)
