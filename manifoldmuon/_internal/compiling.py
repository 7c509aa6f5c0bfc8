"""Options of XLA for programs that take longer to compile than to run."""

from __future__ import annotations

import math
from typing import Any

import jax

_MANY = 2**24  # numbers times steps above which low effort loses more time than it saves


def compiler_options(arrays: Any, steps: int) -> dict[str, Any]:
    """Return the options of `jax.jit` for a program that runs a few times.

    At low effort, on CPUs, XLA takes a quarter of the time to compile, and the program a third
    longer to run.

    Args:
      arrays: a tree of what the program works on; only shapes matter.
      steps: how many times it runs.
    """
    numbers = sum(math.prod(x.shape) for x in jax.tree.leaves(arrays))
    if jax.default_backend() != "cpu" or numbers * steps > _MANY:
        return {}
    options: dict[str, Any] = {"xla_backend_optimization_level": 0}
    if jax.__version_info__ < (0, 11):  # newer versions know no other emitters
        options["xla_cpu_use_fusion_emitters"] = False
    return options
