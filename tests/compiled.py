"""Run functions as one compiled program (outside jit, JAX compiles op by op); count programs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from manifoldmuon.manifolds import Manifold

COMPILATIONS: list[str] = []
"""An entry for each program that this process has compiled."""
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: COMPILATIONS.append(event) if "backend_compile" in event else None
)


def ask(function: Callable[..., Any], *arguments: Any) -> Any:
    """Compile and call `function`; return NumPy arrays."""
    return jax.device_get(jax.jit(function)(*arguments))


def point_of(manifold: Manifold, shape, seed: int = 0, dtype=jnp.float32) -> np.ndarray:
    """Draw a random point."""
    return ask(lambda key: manifold.random_point(key, shape, dtype), jax.random.key(seed))
