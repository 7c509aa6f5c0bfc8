"""Networks as certificates describe them: their constant, and values with bounds on their error."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from manifoldmuon_verify._files import Stored
from manifoldmuon_verify._layers import Layer, Shape, build
from manifoldmuon_verify._refusal import Refused, short
from manifoldmuon_verify._rounding import DOUBLE, SINGLE, down, norm, product, total, up

_MOST_LAYERS = 10_000
_DEEPEST = 32
# Above it float32 could overflow in a square.
_LARGEST_SINGLE = 2.0**60
# What may follow the last linear layer: none of them changes a difference of two logits by more
# than a factor.
_TAIL = {"bias", "scale", "identity", "mean_subtract"}


@dataclasses.dataclass(frozen=True)
class Sum:
    """The sum of branches that read the same input.

    Attributes:
      branches: sequences of nodes.
      shape: of the output for one image.
    """

    branches: tuple["Nodes", ...]
    shape: Shape

    @property
    def lipschitz(self) -> float:
        return float(total(*(lipschitz(branch) for branch in self.branches)))


Nodes = tuple[Layer | Sum, ...]


@dataclasses.dataclass(frozen=True)
class State:
    """What is known in one place of the network, for each image of a batch; norms are Euclidean.

    Attributes:
      values: as computed in float64, `(n, ...)`.
      error: at least their distance from the exact values, `(n,)`.
      reach: at least how far the exact values move while the image moves in its ball.
      deployed: at least how far float32 is off, anywhere in the ball; None where not asked for.
    """

    values: np.ndarray
    error: np.ndarray
    reach: np.ndarray
    deployed: np.ndarray | None

    def size(self) -> np.ndarray:
        """At least the norm of what float32 computes, anywhere in the ball."""
        return total(norm(self.values, 1), self.error, self.reach, self.deployed)


def lipschitz(nodes: Nodes) -> float:
    """At least the Lipschitz constant of nodes one after the other."""
    return float(product(1.0, *(node.lipschitz for node in nodes)))


def layers(nodes: Nodes) -> Iterator[Layer]:
    """Every layer, with those inside of sums."""
    for node in nodes:
        if isinstance(node, Sum):
            for branch in node.branches:
                yield from layers(branch)
        else:
            yield node


def evaluate(nodes: Nodes, state: State) -> State:
    """The state behind nodes one after the other."""
    for node in nodes:
        state = _through_sum(node, state) if isinstance(node, Sum) else _through(node, state)
    return state


def _through(layer: Layer, state: State) -> State:
    values = layer.forward(state.values)
    if not np.all(np.isfinite(values)):
        raise Refused("the evaluation", f"{layer.kind} overflows")
    constant = layer.lipschitz
    size = norm(state.values, 1)
    error = total(product(constant, state.error), layer.rounding(DOUBLE, size))
    deployed = None
    if state.deployed is not None:
        size = _in_range(state.size(), layer.kind)
        _in_range(total(product(layer.gain, size), layer.offset), layer.kind)
        deployed = total(product(constant, state.deployed), layer.rounding(SINGLE, size))
    return State(values, error, product(constant, state.reach), deployed)


def _through_sum(node: Sum, state: State) -> State:
    ends = [evaluate(branch, state) for branch in node.branches]
    values = sum(end.values for end in ends)
    assert isinstance(values, np.ndarray)
    terms = len(ends) - 1
    rounded = product(DOUBLE.gamma(terms), total(*(norm(end.values, 1) for end in ends)))
    deployed = None
    if state.deployed is not None:
        sizes = _in_range(total(*(end.size() for end in ends)), "sum")
        deployed = total(*(end.deployed for end in ends), product(SINGLE.gamma(terms), sizes))
    return State(
        values,
        total(*(end.error for end in ends), rounded),
        total(*(end.reach for end in ends)),
        deployed,
    )


def _in_range(size: np.ndarray, kind: str) -> np.ndarray:
    if not np.all(size < _LARGEST_SINGLE):
        raise Refused("the evaluation", f"{kind} may overflow in float32")
    return size


def pair_constants(nodes: Nodes) -> np.ndarray:
    """At least the Lipschitz constant of each difference of two logits, `(classes, classes)`."""
    (classes,) = nodes[-1].shape
    found = np.full((classes, classes), product(up(math.sqrt(2.0)), lipschitz(nodes)))
    last = len(nodes) - 1
    while last >= 0 and getattr(nodes[last], "kind", "") in _TAIL:
        last -= 1
    head = nodes[last] if last >= 0 else None
    if isinstance(head, Layer) and head.weight is not None:
        factor = product(lipschitz(nodes[:last]), lipschitz(nodes[last + 1 :]))
        for i, row in enumerate(head.weight):
            # Each difference is rounded once.
            apart = product(norm(row - head.weight, 1), 1 + 4 * DOUBLE.unit)
            found[i] = np.minimum(found[i], product(apart, factor))
    return found


def lower_margins(state: State, predictions: np.ndarray) -> np.ndarray:
    """At most the exact logit of the predicted class less each other's; infinity at itself."""
    rows = np.arange(len(predictions))
    logits = state.values
    margins = down(logits[rows, predictions][:, None] - logits)
    # Two logits together are off by at most sqrt(2) times the norm of all.
    off = product(up(math.sqrt(2.0)), state.error)
    if state.deployed is not None:
        off = total(off, product(up(math.sqrt(2.0)), state.deployed))
    margins = down(margins - off[:, None])
    margins[rows, predictions] = math.inf
    return margins


