"""Worst errors of manifolds, solvers and transformations over random cases.

    python -m benchmarks reliability    # some minutes; docs/benchmarks/results/reliability.json

Hypothesis draws the cases. Every answer is measured in float64 by matrix decompositions, at the
set's nearest point to the given point. A case that breaks a bound of `LIMITS` is shrunk and
printed.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from tqdm import tqdm

from benchmarks._bounds import attack_network, drifted
from benchmarks._gradients import GRADIENT_FAMILIES, gradient_sequence
from benchmarks._harness import command
from benchmarks._minima import MISS, REACH, check_minimum, excesses
from benchmarks._sets import clear_of_edges, most, normal_at, size_of, unit_of
from manifoldmuon import optim
from manifoldmuon.bounds import matrix_bounds
from manifoldmuon.manifolds import (
    EmbeddingRows,
    Euclidean,
    Grassmann,
    Hypersphere,
    Manifold,
    Orthogonal,
    SpectralBall,
    SpectralBand,
    SpectralSphere,
    Stiefel,
    low_rank,
)
from manifoldmuon.manifolds.solvers import DualAscent, ProjectedPolar, Resolvents
from manifoldmuon.norms import FanRatio, Frobenius, MaxAbs, MaxRowNorm, Spectral
from studies.program import parse, save

MATRICES = {
    "Stiefel": Stiefel(),
    "Stiefel, ProjectedPolar()": Stiefel(solver=ProjectedPolar()),
    "Stiefel, Resolvents()": Stiefel(FanRatio(), solver=Resolvents()),
    "Stiefel, DualAscent()": Stiefel(solver=DualAscent()),
    "Stiefel, Frobenius steps": Stiefel(2.0, step_norm=Frobenius(scale=2.0)),
    "Orthogonal": Orthogonal(3.0),
    "Grassmann": Grassmann(FanRatio()),
    "Grassmann, steps of TwoTap": Grassmann(step_norm=Spectral(scale=0.5)),
    "SpectralSphere": SpectralSphere(8.0),
    "SpectralBall": SpectralBall(3.0),
    "SpectralBand": SpectralBand(0.5, 2.0),
    "Hypersphere, spectral steps": Hypersphere(3.0, ndim=2, step_norm=Spectral()),
    "EmbeddingRows, spectral steps": EmbeddingRows(step_norm=Spectral()),
    "SpectralBall, Frobenius steps": SpectralBall(2.0, step_norm=Frobenius()),
    "SpectralBand, Frobenius steps": SpectralBand(0.5, 2.0, step_norm=Frobenius()),
    "SpectralBall, steps by entries": SpectralBall(step_norm=MaxAbs()),
    "SpectralBand, steps by rows": SpectralBand(0.5, 2.0, step_norm=MaxRowNorm(threshold=0.0)),
    "Grassmann, for training": Grassmann().for_training(),
    "SpectralSphere, for training": SpectralSphere(8.0).for_training(),
    "Hypersphere, for training": Hypersphere(3.0, ndim=2, step_norm=Spectral()).for_training(),
    "EmbeddingRows, for training": EmbeddingRows(step_norm=Spectral()).for_training(),
}
ROWS = {"Hypersphere": Hypersphere(2.0), "EmbeddingRows": EmbeddingRows()}
# Batches of matrices: tall, wide, square, single row.
SHAPES = ((3, 7, 4), (2, 3, 9), (2, 5, 5), (2, 1, 6))
DTYPES = ("float32", "bfloat16", "float16", "float64")
# Limits for float32. 16-bit dtypes use their eps if it is larger; float64 multiplies limits by
# `OF_FLOAT64`. The residual is the length of the normal part.
LIMITS = {
    "gap under the true one": 1e-6,
    "norm above 1": 1e-5,
    "residual": 1e-5,
    "descent": 1e-7,
    "distance from the set": 4e-6,
}
# Larger limits of the residual.
RESIDUALS = {
    # Inverse roots magnify the normal part that rounding leaves in low-rank gradients.
    "Stiefel, ProjectedPolar()": 1e-3,
    "Stiefel, Resolvents()": 1e-4,
}
OF_FLOAT64 = 1e-2


SEEDS = st.integers(0, 2**31)


class Case(NamedTuple):
    """Stack of gradients on a manifold, most of them almost normal to it.

    A case is a few numbers, which Hypothesis can shrink; the seed draws the arrays.

    Attributes:
      manifold: name of the manifold.
      shape: shape of the stack, including its leading axes (at least 1).
      dtype: dtype of the arrays.
      scale: power of two that multiplies the gradient, clipped to float16's range for float16.
      share: power of two that multiplies the free part, next to a normal part of largest entry 1;
        0: no normal part.
      decay: decades over which the columns of the free part fall.
      kind: `"normal"`, `"inward"` (negated normal part), `"low rank"` (free part of rank 1),
        `"zero"`, `"NaN"` or `"infinite"`.
      seed: seed of every random array.
    """

    manifold: str
    shape: tuple[int, ...]
    dtype: str
    scale: int
    share: int
    decay: float
    kind: str
    seed: int

    def gradient(
        self, rng: np.random.Generator, normal: Callable[[np.ndarray], np.ndarray]
    ) -> np.ndarray:
        """Draw the gradient in float64; `normal` projects arrays of `shape` onto normal spaces."""
        *batch, m, n = self.shape
        if self.kind in ("zero", "NaN", "infinite"):
            grad = np.zeros(self.shape)
            grad[..., 0, 0] = {"zero": 0, "NaN": np.nan, "infinite": np.inf}[self.kind]
            return grad
        free = rng.standard_normal(self.shape) * np.logspace(0, -self.decay, n)
        if self.kind == "low rank":
            free = rng.standard_normal((*batch, m, 1)) @ rng.standard_normal((*batch, 1, n))
        part = normal(rng.standard_normal(self.shape))
        part = -part if self.kind == "inward" else part
        largest = np.abs(part).max() or 1.0  # the interior of a set has no normal directions
        grad = part / largest * (self.share < 0) + 2.0**self.share * free
        # float16 holds numbers from 2**-24 to 2**16.
        return grad * 2.0 ** (
            np.clip(self.scale, -4, 10) if self.dtype == "float16" else self.scale
        )


def cases(manifolds=(*MATRICES, *ROWS), shapes=SHAPES, dtypes=DTYPES) -> st.SearchStrategy[Case]:
    """Return a strategy for cases with shapes that fit their manifolds."""

    def fitting(case: Case) -> Case:
        *batch, m, n = case.shape
        if case.manifold == "Orthogonal":
            m = n
        elif case.manifold.startswith("Grassmann") and m == n:
            n = n - 2
        return case._replace(shape=(*batch, m, n))

    kinds = ("normal", "normal", "inward", "inward", "low rank", "zero", "NaN", "infinite")
    return st.builds(
        Case,
        manifold=st.sampled_from(manifolds),
        shape=st.sampled_from(shapes),
        dtype=st.sampled_from(dtypes),
        scale=st.integers(-140, 120),
        share=st.integers(-24, 0),
        decay=st.floats(0, 6),
        kind=st.sampled_from(kinds),
        seed=SEEDS,
    ).map(fitting)


# Scales of the gradients of a short training: powers of two, or None for NaN.
SCALES = st.lists(st.one_of(st.none(), st.integers(-140, 60)), min_size=1, max_size=6)
# Family, period and seed of `gradient_sequence`.
SEQUENCES = st.tuples(st.sampled_from(GRADIENT_FAMILIES), st.sampled_from((1, 5, 50)), SEEDS)


@functools.partial(jax.jit, static_argnums=0)
def draw(manifold: Manifold, gaussian: Any) -> Any:
    """Project a Gaussian array onto the manifold, in the array's dtype."""
    return manifold.project(gaussian)


