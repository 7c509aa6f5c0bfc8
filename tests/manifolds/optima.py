"""The optimum of a steepest direction by an independent convex solver.

For small float64 matrices, one problem at a time.
"""

from collections.abc import Callable, Sequence
from typing import Any

import cvxpy as cp
import numpy as np

from manifoldmuon._internal.scales import scale_of
from manifoldmuon.norms import Frobenius, MaxAbs, MaxRowNorm, Norm, RMSToRMS, Spectral


def optimum(grad: np.ndarray, norm: Norm, tangent: Callable[[Any], Sequence[Any]]) -> float:
    """Maximise `<grad, a>` over directions of norm at most 1 that meet the constraints.

    Args:
      grad: a matrix.
      norm: a norm of a type in `_SIZES`.
      tangent: returns the constraints on a direction, e.g. `lambda a: [point.T @ a == 0]`.
    """
    grad = np.asarray(grad, np.float64)
    axes = 1 if isinstance(norm, MaxRowNorm) else 2  # `MaxRowNorm` scales with the row length
    size = scale_of(getattr(norm, "scale", 1.0), grad.shape[-axes:])
    direction = cp.Variable(grad.shape)
    inside = _SIZES[type(norm)](direction) <= size
    problem = cp.Problem(
        cp.Maximize(cp.sum(cp.multiply(grad, direction))), [inside, *tangent(direction)]
    )
    problem.solve(solver=cp.CLARABEL)
    assert problem.status == cp.OPTIMAL, problem.status
    value: Any = problem.value
    return float(value)


_SIZES = {
    Spectral: cp.sigma_max,
    RMSToRMS: cp.sigma_max,
    Frobenius: lambda a: cp.norm(a, "fro"),
    MaxAbs: lambda a: cp.max(cp.abs(a)),
    MaxRowNorm: lambda a: cp.max(cp.norm(a, 2, axis=1)),
}
