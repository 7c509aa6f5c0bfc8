"""A manifold that checks what goes in and what comes out, while it is used."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from manifoldmuon._internal.arguments import check_kind, check_number
from manifoldmuon._internal.arrays import (
    frobenius_norm,
    largest,
    nonzero_or_one,
    upcast,
)
from manifoldmuon.manifolds import Manifold
from manifoldmuon.manifolds.solvers import Steepest
from manifoldmuon.norms import Norm
from manifoldmuon.testing._assertions import require

_CHECKS = {
    "project.result": "is on the set",
    "project_tangent.point": "is on the set",
    "project_tangent.result": "is tangent",
    "steepest.point": "is on the set",
    "steepest.direction": "is tangent",
    "steepest.norm": "is at most 1",
    "retract.point": "is on the set",
    "retract.vector": "is tangent",
    "retract.result": "is on the set",
    "random_point.result": "is on the set",
}


@dataclasses.dataclass(frozen=True)
class Validated(Manifold):
    """A manifold that checks its arguments and results at every call, for debugging.

    It takes the place of the manifold in a geometry, in `minimize` or in your own loop, and finds
    which call broke which law first: a point that has left the set, an update that is not tangent,
    a NaN. (`check_manifold` asks whether a manifold keeps the laws at all.) Checks run on the host,
    by `jax.debug.callback`, and call eigenvalue routines: they are slow.

    A broken law raises `AssertionError`; inside of `jax.jit` and `jax.vmap` it is the
    `jax.errors.JaxRuntimeError` of the callback, with the same text, when the result is waited for.

    Attributes:
      manifold: what is checked.
      exempt: names of checks that are left out: `project.result`, `project_tangent.point`,
        `project_tangent.result`, `steepest.point`, `steepest.direction`, `steepest.norm`,
        `retract.point`, `retract.vector`, `retract.result`, `random_point.result`. Exempt
        `steepest.norm` for a method of msign that overshoots, and the points where training starts
        off the set.
      tolerance: of distances from the set, and of what is not tangent relative to the vector (a
        hundred roundings of the point are free); None: the root of the dtype's rounding.

    Raises:
      TypeError: `manifold` is none.
      ValueError: a name in `exempt` is no check; `tolerance` is negative.

    Examples:
      >>> sphere = Validated(mm.manifolds.Hypersphere(), exempt=("retract.vector",))
      >>> moved = sphere.retract(jnp.array([1.0, 0.0]), jnp.array([3.0, 3.0]))
      >>> [round(x, 4) for x in moved.tolist()]
      [0.8, 0.6]
    """

    manifold: Manifold
    exempt: tuple[str, ...] = ()
    tolerance: float | None = None

    def __post_init__(self):
        check_kind(self, "manifold", Manifold)
        if unknown := [name for name in self.exempt if name not in _CHECKS]:
            raise ValueError(f"Validated.exempt: no checks {unknown}; there are {list(_CHECKS)}")
        if self.tolerance is not None:
            check_number("Validated.tolerance", self.tolerance, within="[0, inf)")

    @property
    def ndim(self) -> int:
        return self.manifold.ndim

    @property
    def norm(self) -> Norm:
        return self.manifold.norm

    @property
    def constrained(self) -> bool:
        return self.manifold.constrained

    @property
    def has_boundary(self) -> bool:
        return self.manifold.has_boundary

    def check_shape(self, shape: tuple[int, ...]) -> None:
        self.manifold.check_shape(shape)

    def fast(self) -> "Validated":
        return dataclasses.replace(self, manifold=self.manifold.fast())

    def project(self, point: Float[Array, "..."]) -> Float[Array, "..."]:
        found = self.manifold.project(point)
        self._on_the_set("project.result", found)
        return found

    def project_tangent(
        self, point: Float[Array, "..."], vector: Float[Array, "..."]
    ) -> Float[Array, "..."]:
        self._on_the_set("project_tangent.point", point)
        found = self.manifold.project_tangent(point, vector)
        self._tangent("project_tangent.result", point, found)
        return found

    def init_dual(self, shape: tuple[int, ...]) -> Any:
        return self.manifold.init_dual(shape)

    def steepest(
        self, point: Float[Array, "..."], grad: Float[Array, "..."], dual: Any = ()
    ) -> Steepest:
        self._on_the_set("steepest.point", point)
        found = self.manifold.steepest(point, grad, dual)
        # The point moves against it: at the boundary of a set that matters.
        self._tangent("steepest.direction", point, -found.direction)
        self._at_most("steepest.norm", self.norm.norm(found.direction) - 1, point)
        return found

    def retract(
        self, point: Float[Array, "..."], vector: Float[Array, "..."]
    ) -> Float[Array, "..."]:
        self._on_the_set("retract.point", point)
        self._tangent("retract.vector", point, vector)
        found = self.manifold.retract(point, vector)
        self._on_the_set("retract.result", found)
        return found

    def random_point(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype) -> Float[Array, "..."]:
        found = self.manifold.random_point(key, shape, dtype)
        self._on_the_set("random_point.result", found)
        return found

    def distance(self, point: Float[Array, "..."]) -> Float[Array, "..."]:
        return self.manifold.distance(point)

    def _on_the_set(self, name: str, point: Float[Array, "..."]) -> None:
        if name not in self.exempt:
            self._at_most(name, self.distance(jax.lax.stop_gradient(point)), point)

    def _tangent(self, name: str, point: Float[Array, "..."], vector: Float[Array, "..."]) -> None:
        if name in self.exempt:
            return
        point, vector = jax.lax.stop_gradient((upcast(point), upcast(vector)))
        left = frobenius_norm(vector - self.manifold.project_tangent(point, vector), self.ndim)
        # A short vector may be the difference of long ones: that much is rounding.
        noise = 100 * jnp.finfo(left.dtype).eps * frobenius_norm(point, self.ndim)
        length = nonzero_or_one(frobenius_norm(vector, self.ndim))
        self._at_most(name, jnp.maximum(left - noise, 0) / length, point)

    def _at_most(self, name: str, excess: Float[Array, "..."], example: Array) -> None:
        """Raise where an excess is above the tolerance for the example's dtype, or NaN."""
        if name in self.exempt:
            return
        tolerance = self.tolerance
        if tolerance is None:
            tolerance = float(jnp.finfo(example.dtype).eps) ** 0.5
        law = f"{type(self.manifold).__name__}: {name} {_CHECKS[name]}"

        def check(worst: Any) -> None:
            require(law, bool(worst <= tolerance), f"{np.asarray(worst):.3g} > {tolerance:.3g}")

        worst = largest(jax.lax.stop_gradient(upcast(excess)), initial=-jnp.inf)
        jax.debug.callback(check, worst)