@functools.partial(jax.jit, static_argnums=0)
def ask(manifold: Manifold, point: Any, grad: Any) -> tuple[Any, ...]:
    """Return direction, gap, the point after a step, and its distance from the manifold."""
    answer = manifold.steepest(point, grad, manifold.init_dual(point.shape))
    moved = manifold.retract(point, -0.1 * answer.direction)
    wide = moved.astype(jnp.promote_types(moved.dtype, jnp.float32))
    return answer.direction, answer.gap, moved, manifold.distance(wide)


def check(case: Case) -> dict[str, float]:
    """Return the worst figures over a case's stack.

    Raises:
      AssertionError: a figure exceeds its limit, a zero gradient gives a step, or a NaN is lost.
    """
    manifold, dtype = (MATRICES | ROWS)[case.manifold], jnp.dtype(case.dtype)
    rng = np.random.default_rng(case.seed)
    with jax.enable_x64(dtype == np.float64):
        drawn = clear_of_edges(manifold, rng.standard_normal(case.shape))
        point = draw(manifold, drawn.astype(dtype))
        normal = functools.partial(_normal_part, case, manifold, np.asarray(point, np.float64))
        grad = case.gradient(rng, normal).astype(dtype)
        direction, gap, moved, distance = jax.tree.map(np.float64, ask(manifold, point, grad))
    found = dict.fromkeys(LIMITS, 0.0)
    exact = np.asarray(grad, np.float64)
    if not np.isfinite(exact).all():
        assert np.isnan(direction).any()
        return found
    if not exact.any():
        assert not direction.any()
        assert not gap.any()
        assert np.array_equal(moved, np.asarray(point, np.float64))
        return found
    measure = _measure_rows if case.manifold in ROWS else _measure
    for w, g, a, reported in zip(np.asarray(point, np.float64), exact, direction, gap, strict=True):
        figures = measure(manifold, w, g / np.abs(g).max(), a, reported) if g.any() else (0,) * 4
        for name, figure in zip(LIMITS, (*figures, np.max(distance)), strict=True):
            found[name] = float(np.maximum(found[name], figure))  # a NaN stays
    short = float(jnp.finfo(dtype).eps) if dtype.itemsize == 2 else 0.0
    factor = OF_FLOAT64 if dtype == np.float64 else 1.0
    _checked(found, case.manifold, factor, short, case)
    return found


