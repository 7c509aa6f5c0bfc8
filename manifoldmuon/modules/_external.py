"""Models of other libraries: their weights, named by path, in the algebra of modules."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from manifoldmuon._internal.arguments import check_kind
from manifoldmuon._internal.text import Printed
from manifoldmuon._internal.trees.paths import path_string
from manifoldmuon.manifolds import Euclidean, LaidOut, Manifold
from manifoldmuon.modules._atoms import Atom
from manifoldmuon.modules._budgets import Sharpness, WeightSpec
from manifoldmuon.modules._module import Module, as_module
from manifoldmuon.modules._tied import shared_weight


@dataclasses.dataclass(frozen=True)
class Param(Module):
    """A weight of a model built in another library, such as Flax or Equinox.

    It has a mass, a sensitivity and a norm, but no forward map: `init` and `apply` raise. Declared
    weights combine with bonds and each other by the algebra of `Module`, and `ExternalModule` turns
    the result into a geometry and budgets by path. `Param(...) ** n` is a weight with n copies
    along its leading axis, the layout of a scan over layers.

    Declared values are trusted, not checked. The defaults suit `Linear`: they hold if the layer is
    well-normed in the manifold's norm, as `x -> W x` is in `RMSToRMS()`. For a bias, `x -> x + b`,
    take `Euclidean(MaxAbs(ndim=1))` and the sharpness `Sharpness(0, 0, 0)`.

    Attributes:
      path: the weight's path in the tree of parameters: keys, names and indices joined by `/`,
        as in `"params/Dense_0/kernel"` or `"layers/0/weight"`.
      manifold: the weight's manifold, which also gives the norm of its directions. A `LaidOut`
        (`Manifold.with_axes`) sets the layout of a kernel.
      mass: see `Module`, also for `sensitivity` and `sharpness`.
      ndim: trailing axes of a weight; None: the axes of a point of the manifold.
      atom: the equivalent layer of this package, such as `Linear(10, 256)`, for the weight in the
        layout of `with_axes`; None if not needed. The atom's own manifold and mass are ignored.
    """

    path: str
    manifold: Manifold | LaidOut
    mass: float = 1.0
    sensitivity: float = 1.0
    sharpness: Sharpness = Sharpness(0.0, 1.0, 0.0)
    ndim: int | None = None
    atom: Atom | None = None
    parts: ClassVar[tuple[Module, ...]] = ()
    ranges: ClassVar = {"ndim": "[0, inf)"}

    def __post_init__(self):
        super().__post_init__()
        check_kind(self, "path", str)
        check_kind(self, "manifold", Manifold, LaidOut)
        check_kind(self, "atom", Atom, type(None))
        if self.ndim is not None and self.ndim < self.manifold.ndim:
            raise ValueError(
                f"Param.ndim is {self.ndim}, but a point of the manifold of {self.path!r} takes "
                f"{self.manifold.ndim} axes"
            )

    def init(self, key: PRNGKeyArray, dtype: Any = None) -> NoReturn:
        raise ValueError(f"{self.describe()} has no weight of its own: the model makes it")

    def apply(self, params: Any, x: Any) -> NoReturn:
        raise ValueError(f"{self.describe()} has no forward map: apply the model instead")

    def constraint(self) -> Manifold | LaidOut:
        """Return the weight's own manifold; raise `ValueError` if it is flat space."""
        if not self._set.constrained:
            raise ValueError(
                f"{self.describe()} has no default constraint: declare it on the manifold that "
                "you want, such as Stiefel()"
            )
        return self.manifold

    def free_space(self) -> Manifold | LaidOut:
        """Return flat space under the norm of the weight's manifold."""
        flat = Euclidean(self._set.norm)
        given = self.manifold
        return LaidOut(flat, given.layout) if isinstance(given, LaidOut) else flat

    def on(self, manifold: Manifold | LaidOut) -> "Param":
        return dataclasses.replace(self, manifold=manifold)

    def plan(self, budget: np.ndarray) -> WeightSpec:
        ndim = self.manifold.ndim if self.ndim is None else self.ndim
        budget = budget if self.mass > 0 else np.zeros_like(budget)
        return WeightSpec(self.manifold, ndim, self.mass, budget, self.path)

    def map_atoms(self, function: Any) -> Any:
        return function(self)

    def describe(self) -> str:
        return f"Param {self.path!r} on {type(self._set).__name__}"

    @property
    def _set(self) -> Manifold:
        return self.manifold.manifold if isinstance(self.manifold, LaidOut) else self.manifold


