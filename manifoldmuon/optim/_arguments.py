"""Argument checks for optimizers and transformations, made when they are constructed."""

from __future__ import annotations

import functools

from manifoldmuon._internal.arguments import check_arguments, one_of, optional
from manifoldmuon.linalg import MsignMethod
from manifoldmuon.norms import PowerIterations
from manifoldmuon.optim._geometry import check_geometry_argument

checked = functools.partial(
    check_arguments,
    geometry=check_geometry_argument,
    iterations=one_of(PowerIterations),
    method=optional(MsignMethod.check),
)
