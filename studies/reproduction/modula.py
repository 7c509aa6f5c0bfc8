"""Common parts of the Modula package's published examples, reproduced digit for digit.

The networks start from Gaussian matrices orthogonalised by a Newton-Schulz iteration, drawn with
keys that are split along the composition. The same iteration dualizes the gradients. It is not run
to convergence (ten steps lift a singular value of 1e-5 to about 0.6), so the iteration is part of
the protocol.
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
"""Ten steps of (3, -16/5, 6/5), used for the published numbers."""

SIX_STEPS = NewtonSchulz(MODULA_SIX_STEP, frobenius=True)
"""Six steps, used by the package's current version."""


def mlp(inputs: int, width: int, outputs: int, method: MsignMethod | None) -> Module:
    """Return three linear layers and two ReLUs, dualized by `method` (None: this package's msign).

    The published ReLU declares sensitivity 1, which gives every layer the budget 1/3.
    """
    manifold = Euclidean(RMSToRMS(method))
    relu = ReLU(sensitivity=1.0)
    first, middle, last = (
        Linear(m, n, manifold) for m, n in ((width, inputs), (width, width), (outputs, width))
    )
    return last @ relu @ middle @ relu @ first


def init(network: Module, key: PRNGKeyArray, method: MsignMethod) -> tuple[Any, ...]:
    """Return the published initial weights of a composition of linear layers and bonds.

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