@dataclasses.dataclass(frozen=True)
class ExternalModule(Printed):
    """Geometry and budgets, by path, of a model built in another library.

    Its trees are nested dictionaries. `manifoldmuon.optim` matches them with the parameters by
    path, in any container; `optim.modular` and `optim.normed` take this object as an architecture.
    `print` shows the module.

    Attributes:
      module: a module of `Param`s and bonds, or a tuple of such modules. A path that occurs several
        times is a shared weight and gets the budget of `Tied`.
      unused: paths of parameters, or of whole branches, that play no part in the network, such as
        an auxiliary head. `network` refuses all others that no `Param` names.

    Raises:
      ValueError: an atom that is not a `Param`, a path inside another path, or `Param`s of equal
        path that differ in manifold or copies, or are frozen only in part; `unused` is not a tuple
        of paths.

    Examples:
      >>> space = mm.manifolds.Stiefel()
      >>> net = ExternalModule(Param("2/weight", space) @ ReLU() @ Param("0/weight", space))
      >>> net.budgets()
      {'0': {'weight': 0.5}, '2': {'weight': 0.5}}
    """

    module: Module
    unused: tuple[str, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "module", as_module(self.module))
        if not isinstance(self.unused, tuple) or not all(isinstance(p, str) for p in self.unused):
            raise ValueError(
                f"ExternalModule(unused) must be a tuple of paths, such as ('head/bias',); got "
                f"{self.unused!r}"
            )
        self.budgets()

    def geometry(self) -> Any:
        """Return the manifold of every weight, as nested dictionaries."""
        return _nest({path: spec.entry() for path, spec in self._weights().items()})

    def budgets(self) -> Any:
        """Return the budget of every weight, as nested dictionaries; see `Module.budgets`."""
        return _nest({path: spec.plain_budget() for path, spec in self._weights().items()})

    def network(self, params: Any) -> tuple[Module, Any]:
        """Return a module of this package, for bounds and certificates, and its weights.

        Every `Param` becomes its `atom`, on the manifold of the `Param`. Outputs are not compared,
        as `robustness.certify` does: check `net.apply(weights, x)` against the model.

        Args:
          params: the model's parameters, any tree with the declared paths. Leaves that are not
            arrays of floating-point numbers are ignored.
        """
        pairs, _ = jax.tree_util.tree_flatten_with_path(params)
        leaves = {path_string(path): leaf for path, leaf in pairs}

        def weight(spec: WeightSpec, expected: jax.ShapeDtypeStruct) -> Any:
            # Flax NNX boxes each parameter; its array is the child `value`.
            value = leaves.get(spec.path or "", leaves.get(f"{spec.path}/value"))
            if value is None:
                raise ValueError(f"no weight at {spec.path!r}; there are {sorted(leaves)}")
            value = spec.inward(value)
            if value.shape != expected.shape:
                raise ValueError(
                    f"the weight at {spec.path!r} has the shape {value.shape} in the layout of its "
                    f"manifold, and its atom takes {expected.shape}"
                )
            return value

        net = self.module.map_atoms(_atom)
        shapes = jax.eval_shape(net.init, jax.random.key(0))
        weights = self.module.map_weights(weight, shapes)
        self._check_complete(leaves)
        return net, weights

    def weights(self) -> Any:
        """Return the `WeightSpec` of every `Param`, in the structure of the weights of `network`.

        `Param`s of equal path have their shared budget.
        """
        shared = self._weights()
        return jax.tree.map(
            lambda spec: dataclasses.replace(spec, budget=shared[spec.path].budget),
            self.module.weights(),
        )

    def __str__(self) -> str:
        return str(self.module)

    def _check_complete(self, leaves: dict[str, Any]) -> None:
        named = {*self._weights(), *self.unused}
        left_over = [
            path
            for path, leaf in leaves.items()
            if jnp.issubdtype(getattr(leaf, "dtype", int), jnp.inexact)
            and not any(f"{path}/".startswith(f"{name}/") for name in named)
        ]
        if left_over:
            raise ValueError(
                f"no Param names the parameters at {left_over}: declare a Param for each, or add "
                "unused parameters to ExternalModule(unused=...)"
            )

    def _weights(self) -> dict[str, WeightSpec]:
        specs_by_path: dict[str, list[WeightSpec]] = {}
        for spec in jax.tree.leaves(self.module.weights()):
            if spec.path is None:
                raise ValueError(
                    "an external architecture consists of Param and bonds; got an atom with a "
                    f"weight on {spec.space}. Replace it by Param:\n{self.module}"
                )
            specs_by_path.setdefault(spec.path, []).append(spec)
        return {path: shared_weight(f"at {path!r}", specs) for path, specs in specs_by_path.items()}


def _atom(param: Param) -> Module:
    if param.atom is None:
        raise ValueError(
            f"{param.describe()} has no atom, so its effect on the input is unknown: write "
            "Param(..., atom=Linear(fan_out, fan_in)) or another atom"
        )
    return dataclasses.replace(param.atom.on(param._set), mass=param.mass)


def _nest(values: dict[str, Any]) -> Any:
    """Return nested dictionaries from paths; only the value if the single path is empty."""
    if set(values) == {""}:
        return values[""]
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *above, name = path.split("/")
        node = tree
        for depth, key in enumerate(above):
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise ValueError(f"Param {path!r} is inside Param {'/'.join(above[: depth + 1])!r}")
        if name in node:
            raise ValueError(f"Param {path!r} contains other parameters")
        node[name] = value
    return tree
