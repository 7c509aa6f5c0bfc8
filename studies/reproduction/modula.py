"""Common parts of the published examples of the Modula package, to the digit.

Their networks start from Gaussian matrices that a Newton-Schulz iteration makes orthogonal, drawn
with keys that are split along the composition; and the same iteration dualizes the gradients. It
is not run to convergence, and its ten steps lift a singular value of 1e-5 to 0.6 or so: what the
iteration does is part of the protocol.
"""

import math
from typing import Any

import jax
from jaxtyping import PRNGKeyArray

from manifoldmuon.linalg import MODULA_SIX_STEP, QUINTIC, MsignMethod, NewtonSchulz, msign
from manifoldmuon.manifolds import Euclidean
from manifoldmuon.modules import Linear, Module, ReLU
from manifoldmuon.norms import RMSToRMS

TEN_QUINTICS = NewtonSchulz(QUINTIC.with_steps(10), frobenius=True)
"""Ten steps of (3, -16/5, 6/5): the iteration behind the published numbers."""

SIX_STEPS = NewtonSchulz(MODULA_SIX_STEP, frobenius=True)
"""The six steps of the package as it is now."""


def mlp(inputs: int, width: int, outputs: int, method: MsignMethod | None) -> Module:
    """Three linear layers and two ReLUs, dualized by `method` (None: this package's own).

    The published ReLU declares the sensitivity 1, which gives every layer the budget 1/3.
    """
    manifold = Euclidean(RMSToRMS(method))
    relu = ReLU(sensitivity=1.0)
    first, middle, last = (
        Linear(m, n, manifold) for m, n in ((width, inputs), (width, width), (outputs, width))
    )
    return last @ relu @ middle @ relu @ first


def init(network: Module, key: PRNGKeyArray, method: MsignMethod) -> tuple[Any, ...]:
    """The published initial weights of a composition of linear layers and bonds.

    A composition gives the first of two new keys to its first part, and the second to the rest.
    """
    params = []
    for part in network.parts[:-1]:
        own, key = jax.random.split(key)
        params.append(_start(part, own, method))
    return (*params, _start(network.parts[-1], key, method))


def _start(part: Any, key: PRNGKeyArray, method: MsignMethod) -> Any:
    if not isinstance(part, Linear):
        return ()
    m, n = part.shape
    return msign(jax.random.normal(key, part.shape), method) * math.sqrt(m / n)
