"""The check of types and shapes in annotations."""

from collections.abc import Callable
from typing import Any

import beartype


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check the annotations of functions of modules and classes, but not of inner functions.

    Those are made in every call: their checks would be compiled each time.
    """
    return function if "<locals>" in function.__qualname__ else beartype.beartype(function)