def _normal_part(case: Case, manifold: Manifold, point: np.ndarray, x: np.ndarray) -> np.ndarray:
    if case.manifold in ROWS:
        return point * np.sum(point * x, -1, keepdims=True)
    return np.stack([normal_at(manifold, w)(y) for w, y in zip(point, x, strict=True)])


def _measure(manifold, point, grad, direction, reported) -> tuple[float, ...]:
    """Return true minus reported gap, norm minus 1, normal part and descent of a direction."""
    normal = normal_at(manifold, point)
    norm, left = size_of(manifold.norm, direction), normal(direction)
    feasible = direction - left
    value = np.sum(grad * feasible) / max(size_of(manifold.norm, feasible), 1)
    best = most(manifold, point, grad, normal)
    residual = np.linalg.norm(left) / unit_of(manifold.norm, grad)
    return _figures(grad, direction, best, value, reported, norm, residual)


def _measure_rows(manifold, point, grad, direction, reported) -> tuple[float, ...]:
    """Return the figures of `_measure`, row by row."""
    length = np.linalg.norm(point, axis=-1, keepdims=True)
    w, a = point / length, direction / np.median(length)
    tangent, feasible = (x - w * np.sum(w * x, -1, keepdims=True) for x in (grad, a))
    best, norm = np.linalg.norm(tangent, axis=-1), np.linalg.norm(a, axis=-1)
    value = np.sum(grad * feasible, -1) / np.maximum(norm, 1)
    if isinstance(manifold, EmbeddingRows):
        best, value = best.sum(), value.sum()
    residual = np.abs(np.sum(w * a, -1)).max()
    return _figures(grad, direction, best, value, reported, norm.max(), residual)


