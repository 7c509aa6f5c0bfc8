"""Programs that take longer to compile than to run."""

from __future__ import annotations

import math
import weakref
from typing import Any

import jax

from manifoldmuon._internal.first_values import is_traced

_MANY = 2**24  # numbers times runs above which low effort loses more time than it saves


def compiler_options(arrays: Any, steps: int) -> dict[str, Any]:
    """Return the options of `jax.jit` for a program that runs a few times.

    On CPUs, low effort cuts XLA's compile time to a quarter; the program takes a third longer.
    `arrays` is a tree of the program's arrays, and `steps` the number of its runs.
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

    Programs live as long as the function, and so does what it closes over. The function takes a
    hashable value, then arrays. The size of `like`, a tree of arrays, decides the effort.
    """
    if is_traced(like):
        return _program(function, (), True)
    options = tuple(compiler_options(like, steps=1).items())

    def run(*arguments: Any) -> Any:
        try:
            return _program(function, options, False)(*arguments)
        except ValueError as error:  # the function closes over a traced value
            if "compiler_options" not in str(error):
                raise
            return _program(function, (), False)(*arguments)

    return run


_PROGRAMS: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def _program(function: Any, options: tuple[Any, ...], inline: bool) -> Any:
    programs = _PROGRAMS.setdefault(function, {})
    if (options, inline) not in programs:
        own = weakref.ref(function)  # a program that holds its key would never be freed

        def call(*arguments: Any) -> Any:
            return own()(*arguments)  # pyright: ignore[reportOptionalCall]

        call.__name__ = getattr(function, "__name__", "rule")
        settings: Any = {"compiler_options": dict(options) or None, "inline": inline}
        programs[options, inline] = jax.jit(call, static_argnums=0, **settings)
    return programs[options, inline]