class Builder:
    """Builds the network of a certificate, and keeps account of the arrays that it uses.

    Attributes:
      uses: the places that name each array.
    """

    def __init__(self, arrays: Mapping[str, Stored]):
        self.uses: dict[str, set[str]] = {name: set() for name in arrays}
        self._arrays = arrays
        self._built = 0

    def sequence(
        self,
        entries: Any,
        shape: Shape,
        where: str,
        copies: tuple[int, ...] = (),
        index: tuple[int, ...] = (),
    ) -> Nodes:
        """The nodes of a list of entries.

        Args:
          entries: as they stand in the certificate.
          shape: of the input for one image.
          where: the place of the list, for refusals.
          copies: the sizes of the stacks around it, the outermost first.
          index: which copy this is, in each.
        """
        if not isinstance(entries, list):
            raise Refused(where, f"{short(entries)} is not a list of layers")
        nodes: list[Layer | Sum] = []
        for i, entry in enumerate(entries):
            new = self._entry(entry, shape, f"{where}[{i}]", copies, index)
            nodes += new
            shape = new[-1].shape if new else shape
        return tuple(nodes)

    def _entry(
        self, entry: Any, shape: Shape, where: str, copies: tuple[int, ...], index: tuple[int, ...]
    ) -> Nodes:
        self._built += 1
        if self._built > _MOST_LAYERS:
            raise Refused(where, f"more than {_MOST_LAYERS} layers")
        if where.count("[") > 2 * _DEEPEST:
            raise Refused(f"{where[:40]}...", "nested too deeply")
        if not isinstance(entry, dict) or not isinstance(entry.get("kind"), str):
            raise Refused(where, f"{short(entry)} is not a layer")
        options = {key: value for key, value in entry.items() if key != "kind"}
        kind = entry["kind"]
        if kind == "stack":
            return self._stack(options, shape, where, copies, index)
        if kind == "sum":
            return (self._sum(options, shape, where, copies, index),)

        def weights(key: str, axes: int) -> np.ndarray:
            return self._array(options[key], axes, where, copies, index)

        return (build(kind, options, weights, shape, where),)

    def _stack(
        self,
        options: dict[str, Any],
        shape: Shape,
        where: str,
        copies: tuple[int, ...],
        index: tuple[int, ...],
    ) -> Nodes:
        count = options.get("copies")
        if set(options) != {"copies", "layers"} or type(count) is not int or count < 1:
            raise Refused(where, f"a stack takes copies and layers and got {short(options)}")
        nodes: list[Layer | Sum] = []
        for i in range(count):
            inner = (*copies, count), (*index, i)
            new = self.sequence(options["layers"], shape, f"{where}.layers", *inner)
            if not new or new[-1].shape != shape:
                raise Refused(where, f"a copy makes {new[-1].shape if new else ()} of {shape}")
            nodes += new
        return tuple(nodes)

    def _sum(
        self,
        options: dict[str, Any],
        shape: Shape,
        where: str,
        copies: tuple[int, ...],
        index: tuple[int, ...],
    ) -> Sum:
        entries = options.get("branches")
        if set(options) != {"branches"} or not isinstance(entries, list) or not entries:
            raise Refused(where, f"a sum takes branches and got {short(options)}")
        branches = tuple(
            self.sequence(branch, shape, f"{where}.branches[{i}]", copies, index)
            for i, branch in enumerate(entries)
        )
        shapes = {branch[-1].shape if branch else shape for branch in branches}
        if len(shapes) > 1:
            raise Refused(where, f"branches of different shapes {sorted(shapes)}")
        return Sum(branches, shapes.pop())

    def _array(
        self, name: Any, axes: int, where: str, copies: tuple[int, ...], index: tuple[int, ...]
    ) -> np.ndarray:
        if not isinstance(name, str) or name not in self._arrays:
            raise Refused(where, f"the array {short(name)} is not declared")
        self.uses[name].add(where)
        values = self._arrays[name].values
        if values.shape[: len(copies)] != copies or values.ndim != len(copies) + axes:
            raise Refused(
                where,
                f"the array {short(name)} is {values.shape}; wanted are {axes} axes"
                + (f" behind those of the stacks, {copies}" if copies else ""),
            )
        return values[index]
