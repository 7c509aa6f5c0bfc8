"""The default method: L-BFGS, and the trust region where L-BFGS is slow."""

from __future__ import annotations

import dataclasses

import jax
from jaxtyping import Array

from manifoldmuon._internal.arguments import check_fields
from manifoldmuon.minimize._lbfgs import LBFGS
from manifoldmuon.minimize._problem import Method, Problem, Progress, Stop
from manifoldmuon.minimize._trust_region import TrustRegion


@dataclasses.dataclass(frozen=True)
class Auto(Method):
    """The default: L-BFGS, and the trust region where L-BFGS is slow.

    `LBFGS()` takes at most `steps` steps. If it has not reached the tolerance by then, or its line
    search fails, `TrustRegion()` continues from its last point: on ill-conditioned costs it needs a
    few dozen steps where L-BFGS needs thousands. Costs with first derivatives only, such as those
    whose `custom_vjp` calls other programs, continue with `LBFGS()`.

    Each method is compiled when it is first needed; inside of `jax.jit` and `jax.vmap` both are.

    Attributes:
      steps: most steps of L-BFGS.
    """

    steps: int = 250

    def __post_init__(self):
        check_fields(self, steps="[1, inf)")

    def stages(self, stop: Stop) -> list[tuple[Method, Stop]]:
        first = stop._replace(max_steps=min(self.steps, stop.max_steps))
        return [(LBFGS(), first), (self, stop)]

    def run(
        self, problem: Problem, start: Array, stop: Stop, progress: Progress
    ) -> tuple[Array, Progress]:
        method = TrustRegion() if _twice_differentiable(problem, start) else LBFGS()
        return method.run(problem, start, stop, progress)


def _twice_differentiable(problem: Problem, point: Array) -> bool:
    def product(point: Array, vector: Array) -> Array:
        return jax.jvp(lambda x: problem.gradient(x)[0], (point,), (vector,))[1]

    try:
        jax.eval_shape(product, point, point)
    except (NotImplementedError, TypeError, ValueError):  # how JAX says it, depending on the cause
        return False
    return True
