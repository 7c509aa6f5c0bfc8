"""Architectures built elsewhere: their weights declared by path, for the same algebra."""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from manifoldmuon._internal.arguments import check_fields
from manifoldmuon.manifolds import Euclidean, LaidOut, Manifold
from manifoldmuon.modules._algebra import Module, as_module
from manifoldmuon.modules._atoms import Atom
from manifoldmuon.modules._plan import Sharpness, WeightSpec, map_weights
from manifoldmuon.modules._tied import shared_weight


@dataclasses.dataclass(frozen=True)
class Param(Module):
    """A weight of a model that is built elsewhere, in Flax or Equinox, say.

    It has mass, sensitivity and a norm, but no forward map: `init` and `apply` are the model's
    own. Slots combine with bonds and with one another by the algebra of `Module`, and `declare`
    turns the whole into a geometry and budgets by path. `Param(...) ** n` is a weight with n copies
    along its leading axis, as a scan over layers keeps it.

    With `atom`, a slot says what the model does with its weight, and `ExternalModule.network` makes
    the whole a module of its own, for bounds and certificates.

    What is declared is the user's word. The defaults are those of `Linear`: they hold where the
    layer is well-normed in the manifold's norm, as `x -> W x` is in `RMSToRMS()`. For a bias,
    `x -> x + b`, take `Euclidean(MaxAbs(ndim=1))` and the sharpness `Sharpness(0, 0, 0)`.

    Attributes:
      path: where the weight is in the tree of parameters: keys, names and indices joined by `/`,
        as in `"params/Dense_0/kernel"` or `"layers/0/weight"` (`optim.path_string`).
      manifold: the space of the weight; its directions are measured in its norm. A `LaidOut`
        (`Manifold.with_axes`) says how a kernel is laid out.
      mass: the share of learning.
      sensitivity: how much the output moves per movement of the input.
      sharpness: bounds on the second derivatives.
      ndim: how many trailing axes make one weight; None: as many as make a point of the manifold.
      atom: the layer of this package that computes what the model does with this weight, in the
        layout that the manifold's `with_axes` brings it to, such as `Linear(10, 256)`; None where
        nobody asks. Its own manifold and mass do not count.
    """

    path: str
    manifold: Manifold | LaidOut
    mass: float = 1.0
    sensitivity: float = 1.0
    sharpness: Sharpness = Sharpness(0.0, 1.0, 0.0)
    ndim: int | None = None
    atom: Atom | None = None

    def __post_init__(self):
        check_fields(self, mass="[0, inf)", sensitivity="[0, inf)", ndim="[0, inf)")
        if self.ndim is not None and self.ndim < self.manifold.ndim:
            raise ValueError(
                f"Param.ndim is {self.ndim}, but a point of the manifold of {self.path!r} takes "
                f"{self.manifold.ndim} axes"
            )

    @property
    def parts(self) -> tuple[Module, ...]:
        return ()

    def init(self, key: PRNGKeyArray, dtype: Any = None) -> NoReturn:
        raise ValueError(f"{self.describe()} has no weight of its own: the model makes it")

    def apply(self, params: Any, x: Any) -> NoReturn:
        raise ValueError(f"{self.describe()} has no forward map: apply the model instead")

    def constraint(self) -> Manifold | LaidOut:
        """The slot's own manifold.

        Raises:
          ValueError: it is flat space, and no constraint of the weight is known.
        """
        if not self._set.constrained:
            raise ValueError(
                f"{self.describe()} has no default constraint: declare it on the manifold that "
                "you want, such as Stiefel()"
            )
        return self.manifold

    def free_space(self) -> Manifold | LaidOut:
        """Flat space under the norm of the slot's manifold."""
        flat = Euclidean(self._set.norm)
        given = self.manifold
        return LaidOut(flat, given.layout) if isinstance(given, LaidOut) else flat

    def on(self, manifold: Manifold | LaidOut) -> "Param":
        """The same slot on another manifold."""
        return dataclasses.replace(self, manifold=manifold)

    def plan(self, target: np.ndarray) -> WeightSpec:
        ndim = self.manifold.ndim if self.ndim is None else self.ndim
        budget = target if self.mass > 0 else np.zeros_like(target)
        return WeightSpec(self.manifold, ndim, self.mass, budget, self.path)

    def map_atoms(self, function: Any) -> Any:
        return function(self)

    def describe(self) -> str:
        return f"Slot {self.path!r} on {type(self._set).__name__}"

    @property
    def _set(self) -> Manifold:
        return self.manifold.manifold if isinstance(self.manifold, LaidOut) else self.manifold


