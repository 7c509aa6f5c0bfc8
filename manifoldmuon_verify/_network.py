"""Networks of certificates: Lipschitz constants, and values with error bounds."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from manifoldmuon_verify import _limits
from manifoldmuon_verify._files import Stored
from manifoldmuon_verify._layers import Layer, Shape, Weight, build
from manifoldmuon_verify._refusal import Refused, short
from manifoldmuon_verify._rounding import DOUBLE, SINGLE, down, norm, product, total, up

# Numbers in an array of a batch, unless a single image has more; they fit in a cache.
_BATCH_NUMBERS = 2**18
# Above this norm, squares could overflow in float32.
_LARGEST_SINGLE = 2.0**60
# Layers that may follow the last linear layer: they only scale differences of two logits.
_TAIL = {"bias", "scale", "identity", "mean_subtract"}


@dataclasses.dataclass(frozen=True, eq=False)
class Sum:
    """The sum of branches that read the same input.

    Attributes:
      branches: sequences of nodes.
      shape: output shape, per image.
    """

    branches: tuple["Nodes", ...]
    shape: Shape

    @functools.cached_property
    def lipschitz(self) -> float:
        return float(total(*(lipschitz(branch) for branch in self.branches)))


Nodes = tuple[Layer | Sum, ...]
Stacks = tuple[tuple[int, int], ...]
"""Number of copies, and index of the copy, in each enclosing stack, outermost first."""


@dataclasses.dataclass(frozen=True, eq=False)
class State:
    """Activations at a point in the network and Euclidean error bounds, per image of a batch.

    Attributes:
      values: values computed in float64, `(n, ...)`.
      error: bounds their distance from the exact values, `(n,)`.
      reach: bounds the movement of the exact values while the image moves in its ball, `(n,)`.
      deployed: bounds the float32 error anywhere in the ball, `(n,)`; None in real arithmetic.
    """

    values: np.ndarray
    error: np.ndarray
    reach: np.ndarray
    deployed: np.ndarray | None

    @functools.cached_property
    def norm(self) -> np.ndarray:
        """Upper bound on the norm of the values."""
        return norm(self.values, 1)

    def size(self) -> np.ndarray:
        """Bound the norm of the float32 values anywhere in the ball."""
        deployed = 0.0 if self.deployed is None else self.deployed
        return total(self.norm, self.error, self.reach, deployed)


def lipschitz(nodes: Nodes) -> float:
    """Bound the Lipschitz constant of a sequence of nodes."""
    return float(product(1.0, *(node.lipschitz for node in nodes)))


def layers(nodes: Nodes) -> Iterator[Layer]:
    """Yield all layers, including layers inside sums."""
    for node in nodes:
        if isinstance(node, Sum):
            for branch in node.branches:
                yield from layers(branch)
        else:
            yield node


def used_matrices(nodes: Nodes) -> list[Weight]:
    """Return the distinct weights that enter matrix products."""
    found = {id(layer.weight): layer.weight for layer in layers(nodes) if layer.weight}
    return list(found.values())


def check_size(nodes: Nodes, images: int, predicted: int) -> int:
    """Refuse networks that are too large; return the number of images per batch.

    `nodes` start with the normalisation; `predicted` is the number of distinct predicted classes.
    """
    head, (classes,) = _head(nodes)[1], nodes[-1].shape
    largest, work = 1, images * (_operations(nodes) + 8 * _limits.TOUCH * classes)
    for layer in layers(nodes):
        largest = max(largest, math.prod(layer.shape))
        _limits.check_limit(
            f"the layer {layer.kind}", "numbers for an image", largest, _limits.MOST_NUMBERS
        )
    for weight in used_matrices(nodes):
        numbers, short_side = math.prod(weight.shape[-2:]), min(weight.shape[-2:])
        _limits.check_limit(weight.where, "numbers in a matrix", numbers, _limits.MOST_NUMBERS)
        work += (
            weight.numbers // numbers * (_limits.MATRIX + _limits.DECOMPOSE * numbers * short_side)
        )
    _limits.check_limit("the claims", "pairs of classes", predicted * classes, _limits.MOST_NUMBERS)
    work += predicted * _limits.TOUCH * (head.numbers if head else classes)
    _limits.check_limit("the network", "multiplications", work, _limits.MOST_WORK)
    return min(images, max(1, _BATCH_NUMBERS // largest))


def _operations(nodes: Nodes) -> int:
    """Count the multiplications for an image."""
    return sum(
        sum(_operations(branch) + _limits.TOUCH * math.prod(node.shape) for branch in node.branches)
        if isinstance(node, Sum)
        else math.prod(node.shape) * (node.terms + _limits.TOUCH)
        for node in nodes
    )


def evaluate(nodes: Nodes, state: State) -> State:
    """Return the state after a sequence of nodes."""
    for node in nodes:
        state = _through_sum(node, state) if isinstance(node, Sum) else _through(node, state)
    return state


def _through(layer: Layer, state: State) -> State:
    values = layer.forward(state.values)
    constant = layer.lipschitz
    error = total(product(constant, state.error), layer.rounding_error(DOUBLE, state.norm))
    deployed = None
    if state.deployed is not None:
        size = _in_range(state.size(), layer.kind)
        _in_range(total(product(layer.bounds.gain, size), layer.bounds.offset), layer.kind)
        deployed = total(product(constant, state.deployed), layer.rounding_error(SINGLE, size))
    state = State(values, error, product(constant, state.reach), deployed)
    if not np.all(np.isfinite(state.norm)):
        raise Refused("the evaluation", f"{layer.kind} overflows")
    return state


def _through_sum(node: Sum, state: State) -> State:
    first, *others = node.branches
    found = evaluate(first, state)
    values, error, reach, deployed = found.values, found.error, found.reach, found.deployed
    norms, sizes = found.norm, found.size()
    for branch in others:
        found = evaluate(branch, state)
        values = values + found.values
        error, reach = total(error, found.error), total(reach, found.reach)
        norms, sizes = total(norms, found.norm), total(sizes, found.size())
        if deployed is not None:
            deployed = total(deployed, found.deployed)
    terms = len(others)
    if deployed is not None:
        deployed = total(deployed, product(SINGLE.gamma(terms), _in_range(sizes, "sum")))
    return State(values, total(error, product(DOUBLE.gamma(terms), norms)), reach, deployed)


def _in_range(size: np.ndarray, kind: str) -> np.ndarray:
    if not np.all(size < _LARGEST_SINGLE):
        raise Refused("the evaluation", f"{kind} may overflow in float32")
    return size


def _head(nodes: Nodes) -> tuple[int, Weight | None]:
    """Return index and matrix of the last layer before the tail, if linear; else the end, None."""
    last = len(nodes) - 1
    while last >= 0 and getattr(nodes[last], "kind", "") in _TAIL:
        last -= 1
    head = nodes[last] if last >= 0 else None
    if isinstance(head, Layer) and head.kind == "linear":
        return last, head.weight
    return len(nodes), None


class PairConstants:
    """Bounds on the Lipschitz constants of differences of two logits."""

    def __init__(self, nodes: Nodes):
        (self._classes,) = nodes[-1].shape
        self._all = float(product(up(math.sqrt(2.0)), lipschitz(nodes)))
        last, self._head = _head(nodes)
        self._factor = product(lipschitz(nodes[:last]), lipschitz(nodes[last + 1 :]))
        self._rows: dict[int, np.ndarray] = {}

    def rows(self, predictions: np.ndarray) -> np.ndarray:
        """Return the bounds for the predicted class against each class, `(n, classes)`."""
        for i in set(predictions.tolist()) - set(self._rows):
            self._rows[i] = np.full(self._classes, self._all)
            if self._head is not None:
                matrix = self._head.values
                # Each difference is rounded once.
                apart = product(norm(matrix[i] - matrix, 1), 1 + 4 * DOUBLE.unit)
                self._rows[i] = np.minimum(self._rows[i], product(apart, self._factor))
        return np.stack([self._rows[i] for i in predictions.tolist()])


def lower_margins(state: State, predictions: np.ndarray) -> np.ndarray:
    """Return lower bounds on the predicted logit minus the others; infinity at itself."""
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
    """Builds the network of a certificate and records the arrays it uses.

    Attributes:
      uses: paths of the entries that use each array.
    """

    def __init__(self, arrays: Mapping[str, Stored]):
        self.uses: dict[str, set[str]] = {name: set() for name in arrays}
        self._arrays = arrays
        self._weights: dict[tuple[str, tuple[int, ...]], Weight] = {}
        self._built = 0

    def sequence(self, entries: Any, shape: Shape, where: str, stacks: Stacks = ()) -> Nodes:
        """Build the nodes of a certificate's list of entries.

        `shape` is the input's, per image; `where` is the path of the list, for refusals.
        """
        if not isinstance(entries, list):
            raise Refused(where, f"must be a list of layers; got {short(entries)}")
        nodes: list[Layer | Sum] = []
        for i, entry in enumerate(entries):
            new = self._entry(entry, shape, f"{where}[{i}]", stacks)
            nodes += new
            shape = new[-1].shape if new else shape
        return tuple(nodes)

    def _entry(self, entry: Any, shape: Shape, where: str, stacks: Stacks) -> Nodes:
        self._count(where)
        if where.count("[") > _limits.DEEPEST:
            raise Refused(f"{where[:40]}...", "nested too deeply")
        if not isinstance(entry, dict) or not isinstance(entry.get("kind"), str):
            raise Refused(where, f"must be a layer, an object with a kind; got {short(entry)}")
        options = {key: value for key, value in entry.items() if key != "kind"}
        kind = entry["kind"]
        if kind == "stack":
            return self._stack(options, shape, where, stacks)
        if kind == "sum":
            return (self._sum(options, shape, where, stacks),)

        def weights(key: str, axes: int) -> Weight:
            return self._array(options[key], axes, where, stacks)

        return (build(kind, options, weights, shape, where),)

    def _stack(self, options: dict[str, Any], shape: Shape, where: str, stacks: Stacks) -> Nodes:
        count = options.get("copies")
        if set(options) != {"copies", "layers"} or type(count) is not int or count < 1:
            raise Refused(where, f"a stack takes copies (above 0), layers; got {short(options)}")
        nodes: list[Layer | Sum] = []
        for i in range(count):
            new = self.sequence(options["layers"], shape, f"{where}.layers", (*stacks, (count, i)))
            if not new or new[-1].shape != shape:
                got = new[-1].shape if new else ()
                raise Refused(where, f"a copy must keep the shape {shape}; got {got}")
            nodes += new
        return tuple(nodes)

    def _sum(self, options: dict[str, Any], shape: Shape, where: str, stacks: Stacks) -> Sum:
        entries = options.get("branches")
        if set(options) != {"branches"} or not isinstance(entries, list) or not entries:
            raise Refused(where, f"a sum takes branches (1 or more); got {short(options)}")
        for _ in entries:
            self._count(where)
        branches = tuple(
            self.sequence(branch, shape, f"{where}.branches[{i}]", stacks)
            for i, branch in enumerate(entries)
        )
        shapes = {branch[-1].shape if branch else shape for branch in branches}
        if len(shapes) > 1:
            raise Refused(where, f"branches must have the same shape; got {short(sorted(shapes))}")
        return Sum(branches, shapes.pop())

    def _count(self, where: str) -> None:
        self._built += 1
        _limits.check_limit(where, "layers and branches", self._built, _limits.MOST_LAYERS)

    def _array(self, name: Any, axes: int, where: str, stacks: Stacks) -> Weight:
        if not isinstance(name, str) or name not in self._arrays:
            raise Refused(where, f"the array {short(name)} is not declared")
        self.uses[name].add(where)
        stored, copies = self._arrays[name], tuple(count for count, _ in stacks)
        if stored.shape[: len(copies)] != copies or len(stored.shape) != len(copies) + axes:
            raise Refused(
                where,
                f"the array {short(name)} has shape {stored.shape}; expected {axes} axes"
                + (f" after the axes {copies} of the stacks" if copies else ""),
            )
        index = tuple(i for _, i in stacks)
        made = Weight(stored, index, f"weights, {short(name)}")
        return self._weights.setdefault((name, index), made)
