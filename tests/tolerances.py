"""Bounds of rounding errors, for tolerances that hold on every processor.

Processors differ in the order of sums and in fused multiply-adds, so results differ by rounding,
at most by an error bound. N. J. Higham and T. Mary, "A New Approach to Probabilistic
Rounding Error Analysis" (SIAM J. Sci. Comput., 2019), theorem 2.4: a sum of n products is off by
`sqrt(n) u` times the sum of their absolute values, up to a factor that grows like a logarithm;
u = eps / 2, so `sqrt(n) eps` sets the factor to 2. Errors of steps add; later steps multiply them
by their condition numbers.
"""

import math
from typing import Any

import numpy as np
from jax import numpy as jnp


def rounding(steps: float, size: int = 1, condition: float = 1.0, dtype: Any = np.float32) -> float:
    """Bound the error of a computation relative to its largest intermediate value.

    Args:
      steps: number of successive roundings, sums or matrix products.
      size: number of terms of the longest sum.
      condition: amplification of errors by later steps.
      dtype: dtype of the rounding.
    """
    return steps * math.sqrt(size) * float(jnp.finfo(dtype).eps) * condition