def _figures(grad, direction, best, value, reported, norm, residual) -> tuple[float, ...]:
    # Without a tangent part there is no gap, as on a sphere of dimension 0.
    some = best > 1e-12 * np.abs(grad).max()
    under = np.where(some, 1 - value / np.where(some, best, 1) - reported, 0)
    descent = -np.sum(grad * direction) / np.linalg.norm(grad) / max(np.linalg.norm(direction), 1)
    return float(np.max(under)), float(norm) - 1, float(residual), float(descent)


def _checked(found: dict[str, float], name: str, factor: float, least: float, what: Any) -> None:
    """Raise if a figure exceeds its limit, times a factor and at least `least`."""
    for key, figure in found.items():
        limit = RESIDUALS.get(name, LIMITS[key]) if key == "residual" else LIMITS[key]
        limit = max(factor * limit, least)
        assert figure <= limit, f"{key}: {figure:.2g} > {limit:.2g} in {what}"


# Weights of a training: manifolds and shapes.
WEIGHTS: dict[str, dict[str, tuple[Manifold, tuple[int, ...]]]] = {
    "": {
        "w": (Stiefel(), (6, 3)),
        "stack": (Orthogonal(2.0), (2, 4, 4)),
        "rows": (EmbeddingRows(), (5, 3)),
        "v": (Hypersphere(), (4,)),
    },
    ", sets": {
        "space": (Grassmann(FanRatio()), (6, 3)),
        "shifted": (MATRICES["Grassmann, steps of TwoTap"], (6, 2)),
        "sphere": (SpectralSphere(2.0), (5, 4)),
        "ball": (SpectralBall(), (5, 4)),
        "band": (SpectralBand(0.5, 2.0), (4, 4)),
        "fixed": (MATRICES["Hypersphere, spectral steps"], (4, 3)),
        "table": (MATRICES["EmbeddingRows, spectral steps"], (5, 3)),
        "up": (low_rank((6, 5), 2)["B"], (6, 2)),
        "down": (low_rank((6, 5), 2)["A"], (2, 5)),
    },
}


def _normalized_adam(geometry: Any) -> Any:
    return optim.chain(
        optim.normalize(optax.scale_by_adam(), geometry),
        optax.scale_by_learning_rate(0.1),
        optim.retract(geometry),
    )


MAKE = {
    "manifold_muon": functools.partial(optim.manifold_muon, 0.1),
    "normalized Adam": _normalized_adam,
}
LINKS = {f"{name}{of}": (name, of) for name in MAKE for of in WEIGHTS}


@functools.cache
def _training(name: str) -> tuple[Any, Any, Any]:
    make, of = LINKS[name]
    geometry = {key: on.stacked(len(shape) - on.ndim) for key, (on, shape) in WEIGHTS[of].items()}
    shapes = {k: jax.ShapeDtypeStruct(v, jnp.float32) for k, (_, v) in WEIGHTS[of].items()}
    tx = optax.apply_if_finite(MAKE[make](geometry), 100)
    params = jax.jit(lambda: optim.init_tree(geometry, jax.random.key(0), shapes))()

    @jax.jit
    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return params, state, optim.monitor_distance(geometry, params)

    return step, tx.init(params), params


def check_training(name: str, scales: list[int | None], draws: int) -> dict[str, float]:
    """Return the largest distance from the set in a run with gradients scaled by powers of two.

    None stands for a NaN gradient, which `optax.apply_if_finite` skips.
    """
    rng, worst = np.random.default_rng(draws), 0.0
    step, state, params = _training(name)
    for scale in scales:
        factor = np.nan if scale is None else 2.0**scale
        drawn = {k: factor * rng.standard_normal(x.shape) for k, x in params.items()}
        grads = {k: x.astype(np.float32) for k, x in drawn.items()}
        before = params
        params, state, distance = step(grads, state, params)
        if scale is None:
            assert all(np.array_equal(params[k], before[k]) for k in params)
        worst = float(np.max([worst, *distance.values()]))
    found = {"distance from the set": worst}
    _checked(found, name, 1.0, 0.0, f"{name}, {scales}")
    return found


