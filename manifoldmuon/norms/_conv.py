"""The norm of convolution kernels, tap by tap."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon.linalg import (
    MsignMethod,
    power_iteration,
    prescale,
    spectral_norm,
    times_power_of_two,
    upcast,
)
from manifoldmuon.norms._axes import trailing
from manifoldmuon.norms._matrix import (
    cold_vector,
    fan_ratio,
    nuclear_norm,
    nuclear_parts,
    polar_factor,
    relative_gap,
)
from manifoldmuon.norms._norm import Effort, Norm


@dataclasses.dataclass(frozen=True)
class ConvRMSToRMS(Norm):
    """The largest RMS-to-RMS norm among the taps of a kernel, times the number of taps.

    A kernel is `(k_h, k_w, d_out, d_in)`: one matrix per tap (`manifoldmuon.manifolds.Axes`
    brings HWIO and OIHW kernels into this layout). The norm is
    `k_h k_w max_ij sqrt(d_in / d_out) ||W_ij||_2`, an upper bound on how much the convolution
    stretches the RMS norm of an image; the dual norm sums over the taps; the duality map is
    `sqrt(d_out / d_in) / (k_h k_w) * U_ij V_ij^T` in each tap (modular duality,
    arXiv:2410.21265, which writes `k**2` for square kernels).

    Every tap has singular values all equal, so a tap of zero gradient alone gets zero, and a tap
    whose gradient is far below the others' moves as far as they do.

    Attributes:
      msign: how the duality map is computed, as in `Spectral`.
    """

    msign: MsignMethod | None = None

    @property
    def ndim(self) -> int:
        return 4

    def norm(self, weight: Float[Array, "*batch h w m n"]) -> Float[Array, "*batch"]:
        trailing(weight, 4)
        largest = jnp.max(spectral_norm(weight), axis=(-2, -1), initial=0)
        return (largest * _taps(weight) / fan_ratio(weight)).astype(weight.dtype)

    def init_carried(self, shape: tuple[int, ...]) -> Float[Array, "*batch h w n"]:
        return cold_vector(shape)

    def carried_norm(
        self, weight: Float[Array, "*batch h w m n"], carried: Any, effort: Effort
    ) -> tuple[Float[Array, "*batch"], Any]:
        sizes, carried = power_iteration(weight, carried, effort.steps, effort.cold_steps)
        largest = jnp.max(sizes, axis=(-2, -1), initial=0)
        return (largest * _taps(weight) / fan_ratio(weight)).astype(weight.dtype), carried

    def dual_norm(self, grad: Float[Array, "*batch h w m n"]) -> Float[Array, "*batch"]:
        scaled, exponent = prescale(grad, 4)
        total = jnp.sum(nuclear_norm(scaled), axis=(-2, -1)) * fan_ratio(grad) / _taps(grad)
        return times_power_of_two(total, exponent).astype(grad.dtype)

    def lmo(self, grad: Float[Array, "*batch h w m n"]) -> Float[Array, "*batch h w m n"]:
        trailing(grad, 4)
        unit = polar_factor(grad, self.msign)
        return (unit * (fan_ratio(grad) / _taps(grad))).astype(grad.dtype)

    def gap(
        self, grad: Float[Array, "*batch h w m n"], direction: Float[Array, "*batch h w m n"]
    ) -> Float[Array, "*batch"]:
        scaled, _ = prescale(grad, 4)
        sign = upcast(direction) * (_taps(grad) / fan_ratio(grad))
        gained, missed = nuclear_parts(scaled, sign)
        return relative_gap(jnp.sum(gained, axis=(-2, -1)), jnp.sum(missed, axis=(-2, -1)))


def _taps(kernel: Float[Array, "*batch h w m n"]) -> int:
    """The number of taps of a kernel; 1 for an empty one."""
    return max(kernel.shape[-4] * kernel.shape[-3], 1)
