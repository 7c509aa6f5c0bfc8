"""What an architecture compiles to: one record per weight, and what follows from it alone."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from manifoldmuon.linalg import prescale, upcast
from manifoldmuon.manifolds import Manifold


@dataclasses.dataclass(frozen=True, eq=False)
class Leaf:
    """One weight of an architecture; a leaf of trees, not a node.

    Attributes:
      manifold: the space that the weight lives in.
      ndim: how many trailing axes make one weight; the axes of `budget` come before them.
      mass: its mass, all copies together.
      budget: the target norm; one number for each copy.
    """

    manifold: Manifold
    ndim: int
    mass: float
    budget: np.ndarray

    def plain_budget(self) -> float | np.ndarray:
        """One number where all copies agree, else an array that broadcasts against the weight."""
        first = float(self.budget.flat[0])
        # Sensitivities such as 1 - 1/6 + 1/6 are 1 but for rounding in float64.
        if np.allclose(self.budget, first, rtol=1e-9, atol=0):
            return first
        return self.budget.reshape(self.budget.shape + (1,) * self.ndim)

    def norm(self, weight: Float[Array, "..."]) -> Float[Array, "*copies"]:
        """The norm of each copy: the largest over what the manifold sees as separate points."""
        norms = self.manifold.norm(weight)
        extra = tuple(range(self.budget.ndim, norms.ndim))
        return jnp.max(norms, axis=extra, initial=0) if extra else norms

    def relative_norm(self, weight: Float[Array, "..."]) -> Float[Array, ""]:
        """The largest norm in units of the budget; frozen copies do not count."""
        moving = self.budget > 0
        share = self.norm(upcast(weight)) / np.where(moving, self.budget, 1)
        return jnp.max(jnp.where(moving, share, 0), initial=0)

    def dualize(self, grad: Float[Array, "..."], point: Any) -> Float[Array, "..."]:
        """The steepest direction, of the budget's norm."""
        if point is None and not self.manifold.flat:
            raise ValueError(
                f"the directions of {type(self.manifold).__name__} depend on where the weights "
                "are: call dualize(grads, params)"
            )
        where = grad if point is None else point  # flat space does not look at the point
        dual = self.manifold.init_dual(grad.shape)
        return self._scaled(self.manifold.steepest(where, grad, dual).direction)

    def normalize(self, update: Float[Array, "..."]) -> Float[Array, "..."]:
        """The update, divided by its norm and multiplied by the budget; zero stays zero."""
        scaled, _ = prescale(update, self.ndim)
        norm = self.norm(scaled)
        norm = jnp.expand_dims(norm, tuple(range(-self.ndim, 0)))
        return self._scaled(scaled / jnp.where(norm == 0, 1, norm)).astype(update.dtype)

    def regularize(self, weight: Float[Array, "..."], strength: Any) -> Float[Array, "..."]:
        """A flat weight shrunk by `1 - strength`; a curved one bounds itself."""
        if not self.manifold.flat:
            return weight
        return weight * jnp.asarray(1 - strength, weight.dtype)

    def _scaled(self, direction: Float[Array, "..."]) -> Float[Array, "..."]:
        return direction * jnp.asarray(self.plain_budget(), direction.dtype)


def check_number(name: str, value: Any, least: float = -math.inf) -> None:
    """Raises `ValueError` unless `value` is a finite number of at least `least`."""
    real = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not real or not math.isfinite(value) or value < least:
        bound = "" if least == -math.inf else f" >= {least:g}"
        raise ValueError(f"{name} must be a finite number{bound}; got {value!r}")


def map_leaves(function: Any, plan: Any, *trees: Any) -> Any:
    """`function(leaf, ...)` over a plan and trees of its structure.

    Raises:
      ValueError: a tree has another structure.
    """
    leaves, structure = jax.tree.flatten(plan)
    flat = []
    for tree in trees:
        found = jax.tree.structure(tree)
        if found != structure:
            raise ValueError(
                "expected a tree of the structure that init returns, "
                f"{_outline(structure)}; got {_outline(found)}"
            )
        flat.append(jax.tree.leaves(tree))
    mapped = [function(*pieces) for pieces in zip(leaves, *flat, strict=True)]
    return jax.tree.unflatten(structure, mapped)


def _outline(structure: Any) -> str:
    return str(structure).removeprefix("PyTreeDef(").removesuffix(")")
