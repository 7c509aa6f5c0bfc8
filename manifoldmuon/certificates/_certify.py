"""Certificates of whole architectures."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from manifoldmuon.certificates._certificate import Certificate
from manifoldmuon.certificates._measures import RMS, Largest, Measure, OneHot, Size
from manifoldmuon.certificates._rule import certified
from manifoldmuon.certificates._transfer import Sizes
from manifoldmuon.certificates._weights import weight_of
from manifoldmuon.modules import (
    CausalMask,
    Compose,
    Concatenate,
    Embed,
    Module,
    Positions,
    Softmax,
    Stack,
    Tied,
)
from manifoldmuon.modules._leaf import check_number, map_leaves


def certify(
    module: Module,
    params: Any = None,
    *,
    input_norm: Any = 1.0,
    radius: float = 0.0,
    drift: float = 0.0,
) -> Certificate:
    """Sound bounds on an architecture's output and derivatives, module by module.

    The bounds hold for every input of the declared size, and

    * without `params`, for all weights on their manifolds. Flat space is no constraint: a weight
      in flat space is taken to have norm at most 1 in its own norm, and `assumptions` says so;
    * with `params`, for these weights and all others within `radius` of them.

    They are about exact arithmetic: what is computed in float32 differs by its rounding. The
    bounds themselves are computed in float64, with the singular values of weights rounded up, and
    are right to about twelve digits.

    Args:
      module: the architecture.
      params: the weights, as `module.init` returns them; None for all on the manifolds.
      input_norm: the largest norm of an input, in the norm that the first module reads (RMS of a
        vector, token or pixel; the largest score). Infinity asks for what holds everywhere. A
        `Size` says more, such as a least norm; a tuple of these is for a tuple of inputs. Whole
        numbers, read by `Embed`, have norm 1, whatever is said.
      radius: in the modular norm; only with `params`.
      drift: how far weights may be from their manifolds, relative to the manifold's scale (see
        `Manifold.distance`); only without `params`.

    Returns:
      The certificate; `print` shows it as a tree.

    Raises:
      TypeError: a module or a manifold of a type without a rule; the message says how to add one.
      ValueError: sizes or weights that do not fit.
    """
    check_number("certify(radius)", radius, least=0.0)
    check_number("certify(drift)", drift, least=0.0)
    if (radius and params is None) or (drift and params is not None):
        raise ValueError("radius goes with params: a ball around them; drift goes without")
    known = functools.partial(weight_of, radius=float(radius), drift=float(drift))
    plan = module.plan(np.ones(()))
    if params is None:
        weights = map_leaves(lambda leaf: known(leaf, None), plan)
    else:
        weights = map_leaves(known, plan, params)
    found = certified(module, weights, _declared(input_norm, _reads(module)))
    flat = params is None and any(leaf.manifold.flat for leaf in jax.tree.leaves(plan))
    return dataclasses.replace(found, assumptions=(_NORM_ONE,) if flat else ())


_NORM_ONE = "weights in flat space have norm at most 1 in its norm, which nothing constrains"


def _declared(norm: Any, measure: Measure) -> Sizes:
    if isinstance(norm, tuple):
        return tuple(_declared(part, RMS()) for part in norm)
    if isinstance(norm, Size):
        return norm
    if measure == OneHot():
        return Size(1.0, 1.0, measure)
    if isinstance(norm, bool) or not norm >= 0:
        raise ValueError(f"certify(input_norm) must be a number >= 0 or a Size; got {norm!r}")
    return Size(float(norm), measure=measure)


def _reads(module: Module) -> Measure:
    """The norm in which a module reads its input."""
    if isinstance(module, Compose | Stack | Tied):
        return _reads(module.parts[0])
    if isinstance(module, Concatenate):
        found = {_reads(part) for part in module.parts}
        return found.pop() if len(found) == 1 else RMS()
    if isinstance(module, Embed | Positions):
        return OneHot()
    return Largest() if isinstance(module, Softmax | CausalMask) else RMS()
