"""The spectral norm at any scale: the norms under which Muon is steepest descent."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon import linalg
from manifoldmuon._internal.arguments import check_fields
from manifoldmuon._internal.matrices import arrays
from manifoldmuon._internal.matrices.arrays import Matrices, Numbers, Vectors
from manifoldmuon._internal.matrices.powers_of_two import scale_to_unit_exponent, times_power_of_two
from manifoldmuon._internal.matrices.spectral import nuclear_parts, spectral_bound
from manifoldmuon._internal.scales import ScaleRule, check_scale, scale_of
from manifoldmuon.linalg import MsignMethod
from manifoldmuon.norms._norm import Norm, PowerIterations
from manifoldmuon.norms._scales import FanRatio

Kernels = Float[Array, "*kernels m n"]


@dataclasses.dataclass(frozen=True)
class Spectral(Norm):
    """The largest singular value of a matrix: `||W||_2 / scale`.

    The dual norm is the nuclear norm (the sum of the singular values) times the scale, and the
    duality map is `scale * msign(G)`. Steepest descent under it is Muon (Jordan 2024) without
    momentum.

    `norm` and `dual_norm` compute singular values (no vectors): they are for measuring. `dualize`
    and `gap`, which a training step calls, cost as much as the method of `msign`.

    Attributes:
      method: method of `msign` for the duality map; None: the package's default. A method that has
        not converged (Muon's five steps) returns directions with singular values around 1, and
        keeps the laws of `Norm` only to this accuracy.
      scale: the largest singular value of a weight of norm 1, a positive number or a rule.
    """

    method: MsignMethod | None = None
    scale: float | ScaleRule = 1.0
    ndim: ClassVar[int] = 2

    def __post_init__(self):
        if self.method is not None:
            MsignMethod.check("Spectral.method", self.method)
        check_scale("Spectral.scale", self.scale)

    def norm(self, weight: Matrices) -> Numbers:
        return (linalg.spectral_norm(weight) / self._scale(weight)).astype(weight.dtype)

    def dual_norm(self, grad: Matrices) -> Numbers:
        return (linalg.nuclear_norm(grad) * self._scale(grad)).astype(grad.dtype)

    def dualize(self, grad: Matrices) -> Matrices:
        sign = linalg.msign(arrays.upcast(grad), self.method)
        return (self._scale(grad) * sign).astype(grad.dtype)

    def gap(self, grad: Matrices, direction: Matrices) -> Numbers:
        scaled, _ = scale_to_unit_exponent(grad, 2)
        return _gap(*nuclear_parts(scaled, arrays.upcast(direction) / self._scale(grad)))

    def project(self, weight: Matrices) -> Matrices:
        return linalg.clip_singular_values(weight, self._scale(weight), self.method)

    def bound(self, weight: Matrices) -> Numbers:
        scaled, exponent = scale_to_unit_exponent(weight, 2)
        return times_power_of_two(spectral_bound(scaled) / self._scale(weight), exponent)

    def init_vectors(self, shape: tuple[int, ...]) -> Vectors:
        *batch, _, n = shape
        return jnp.zeros((*batch, n), jnp.float32)

    def estimate(
        self, weight: Matrices, vectors: Any, iterations: PowerIterations
    ) -> tuple[Numbers, Any]:
        size, vectors = linalg.power_iteration(
            weight, vectors, iterations.warm, iterations.cold_start_steps
        )
        return (size / self._scale(weight)).astype(weight.dtype), vectors

    def _scale(self, x: Matrices) -> float:
        arrays.trailing(x, 2)
        return scale_of(self.scale, x.shape[-2:])


@dataclasses.dataclass(frozen=True)
class RMSToRMS(Spectral):
    """The operator norm between root-mean-square norms: `sqrt(d_in / d_out) * ||W||_2`.

    A weight `(d_out, d_in)` of norm 1 maps inputs with entries of size about 1 to outputs with
    entries of size at most about 1, at every width: learning rates in this norm transfer across
    widths (modular duality, arXiv:2410.21265). It is `Spectral` with the scale `FanRatio()`.

    Attributes:
      method: method of `msign` for the duality map, as in `Spectral`.
    """

    scale: float | ScaleRule = dataclasses.field(default=FanRatio(), init=False)


@dataclasses.dataclass(frozen=True)
class ConvRMSToRMS(Norm):
    """The largest RMS-to-RMS norm among the taps of a kernel, times the number of taps.

    A kernel is `(k_h, k_w, d_out, d_in)`: a matrix per tap (`manifoldmuon.manifolds.Layout`
    converts HWIO and OIHW kernels). The norm is `k_h k_w max_ij sqrt(d_in / d_out) ||W_ij||_2`, an
    upper bound on the factor by which the convolution increases the RMS norm of an image. The dual
    norm sums over the taps. The duality map is `sqrt(d_out / d_in) / (k_h k_w) * U_ij V_ij^T` in
    each tap (modular duality, arXiv:2410.21265, which writes `k**2` for square kernels).

    A direction has equal singular values in every tap: a tap with a far smaller gradient than
    others moves as far as they do, and only a tap with zero gradient stays.

    Attributes:
      method: method of `msign` for the duality map, as in `Spectral`.
      tap_axes: the number of axes of taps: 1 for sequences, 2 for images, 3 for volumes.
    """

    method: MsignMethod | None = None
    tap_axes: int = 2

    def __post_init__(self):
        check_fields(self, tap_axes="[1, inf)")
        if self.method is not None:
            MsignMethod.check("ConvRMSToRMS.method", self.method)

    @property
    def ndim(self) -> int:
        return self.tap_axes + 2

    @property
    def _taps(self) -> tuple[int, ...]:
        return tuple(range(-self.tap_axes, 0))

    def norm(self, weight: Kernels) -> Numbers:
        size = arrays.largest(self._tap(weight).norm(arrays.upcast(weight)), self._taps)
        return size.astype(weight.dtype)

    def dual_norm(self, grad: Kernels) -> Numbers:
        tap = self._tap(grad)
        scaled, exponent = scale_to_unit_exponent(grad, self.ndim)
        total = jnp.sum(tap.dual_norm(scaled), axis=self._taps)
        return times_power_of_two(total, exponent).astype(grad.dtype)

    def dualize(self, grad: Kernels) -> Kernels:
        return self._tap(grad).dualize(grad)

    def gap(self, grad: Kernels, direction: Kernels) -> Numbers:
        unit = arrays.upcast(direction) / scale_of(self._tap(grad).scale, grad.shape[-2:])
        gained, missed = nuclear_parts(scale_to_unit_exponent(grad, self.ndim)[0], unit)
        return _gap(jnp.sum(gained, axis=self._taps), jnp.sum(missed, axis=self._taps))

    def project(self, weight: Kernels) -> Kernels:
        return self._tap(weight).project(weight)

    def bound(self, weight: Kernels) -> Numbers:
        return arrays.largest(self._tap(weight).bound(weight), self._taps)

    def init_vectors(self, shape: tuple[int, ...]) -> Float[Array, "*kernels n"]:
        return Spectral().init_vectors(shape)

    def estimate(
        self, weight: Kernels, vectors: Any, iterations: PowerIterations
    ) -> tuple[Numbers, Any]:
        sizes, vectors = self._tap(weight).estimate(arrays.upcast(weight), vectors, iterations)
        return arrays.largest(sizes, self._taps).astype(weight.dtype), vectors

    def _tap(self, kernel: Kernels) -> Spectral:
        """Return the norm of a tap; a kernel of norm 1 has at most 1 in each tap."""
        arrays.trailing(kernel, self.ndim)
        taps = max(math.prod(kernel.shape[-self.ndim : -2]), 1)
        return Spectral(self.method, FanRatio(1 / taps))


def _gap(gained: Numbers, missed: Numbers) -> Numbers:
    """Return `missed / (gained + missed)`, or 0 where both are 0."""
    bound = gained + missed
    return missed / arrays.nonzero_or_one(bound)
