"""Short trainings, warm starts and bounds, measured in float64 or attacked."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import strategies as st

from manifoldmuon import manifolds, optim
from manifoldmuon.bounds import matrix_bounds
from manifoldmuon.norms import FanRatio, Spectral
from tests.oracles.bounds import attack_network, drifted
from tests.oracles.cases import LIMITS, MATRICES, ROWS, SEEDS, check_limits, draw, measure_direction
from tests.oracles.gradients import GRADIENT_FAMILIES, gradient_sequence

# Scales of the gradients of a short training: powers of two, or None for NaN.
SCALES = st.lists(st.one_of(st.none(), st.integers(-140, 60)), min_size=1, max_size=6)
# Family, period and seed of `gradient_sequence`.
SEQUENCES = st.tuples(st.sampled_from(GRADIENT_FAMILIES), st.sampled_from((1, 5, 50)), SEEDS)

# Weights of a training: manifolds and shapes.
WEIGHTS: dict[str, dict[str, tuple[manifolds.Manifold, tuple[int, ...]]]] = {
    "": {
        "w": (manifolds.Stiefel(), (6, 3)),
        "stack": (manifolds.Orthogonal(2.0), (2, 4, 4)),
        "rows": (manifolds.EmbeddingRows(), (5, 3)),
        "v": (manifolds.Hypersphere(), (4,)),
    },
    ", sets": {
        "space": (manifolds.Grassmann(FanRatio()), (6, 3)),
        "shifted": (MATRICES["Grassmann, steps of TwoTap"], (6, 2)),
        "sphere": (manifolds.SpectralSphere(2.0), (5, 4)),
        "ball": (manifolds.SpectralBall(), (5, 4)),
        "band": (manifolds.SpectralBand(0.5, 2.0), (4, 4)),
        "fixed": (MATRICES["Hypersphere, spectral steps"], (4, 3)),
        "table": (MATRICES["EmbeddingRows, spectral steps"], (5, 3)),
        "up": (manifolds.low_rank((6, 5), 2)["B"], (6, 2)),
        "down": (manifolds.low_rank((6, 5), 2)["A"], (2, 5)),
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
    check_limits(found, name, 1.0, 0.0, f"{name}, {scales}")
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
    manifold = MATRICES.get(name, manifolds.Stiefel())
    free = manifolds.Euclidean(Spectral())
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
    point = draw(MATRICES.get(name, manifolds.Stiefel()), drawn)
    answers = [np.asarray(x, np.float64) for x in walk(name, point, grads)]
    assert all(np.isfinite(x).all() for x in answers), f"not finite: {name}, {sequence}"
    for k, (w, a, gap) in enumerate(zip(*answers, strict=True)):
        if name not in MATRICES:
            found["norm above 1"] = max(found["norm above 1"], float(np.linalg.norm(a, 2)) - 1)
        elif (k % 10 == 0 or k % period == 0) and grads[k].any():
            scaled = grads[k] / np.abs(grads[k]).max().astype(np.float64)
            figures = measure_direction(MATRICES[name], w, scaled, a, gap)
            for key, figure in zip(LIMITS, figures, strict=False):
                lost = _turned_by_rounding(MATRICES[name], w) if key == "residual" else 0
                found[key] = float(np.maximum(found[key], figure - lost))
    check_limits(found, name, 1.0, 0.0 if name in MATRICES else EXCESS, f"{name}, {sequence}")
    return found


def _turned_by_rounding(manifold: manifolds.Manifold, point: np.ndarray) -> float:
    """Return the angle by which float32 may rotate a spectral sphere's normal (Wedin's theorem).

    An error of e in a matrix rotates the top singular vectors by e over the gap to the next
    singular value. Random cases avoid near-ties, training does not.
    """
    if not isinstance(manifold, manifolds.SpectralSphere):
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