@dataclasses.dataclass(frozen=True)
class ExternalModule:
    """An architecture as data by path; made by `declare`.

    Its trees are nested dictionaries that `manifoldmuon.optim` compares with the parameters by
    path, so that they describe any container. `print` shows the module.

    Attributes:
      module: slots and bonds.
    """

    module: Module

    def __post_init__(self):
        self.budgets()

    def geometry(self) -> Any:
        """The manifold of every weight, as nested dictionaries."""
        return _nest({path: spec.space for path, spec in self._weights().items()})

    def budgets(self) -> Any:
        """The target norm of every weight, as nested dictionaries; see `Module.budgets`."""
        return _nest({path: spec.plain_budget() for path, spec in self._weights().items()})

    def network(self, params: Any) -> tuple[Module, Any]:
        """The same network as a module of this package, with the weights of a model.

        Every slot becomes its `atom`, on the slot's manifold. That the two compute the same is for
        the caller to compare: `net.apply(weights, x)` and the model on a few inputs.

        Args:
          params: the model's parameters, any tree with the declared paths; more may be in it.

        Returns:
          The module, and its weights in the structure of its `init`.

        Raises:
          ValueError: a slot without an atom, a path that is not in `params`, or a weight whose
            shape, in the manifold's layout, is not the atom's.
        """
        found = {
            jax.tree_util.keystr(path, simple=True, separator="/"): leaf
            for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]
        }

        def weight(spec: WeightSpec, expected: jax.ShapeDtypeStruct) -> Any:
            # Flax NNX keeps parameters in boxes, whose one child is their value.
            value = found.get(spec.path or "", found.get(f"{spec.path}/value"))
            if value is None:
                raise ValueError(f"no weight at {spec.path!r}; there are {sorted(found)}")
            value = spec.inward(value)
            if value.shape != expected.shape:
                raise ValueError(
                    f"the weight at {spec.path!r} has the shape {value.shape} in the layout of its "
                    f"manifold, and its atom takes {expected.shape}"
                )
            return value

        net = self.module.map_atoms(_atom)
        shapes = jax.eval_shape(net.init, jax.random.key(0))
        return net, map_weights(weight, self.module.weights(), shapes)

    def masses(self) -> Any:
        """The mass of every weight, all places and copies together, as nested dictionaries."""
        return _nest({path: spec.mass for path, spec in self._weights().items()})

    def __str__(self) -> str:
        return str(self.module)

    def _weights(self) -> dict[str, WeightSpec]:
        places: dict[str, list[WeightSpec]] = {}
        for spec in _flat(self.module.weights()):
            if spec.path is None:
                raise ValueError(
                    "a declared architecture is made of slots and bonds, whose weights have paths; "
                    f"this one holds an atom with a weight on {spec.space}:\n{self.module}"
                )
            places.setdefault(spec.path, []).append(spec)
        return {path: shared_weight(f"at {path!r}", specs) for path, specs in places.items()}


def declare(tree: Any) -> ExternalModule:
    """Geometry and budgets for a model that is built elsewhere.

    Args:
      tree: a module of `Param`s and bonds, or a tuple of such. A path that occurs several times
        is a shared weight and gets the budget of `tie`.

    Returns:
      What `optim.modular` and `optim.normed` take for an architecture.

    Raises:
      TypeError: not a module.
      ValueError: an atom that is not a `Param`; paths of which one lies inside the other; or slots
        of one path that differ in manifold or copies, or of which some are frozen and others not.

    Example:
      `declare(Param("layers/1/weight", m) @ ReLU() @ Param("layers/0/weight", m))`
    """
    return ExternalModule(as_module(tree))


def _atom(slot: Param) -> Module:
    if slot.atom is None:
        raise ValueError(
            f"{slot.describe()} does not say what the model does with its weight: "
            "Param(..., atom=Linear(fan_out, fan_in)), say"
        )
    return dataclasses.replace(slot.atom.on(slot._set), mass=slot.mass)


def _flat(plan: Any) -> list[Any]:
    return [leaf for part in plan for leaf in _flat(part)] if isinstance(plan, tuple) else [plan]


def _nest(values: dict[str, Any]) -> Any:
    """Nested dictionaries from paths; the value itself for the path of a single array."""
    if set(values) == {""}:
        return values[""]
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *above, name = path.split("/")
        node = tree
        for depth, key in enumerate(above):
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise ValueError(f"slot {path!r} lies inside slot {'/'.join(above[: depth + 1])!r}")
        if name in node:
            raise ValueError(f"other slots lie inside slot {path!r}")
        node[name] = value
    return tree