# Solvers with a warm-started dual, and norm estimates with a warm-started vector.
WARM = (
    "Stiefel, DualAscent()",
    "SpectralSphere",
    "SpectralSphere, for training",
    "Hypersphere, spectral steps",
    "Hypersphere, for training",
    "EmbeddingRows, for training",
    "normalized momentum",
)
EXCESS = 0.75  # allowed excess of normalised updates over their budgets; at most 0.6 was measured


@functools.partial(jax.jit, static_argnums=0)
def walk(name: str, point: Any, grads: Any) -> tuple[Any, ...]:
    """Return points, directions and gaps along a gradient sequence with warm-started duals."""
    manifold = MATRICES.get(name, Stiefel())
    free = Euclidean(Spectral())
    tx = optim.normalize(optax.trace(0.9), free)

    def step(carry, grad):
        point, dual = carry
        if name not in MATRICES:
            direction, dual = tx.update(grad, dual, point)
            return (point, dual), (point, direction, jnp.zeros(()))
        answer = manifold.steepest(point, grad, dual)
        moved = manifold.retract(point, -0.05 * answer.direction)
        return (moved, answer.dual), (point, answer.direction, answer.gap)

    dual = manifold.init_dual(point.shape) if name in MATRICES else tx.init(point)
    return jax.lax.scan(step, (point, dual), grads)[1]


def check_switching(
    name: str, sequence: tuple[str, int, int], steps: int = 200
) -> dict[str, float]:
    """Check sparse and switching gradients over hundreds of steps; return the worst figures.

    Raises:
      AssertionError: a figure exceeds its limit, or an answer is not finite.
    """
    family, period, draws = sequence
    shape, found = (7, 4), dict.fromkeys(LIMITS, 0.0)
    grads = gradient_sequence(family, shape, steps, period, draws).astype(np.float32)
    drawn = np.random.default_rng(draws).standard_normal(shape).astype(np.float32)
    point = draw(MATRICES.get(name, Stiefel()), drawn)
    answers = [np.asarray(x, np.float64) for x in walk(name, point, grads)]
    assert all(np.isfinite(x).all() for x in answers), f"not finite: {name}, {sequence}"
    for k, (w, a, gap) in enumerate(zip(*answers, strict=True)):
        if name not in MATRICES:
            found["norm above 1"] = max(found["norm above 1"], float(np.linalg.norm(a, 2)) - 1)
        elif (k % 10 == 0 or k % period == 0) and grads[k].any():
            scaled = grads[k] / np.abs(grads[k]).max().astype(np.float64)
            figures = _measure(MATRICES[name], w, scaled, a, gap)
            for key, figure in zip(LIMITS, figures, strict=False):
                lost = _turned_by_rounding(MATRICES[name], w) if key == "residual" else 0
                found[key] = float(np.maximum(found[key], figure - lost))
    _checked(found, name, 1.0, 0.0 if name in MATRICES else EXCESS, f"{name}, {sequence}")
    return found


def _turned_by_rounding(manifold: Manifold, point: np.ndarray) -> float:
    """Return the angle by which float32 may rotate a spectral sphere's normal (Wedin's theorem).

    An error of e in a matrix rotates the top singular vectors by e over the gap to the next
    singular value. Random cases avoid near-ties, training does not.
    """
    if not isinstance(manifold, SpectralSphere):
        return 0.0
    first, second, *_ = np.linalg.svd(point, compute_uv=False)
    return 2 * float(np.finfo(np.float32).eps) * first / (first - second)


DRIFTING = ("Stiefel", "Orthogonal", "Grassmann", "SpectralSphere", "SpectralBall", "SpectralBand",
            "Hypersphere, spectral steps", *ROWS)  # fmt: skip


