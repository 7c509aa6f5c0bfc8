"""Architectures in the modular-norm parametrisation and in the standard parametrisation.

The standard parametrisation has Gaussian weights of standard deviation 1/sqrt(fan_in), attention
scores scaled by 1/sqrt(d), and residual branches scaled by 1/sqrt(number of branches).
"""

import abc
import dataclasses
import math
from typing import Any

import jax
from jaxtyping import PRNGKeyArray

from manifoldmuon.manifolds import Euclidean
from manifoldmuon.modules import (
    GELU,
    Abs,
    Embed,
    FunctionalAttention,
    Identity,
    Linear,
    MeanSubtract,
    MergeHeads,
    Module,
    RMSDivide,
    RoPE,
    SplitHeads,
    gpt,
    mlp,
    res_mlp,
)
from manifoldmuon.norms import MaxRowNorm


@dataclasses.dataclass(frozen=True)
class Architecture(abc.ABC):
    """An architecture with its sizes."""

    @abc.abstractmethod
    def modular(self, inputs: int, outputs: int) -> Module:
        """Return the network in the modular-norm parametrisation."""

    @abc.abstractmethod
    def standard(self, inputs: int, outputs: int) -> Module:
        """Return the network in the standard parametrisation; start from `gaussian_weights`."""


@dataclasses.dataclass(frozen=True)
class Perceptron(Architecture):
    """An MLP; the two parametrisations differ only in the initial weights.

    Attributes:
      width: the width of the hidden layers.
      depth: the number of linear layers.
    """

    width: int = 64
    depth: int = 3

    def modular(self, inputs: int, outputs: int) -> Module:
        return mlp(outputs, inputs, self.width, self.depth)

    def standard(self, inputs: int, outputs: int) -> Module:
        return self.modular(inputs, outputs)


@dataclasses.dataclass(frozen=True)
class Residual(Architecture):
    """A residual MLP.

    Attributes:
      width: the width of the residual stream.
      depth: the number of residual blocks.
      mass: the mass of all blocks together; the first and last layers have mass 1 each.
    """

    width: int = 64
    depth: int = 4
    mass: float = 1.0

    def modular(self, inputs: int, outputs: int) -> Module:
        return res_mlp(outputs, inputs, self.width, self.depth, mass=self.mass)

    def standard(self, inputs: int, outputs: int) -> Module:
        layer = MeanSubtract() @ Abs() @ Linear(self.width, self.width) @ RMSDivide()
        body = (Identity() + layer**2 / math.sqrt(self.depth)) ** self.depth
        return Linear(outputs, self.width) @ body @ Linear(self.width, inputs)


@dataclasses.dataclass(frozen=True)
class Transformer(Architecture):
    """A character GPT with rotary positions and without layer norms.

    Attributes:
      width: the width of the residual stream.
      depth: the number of pairs of an attention block and an MLP block.
      heads: the number of attention heads; their size grows with the width.
      mass: the mass of all blocks together; embedding and head have mass 1 each.
    """

    width: int = 32
    depth: int = 2
    heads: int = 2
    mass: float = 5.0

    def modular(self, inputs: int, outputs: int) -> Module:
        return gpt(inputs, self.width, self.heads, self.depth, mass=self.mass)

    def standard(self, inputs: int, outputs: int) -> Module:
        width, split = self.width, SplitHeads(self.heads)
        # The package's attention divides scores by d; scale the query to divide by sqrt(d).
        query = math.sqrt(width // self.heads) * RoPE() @ split @ Linear(width, width)
        key, value = RoPE() @ split @ Linear(width, width), split @ Linear(width, width)
        attention = Linear(width, width) @ MergeHeads() @ FunctionalAttention()
        attention = attention @ (query, key, value) @ RMSDivide()
        feed_forward = Linear(width, 4 * width) @ GELU() @ Linear(4 * width, width) @ RMSDivide()
        share = 1 / math.sqrt(2 * self.depth)
        block = (Identity() + share * feed_forward) @ (Identity() + share * attention)
        return Linear(outputs, width) @ RMSDivide() @ block**self.depth @ Embed(width, inputs)


def gaussian_weights(network: Module, key: PRNGKeyArray) -> Any:
    """Return Gaussian weights: standard deviation 1/sqrt(fan_in) for matrices, 1 for tables."""
    shapes, structure = jax.tree.flatten(jax.eval_shape(network.init, key))
    manifolds = structure.flatten_up_to(network.geometry())
    keys = jax.random.split(key, len(shapes))
    weights = [
        jax.random.normal(k, leaf.shape, leaf.dtype) * _deviation(manifold, leaf.shape)
        for k, leaf, manifold in zip(keys, shapes, manifolds, strict=True)
    ]
    return structure.unflatten(weights)


def _deviation(manifold: Any, shape: tuple[int, ...]) -> float:
    table = isinstance(manifold, Euclidean) and isinstance(manifold.norm, MaxRowNorm)
    return 1.0 if table else 1 / math.sqrt(shape[-1])
