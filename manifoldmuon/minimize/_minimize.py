"""`minimize`: the counterpart of `scipy.optimize.minimize` on a tree of manifolds."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.flatten_util import ravel_pytree
from jaxtyping import Array

from manifoldmuon._internal.arguments import check_number, shown
from manifoldmuon._internal.compiling import compiler_options
from manifoldmuon._internal.matrices.arrays import largest, nonzero_or_one
from manifoldmuon._internal.trees.paths import flatten_with_path, path_string
from manifoldmuon.manifolds import LaidOut, SpectralSphere
from manifoldmuon.minimize._auto import Auto
from manifoldmuon.minimize._problem import RUNNING, Method, Problem, Progress, Reason, Result, Stop
from manifoldmuon.optim import Geometry, map_leaves, monitor_distance, resolve_geometry

_DTYPES = jnp.dtype(jnp.float32), jnp.dtype(jnp.float64)


def minimize(
    f: Callable[..., Any],
    geometry: Geometry,
    x0: Any,
    args: tuple[Any, ...] = (),
    *,
    method: Method = Auto(),
    tolerance: float | None = None,
    max_steps: int = 1000,
    callback: Callable[[Any, Any, Any], None] | None = None,
) -> Result:
    """Minimise a cost over a tree of manifolds, to convergence, in one compiled program.

    A tree is a product of manifolds; leading axes of a leaf are copies of its manifold. Gradients
    use the embedded (Euclidean) metric, whatever the manifolds' `step_norm`. Works inside of
    `jax.jit` and under `jax.vmap`, over many starts or many problems. Compiles once for each f,
    geometry, method, set of options and shapes: pass changing values as `args`, since values
    captured by f are frozen at the first call. On CPUs, small problems outside of `jax.jit` compile
    at low effort, in a third of the time; later calls may take four times as long as inside.

    The minimum can be differentiated with respect to `args` and to values captured by f, in forward
    and reverse mode, by the implicit function theorem: conjugate gradients solve a linear system
    with the Riemannian Hessian. The point has to be a minimum, to the tolerance. If the Hessian is
    singular (the minimum is not isolated), the derivative has least norm. Derivatives with respect
    to x0 are zero.

    Args:
      f: the cost `f(x, *args)`, a real number. Differentiable; twice for `TrustRegion` and for
        derivatives of the minimum.
      geometry: manifold of each leaf of x0, without boundary or corners; see
        `optim.resolve_geometry`.
      x0: the start: arrays on their manifolds, all float32 or all float64.
      args: further arguments of f, arrays or trees of arrays.
      method: `Auto()`, `LBFGS()` or `TrustRegion()`.
      tolerance: largest Frobenius norm of the Riemannian gradient. None: the first gradient's norm
        times 1e-10 in float64. In float32, and where the first cost hides this, the run ends where
        rounding hides progress: neither cost nor gradient falls, and the gradient is at most 1e-4
        (float64: 1e-10) of the first, or 100 eps times the first cost. A start within the tolerance
        stops with no step: `GRADIENT`.
      max_steps: stop after this many steps.
      callback: called as `callback(steps, value, gradient_norm)` at the start and after every step,
        such as `print`.

    Returns:
      A `Result`: point, value, gradient norm, steps, evaluations, and the `Reason`.

    Raises:
      ValueError: geometry and x0 do not fit; x0 is empty; a set with a boundary or corners; a
        tolerance below rounding; x0 off its manifold; a cost or gradient that is not finite at x0.
        Inside of `jax.jit` and `jax.vmap` the last two are a `Reason`.

    Examples:
      >>> a = jnp.diag(jnp.array([3.0, 2.0, 1.0]))
      >>> start = mm.manifolds.Hypersphere().project(jnp.ones(3))
      >>> found = minimize(lambda x: x @ a @ x, mm.manifolds.Hypersphere(), start)
      >>> print(f"{found.value:.4f}", Reason(int(found.reason)).name)
      1.0000 GRADIENT
    """
    if not isinstance(args, tuple):
        raise TypeError(f"minimize: args must be a tuple, such as (a,); got {shown(args)}")
    entries = resolve_geometry(geometry, x0)
    dtype = _check_leaves(entries, x0)
    leaves, treedef = jax.tree.flatten(entries)
    tolerance = _check_numbers(dtype, tolerance, max_steps)
    if not isinstance(method, Method):
        raise TypeError(
            f"minimize: method must be Auto(), LBFGS() or TrustRegion(); got {shown(method)}"
        )
    stop = Stop(tolerance, max_steps, callback)
    solve = functools.partial(_solve_compiled, f, (tuple(leaves), treedef), args)
    result: Any = None
    progress = None
    for stage, limit in method.stages(stop):
        result, progress = solve(stage, limit, x0 if result is None else result.point, progress)
        progress = progress.resumed(stop)
        # A later stage is compiled only if it runs, or if tracing hides whether it does.
        if not isinstance(progress.reason, Tracer) and progress.reason != RUNNING:
            break
    if not isinstance(result.reason, Tracer):
        _refuse(result, entries, x0)
    return result


def _solve_compiled(
    f: Callable[..., Any],
    manifolds: Any,
    args: Any,
    method: Method,
    stop: Stop,
    start: Any,
    progress: Progress | None,
) -> tuple[Result, Progress]:
    """Compile and run a method, at low effort where that takes less time in all."""
    arrays = jax.tree.map(jnp.asarray, (jax.tree.leaves(start), args))
    # Only a program that is not part of another program takes options.
    inside = any(isinstance(x, Tracer) for x in (jnp.zeros(()), *jax.tree.leaves(arrays)))
    options = {} if inside else compiler_options(arrays, steps=stop.max_steps)
    if options:
        # JAX refuses options where f captures values that are differentiated or mapped.
        with contextlib.suppress(ValueError):
            return _compiled(**options)(f, manifolds, method, stop, start, args, progress)
    return _compiled()(f, manifolds, method, stop, start, args, progress)


def _check_leaves(entries: Any, x0: Any) -> Any:
    pairs, treedef = flatten_with_path(x0)
    leaves = [leaf for _, leaf in pairs]
    if not any(map(jnp.size, leaves)):
        raise ValueError("minimize: x0 has no numbers; give it a nonempty array")
    dtypes = {jnp.result_type(leaf) for leaf in leaves}
    if len(dtypes) > 1 or (dtype := dtypes.pop()) not in _DTYPES:
        names = sorted({str(jnp.result_type(leaf)) for leaf in leaves})
        raise TypeError(f"minimize: x0 must be all float32 or all float64; got {', '.join(names)}")
    for (path, _), entry in zip(pairs, treedef.flatten_up_to(entries), strict=True):
        if entry is None:
            raise ValueError(
                f"minimize: the geometry leaves {path_string(path)!r} out (None); write Euclidean()"
                " for an unconstrained array, or pass a constant in args"
            )
        manifold = entry.manifold if isinstance(entry, LaidOut) else entry
        if isinstance(manifold, SpectralSphere):
            raise ValueError(
                f"minimize: {manifold!r} is not supported: its minima are at corners, with equal"
                " singular values and a nonzero gradient; use optim.manifold_muon, or a smooth"
                " manifold"
            )
        if manifold.has_boundary:
            raise ValueError(
                f"minimize: {manifold!r} has a boundary, where minima have nonzero gradients; use"
                " optim.manifold_muon, or a manifold without boundary"
            )
    return dtype


def _check_numbers(dtype: Any, tolerance: float | None, max_steps: int) -> float | None:
    check_number("minimize: max_steps", max_steps, within="[0, inf)", whole=True)
    if tolerance is None:
        return None
    check_number("minimize: tolerance", tolerance, within="[0, inf)", others=" or None")
    if tolerance < (eps := float(jnp.finfo(dtype).eps)):
        hint = "jax.enable_x64(True) and a float64 x0, or " if dtype == jnp.float32 else ""
        raise ValueError(
            f"minimize: tolerance={tolerance:g} is below the rounding of {dtype}, {eps:.1e}; use"
            f" {hint}None, the default, which is relative to the first gradient"
        )
    return float(tolerance)


def _refuse(result: Result, entries: Any, x0: Any) -> None:
    """Raise if x0 is off its manifolds, or its cost or gradient is not finite."""
    if result.reason == Reason.OFF_SET and result.steps == 0:
        far = [
            f"distance {v:.2g}" + (f" at {k!r}" if k else "")
            for k, v in monitor_distance(entries, x0).items()
            if v > OFF
        ]
        raise ValueError(
            f"minimize: x0 is off its manifolds: {', '.join(far)} (at most {OFF:g} is allowed)."
            " Start from optim.project_tree(geometry, x0), the nearest points"
        )
    if result.reason == Reason.NOT_FINITE and result.steps == 0:
        raise ValueError(
            f"minimize: f(x0) is {result.value}, with a gradient of norm {result.gradient_norm};"
            " start where both are finite"
        )


@functools.cache
def _compiled(**options: Any) -> Callable[..., tuple[Result, Progress]]:
    return jax.jit(_run_method, static_argnums=(0, 1, 2, 3), compiler_options=options)


def _run_method(
    f: Callable[..., Any],
    manifolds: Any,
    method: Method,
    stop: Stop,
    x0: Any,
    args: Any,
    progress: Progress | None,
) -> tuple[Result, Progress]:
    entries, treedef = manifolds
    geometry = treedef.unflatten(entries)
    start, unravel = ravel_pytree(x0)

    def of_vector(x: Array, *args: Any) -> Array:
        value = f(unravel(x), *args)
        if not jax.tree_util.all_leaves([value]):
            raise TypeError(f"minimize: f must return a real number; got {type(value).__name__}")
        if jnp.shape(value) != () or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
            raise TypeError(f"minimize: f must return a real number; got {jax.typeof(value)}")
        return jnp.asarray(value, x.dtype)

    # Captured values become arguments, so that derivatives with respect to them exist.
    cost, captured = jax.closure_convert(of_vector, start, *args)

    def problem(data: Any) -> Problem:
        return Problem(lambda x: cost(x, *data), unravel, geometry)

    @jax.custom_jvp
    def run(start: Array, data: Any, progress: Progress) -> tuple[Result, Progress]:
        off = _largest_distance(geometry, unravel(start)) > OFF
        reason = jnp.where(off, jnp.int32(Reason.OFF_SET), progress.reason)
        point, last = method.run(problem(data), start, stop, progress._replace(reason=reason))
        # A retraction may keep or amplify a point's distance from its set.
        off_set = _largest_distance(geometry, unravel(point)) > OFF
        last = last._replace(reason=jnp.where(off_set, jnp.int32(Reason.OFF_SET), last.reason))
        value, norm = (x / last.scale for x in (last.value, last.norm))
        return Result(point, value, norm, last.steps, last.evaluations, last.reason), last

    @run.defjvp
    def run_jvp(primals: Any, tangents: Any) -> Any:
        (start, data, progress), (_, changed, _) = primals, tangents
        result, last = run(start, data, progress)
        tangent, value = _implicit(problem, result.point, data, changed)
        zeros = jax.tree.map(_zero_tangent, (result, last))
        return (result, last), (zeros[0]._replace(point=tangent, value=value), zeros[1])

    if progress is None:
        progress = Progress.at_start(start.dtype)
    result, progress = run(start, (*args, *captured), progress)
    return result._replace(point=unravel(result.point)), progress


def _zero_tangent(x: Array) -> Any:
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.zeros_like(x)
    return np.zeros(jnp.shape(x), jax.dtypes.float0)


def _implicit(problem: Callable[[Any], Problem], point: Array, data: Any, changed: Any) -> Any:
    """Return the derivatives of minimum and value along a change of the data.

    By the implicit function theorem, Hess[dx] = -d(gradient) where the gradient is zero. Conjugate
    gradients solve this in the tangent space, with the identity on the normal space.
    """
    at = problem(data)
    _, rhs = jax.jvp(lambda data: problem(data).gradient(point)[0], (data,), (changed,))
    off_set, hessian = jax.linearize(lambda x: at.gradient(x)[0], point)
    # A gradient that is not quite zero leaves this much curvature where there is none.
    noise = 8 * jnp.linalg.norm(off_set) / nonzero_or_one(jnp.linalg.norm(point))
    solve = functools.partial(_conjugate_gradients, jax.lax.stop_gradient(noise))

    def operator(vector: Array) -> Array:
        tangent = at.project(point, vector)
        return at.project(point, hessian(tangent)) + vector - tangent

    tangent = jax.lax.custom_linear_solve(operator, -rhs, solve, symmetric=True)
    _, value = jax.jvp(lambda x, data: problem(data).cost(x), (point, data), (tangent, changed))
    return tangent, value


def _conjugate_gradients(noise: Array, operator: Callable[[Array], Array], rhs: Array) -> Array:
    """Return the solution of least norm of a positive semidefinite system.

    Steps stay in the range of the operator. They end where the curvature is noise or rounding:
    along directions in which the minimum is not isolated, a step would divide noise by noise. For
    the same reason the residual is not reduced below the noise.
    """
    eps = float(jnp.finfo(rhs.dtype).eps)

    def turn(carry: Any) -> Any:
        x, residual, direction, square, largest, count, _ = carry
        product = operator(direction)
        bend, size = jnp.vdot(direction, product), jnp.vdot(direction, direction)
        largest = jnp.maximum(largest, bend / nonzero_or_one(size))
        flat = ~(bend > jnp.maximum(eps ** (2 / 3) * largest, noise) * size)
        share = jnp.where(flat, 0, square / nonzero_or_one(bend))
        x, residual = x + share * direction, residual - share * product
        new = jnp.vdot(residual, residual)
        direction = residual + new / nonzero_or_one(square) * direction
        least = jnp.maximum(10 * eps, noise / nonzero_or_one(largest))
        done = flat | ~(new > least**2 * whole) | (count >= 2 * rhs.size)
        return x, residual, direction, new, largest, count + 1, done

    whole = jnp.vdot(rhs, rhs)
    zero, number = jnp.zeros_like(rhs), jnp.zeros_like(whole)
    start = zero, rhs, rhs, whole, number, jnp.zeros((), jnp.int32), ~(whole > 0)
    # A NaN on the right-hand side gives NaN.
    return jnp.where(whole >= 0, jax.lax.while_loop(lambda c: ~c[-1], turn, start)[0], jnp.nan)


OFF = 1e-5
"""Largest distance of a point from its manifold."""


def _largest_distance(geometry: Any, tree: Any) -> Array:
    """Return the largest distance of a leaf from its manifold."""

    @jax.custom_batching.custom_vmap
    def one(tree: Any) -> Array:
        measure = lambda manifold, point, _: (None, manifold.distance(point))  # noqa: E731
        _, distances = map_leaves(measure, geometry, tree, tree, name="minimize")
        return jnp.max(jnp.stack([largest(x) for x in distances.values()]))

    @one.def_vmap
    def many(size: int, batched: Any, tree: Any) -> tuple[Array, bool]:
        # Sequential: see `_internal.matrices.lapack`.
        return jax.lax.map(one, tree), True

    return one(tree)