def check_bounds(networks: range, sets: tuple[str, ...] = DRIFTING) -> dict[str, dict[str, float]]:
    """Attack `bounds`: matrices at a distance from their sets, then random networks.

    Args:
      networks: seeds of the networks.
      sets: names of the manifolds.

    Returns:
      Largest ratios of attack to bound; for lower bounds, of bound to attack.

    Raises:
      AssertionError: a ratio exceeds 1 by more than rounding.
    """
    worst: dict[str, dict[str, float]] = {}

    def enter(table: str, shares: dict[str, float], what: str) -> None:
        for name, share in shares.items():
            assert share <= 1 + 1e-4, f"{name} is {share:.6f} of its bound: {what}"
            before = worst.setdefault(table, {})
            before[name] = max(before.get(name, 0.0), share)

    for name in sets:
        manifold = (MATRICES | ROWS)[name]
        for shape in ((4, 4),) if name == "Orthogonal" else ((7, 4), (4, 9)):
            for drift in (0.01, 0.1, 0.7):
                known = matrix_bounds(manifold, shape, drift)
                found = drifted(manifold, shape, drift)
                shares = {key: found[key] / getattr(known, key) for key in ("spectral", "row")}
                for key in ("least_singular", "least_row"):
                    if least := getattr(known, key):
                        shares[key] = least / max(found[key], 1e-30)
                enter(f"bounds, drift, {name}", shares, f"{manifold}, {shape}, drift {drift}")
    for number in networks:
        enter("bounds, networks", attack_network(number), f"random_network({number})")
    return worst


def main(argv: list[str] | None = None) -> None:
    """Draw the cases and write the worst figures; stop with the case that breaks a bound."""
    parser = command("reliability", __doc__)
    parser.add_argument("--examples", type=int, default=50, metavar="N",
                        help="cases of each manifold and dtype, and of each optimizer")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    options = parse(parser, argv)
    worst: dict[str, dict[str, float]] = {}
    counts: dict[str, int] = {}
    profile = settings(
        max_examples=options.examples,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )

    def draw_all(kind: str, table: str, check: Callable, *strategies: st.SearchStrategy) -> None:
        def enter(drawn: tuple[Any, ...]) -> None:
            counts[kind] = counts.get(kind, 0) + 1
            row = worst.setdefault(table, {})
            for name, figure in check(*drawn).items():
                row[name] = max(row.get(name, 0.0), figure)

        seed(options.seed)(profile(given(st.tuples(*strategies))(enter)))()
        # Compiled programs use many memory mappings, and Linux allows 65530.
        jax.clear_caches()

    for name in tqdm((*MATRICES, *ROWS), unit="manifold"):
        for dtype in DTYPES:
            draw_all("directions", f"{name}, {dtype}", check, cases((name,), SHAPES, (dtype,)))
    for name in LINKS:
        draw_all("runs", name, functools.partial(check_training, name), SCALES, SEEDS)
    for name in WARM:
        switch = functools.partial(check_switching, name)
        draw_all("sequences", f"{name}, switching", switch, SEQUENCES)
    worst |= check_bounds(range(options.seed, options.seed + options.examples))
    for name in tqdm(REACH, unit="descent"):
        worst[f"minima, {name}"] = check_minimum(name, seed=options.seed)
        jax.clear_caches()
    counts |= {"networks": options.examples, "descents": len(REACH)}
    missed = {name: excesses(descent, seed=options.seed) for name, descent in MISS.items()}
    for name, table in sorted(worst.items()):
        print(f"{name:45}", *(f"{figure:9.1e}" for figure in table.values()))
    record = {
        "what": "the worst figures of random cases, measured in float64",
        "limits": LIMITS,
        "limits_of_residuals": RESIDUALS,
        "limit_of_normalized_updates": 1 + EXCESS,
        "float64": OF_FLOAT64,
        "short_dtypes": "their eps, where that is larger",
        "seed": options.seed,
        "cases": counts,
        "worst": dict(sorted(worst.items())),
        "stop_above_the_minimum": missed,
    }
    save(options, record)
    print("written:", options.out)


if __name__ == "__main__":
    main()
