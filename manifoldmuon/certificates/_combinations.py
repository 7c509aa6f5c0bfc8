"""Rules of the combinations: bounds compose, copy by copy and part by part."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax

from manifoldmuon.certificates._rule import certified, rule
from manifoldmuon.certificates._transfer import Sizes, Transfer, identity, side_by_side
from manifoldmuon.certificates._weights import Weight
from manifoldmuon.modules import Compose, Concatenate, Module, Stack, Tied
from manifoldmuon.modules._tied import _find, _put


@rule.register
def _(module: Compose, weights: Any, x: Sizes) -> Transfer:
    return _in_sequence(zip(module.parts, weights, strict=True), x)


@rule.register
def _(module: Stack, weights: Any, x: Sizes) -> Transfer:
    return _in_sequence(((module.module, _copy(weights, i)) for i in range(module.copies)), x)


@rule.register
def _(module: Concatenate, weights: Any, x: Sizes) -> Transfer:
    pairs = zip(module.parts, weights, strict=True)
    parts = tuple(certified(part, inner, x) for part, inner in pairs)
    return dataclasses.replace(side_by_side([part.transfer for part in parts]), parts=parts)


@rule.register
def _(module: Tied, weights: Any, x: Sizes) -> Transfer:
    """Every place moves with the one budget; that the effects add up is the rule for sums."""
    shared = _find(weights, module.places[0])
    full = functools.reduce(lambda tree, p: _put(tree, p, shared), module.places[1:], weights)
    part = certified(module.module, full, x)
    return dataclasses.replace(part.transfer, parts=(part,))


def _in_sequence(parts: Iterable[tuple[Module, Any]], x: Sizes) -> Transfer:
    whole, found = identity(x), []
    for module, weights in parts:
        found.append(certified(module, weights, whole.outputs))
        whole = whole.then(found[-1].transfer)
    return dataclasses.replace(whole, parts=tuple(found))


def _copy(weights: Any, index: int) -> Any:
    return jax.tree.map(
        lambda weight: weight.copy(index), weights, is_leaf=lambda x: isinstance(x, Weight)
    )
