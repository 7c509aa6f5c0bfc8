"""The coordinate check: how far the features of each layer move in the first steps.

If the sizes of updates suit the architecture, features move equally far at every width: the
slope of log2(change) against log2(width) is zero.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon.modules import Compose, Module


def feature_changes(
    network: Module, before: Any, after: Any, x: Any
) -> dict[str, Float[Array, ""]]:
    """By layer, the root mean square of the change of its output between two trees of weights.

    The layers are the top-level parts of the network that have weights, counted from 1 at the
    input; a stack of blocks is one.
    """
    pairs = zip(_features(network, before, x), _features(network, after, x), strict=True)
    moved = [jnp.sqrt(jnp.mean((new - old) ** 2)) for old, new in pairs]
    return {str(number): change for number, change in enumerate(moved, 1)}


def _features(network: Module, weights: Any, x: Any) -> list[Array]:
    if not isinstance(network, Compose):
        return [network.apply(weights, x)]
    found = []
    for part, own in zip(network.parts, weights, strict=True):
        x = part.apply(own, x)
        if part.mass > 0:
            found.append(x)
    return found
