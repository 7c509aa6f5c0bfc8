"""The open set of rules: one for each type of module."""

import functools
from typing import Any

from manifoldmuon.certificates._certificate import Certificate
from manifoldmuon.certificates._transfer import Sizes, Transfer
from manifoldmuon.modules import Module


@functools.singledispatch
def rule(module: Module, weights: Any, x: Sizes) -> Transfer:
    """What a module does to sizes and perturbations, whatever the input of these sizes.

    A generic function with one implementation for each type of module. The bounds of a bond of
    your own are a function `(bond, weights, x) -> Transfer` decorated with
    `certificates.rule.register`; `read` and `Transfer.of` make it a few lines:

        @certificates.rule.register
        def _(bond: Tanh, weights, x):
            x, converted = certificates.read(x, certificates.RMS())
            return converted.then(certificates.Transfer.of(x.within(), 1.0, gamma=math.inf))

    Declared sensitivities are not looked at: they are figures for typical inputs.

    Args:
      module: a module of the type that the implementation is for.
      weights: what is known of its weights, in the structure of its parameters; `()` for bonds.
      x: the size of the input, or a tuple of sizes where the input is a tuple.

    Raises:
      TypeError: the type has no implementation.
      ValueError: an input of these sizes does not fit.
    """
    name = type(module).__name__
    raise TypeError(
        f"there is no sound bound for {name}, and its declared sensitivity may not hold for every "
        f"input: decorate a function (bond: {name}, weights, x) -> certificates.Transfer with "
        "@certificates.rule.register"
    )


def certified(module: Module, weights: Any, x: Sizes) -> Certificate:
    """The certificate of a part, for what is known of its weights and its input."""
    try:
        return Certificate(module, x, rule(module, weights, x))
    except ValueError as error:
        if "\nat " in str(error):  # said where it happened already
            raise
        raise ValueError(f"{error}\nat {module.describe()}") from error
