"""Programs that take longer to compile than to run."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax

from manifoldmuon._internal.first_values import is_traced

_MANY = 2**24  # numbers times runs above which low effort loses more time than it saves


def compiler_options(arrays: Any, steps: int) -> dict[str, Any]:
    """Return the options of `jax.jit` for a program that runs a few times.

    On CPUs, low effort cuts XLA's compile time to a quarter; the program takes a third longer.

    Args:
      arrays: a tree of the program's arrays; only shapes matter.
      steps: number of runs of the program.
    """
    numbers = sum(math.prod(x.shape) for x in jax.tree.leaves(arrays))
    if jax.default_backend() != "cpu" or numbers * steps > _MANY:
        return {}
    options: dict[str, Any] = {"xla_backend_optimization_level": 0}
    if jax.__version_info__ < (0, 11):  # newer versions know no other emitters
        options["xla_cpu_use_fusion_emitters"] = False
    return options


def compiled(function: Any, like: Any) -> Any:
    """Return a function of a kind of leaf and arrays; outside jit, compiled once for each kind.

    Args:
      function: takes a hashable value, then arrays.
      like: arrays; their size decides the effort, and outside of jit whether they are traced.
    """
    if is_traced(like):
        return _jitted(function, inline=True)
    options = compiler_options(like, steps=1)
    return _jitted(function, compiler_options=tuple(options.items()))


@functools.lru_cache(1024)  # each new transformation brings rules of its own
def _jitted(function: Any, compiler_options: Any = (), inline: bool = False) -> Any:
    options = dict(compiler_options) or None
    return jax.jit(function, static_argnums=0, inline=inline, compiler_options=options)
