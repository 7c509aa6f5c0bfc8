"""What a function answers, compiled as a whole: operation by operation, JAX compiles them all."""

from collections.abc import Callable
from typing import Any

import jax


def ask(function: Callable[..., Any], *arguments: Any) -> Any:
    """The answer in NumPy's arrays."""
    return jax.device_get(jax.jit(function)(*arguments))
