"""Descent in balls and bands to known minima; a part of `python -m benchmarks reliability`.

Descends with a decaying learning rate from random starts inside the set and on its boundary. The
excess is the loss above the minimum, divided by the nuclear norm of the gradient at the minimum if
that exceeds 1: roughly a distance in singular values.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from manifoldmuon import optim
from manifoldmuon.manifolds import SpectralBall, SpectralBand
from manifoldmuon.manifolds.retractions import SoftCap
from manifoldmuon.norms import Frobenius, MaxAbs, MaxRowNorm

SHAPE = (6, 4)
LAST = 2.5e-4  # the last learning rate
SETS: dict[str, Any] = {"SpectralBall": SpectralBall(), "SpectralBand": SpectralBand(0.5, 2.0)}
INVARIANT = {"Spectral": None, "Frobenius": Frobenius()}
NORMS = INVARIANT | {"MaxAbs": MaxAbs(), "MaxRowNorm": MaxRowNorm(threshold=0.0)}


class Descent(NamedTuple):
    """Manifold, first learning rate and constructor of the optimizer."""

    manifold: Any
    first: float
    make: Callable[[Any, Any], Any]


def normalized(geometry: Any, rate: Any, *base: Any) -> Any:
    """Return a chain with `normalize`."""
    update = optim.normalize(optax.chain(*base), geometry)
    return optim.chain(update, optax.scale_by_learning_rate(rate), optim.retract(geometry))


# Optimizers, as functions of a manifold and a learning rate.
MAKE: dict[str, Callable[[Any, Any], Any]] = {
    "manifold_muon": lambda g, r: optim.manifold_muon(r, g),
    "no momentum": lambda g, r: optim.manifold_muon(r, g, None),
    "projected gradients": lambda g, r: optim.manifold_muon(r, g, clip=optim.project_tangent(g)),
    "riemannian_sgd": lambda g, r: optim.riemannian_sgd(r, g),
    "riemannian_sgd, momentum": lambda g, r: optim.riemannian_sgd(r, g, 0.9),
    "riemannian_adam": lambda g, r: optim.riemannian_adam(r, g),
    "normalize": lambda g, r: normalized(g, r, optax.identity()),
    "Adam of gradients": lambda g, r: normalized(g, r, optax.scale_by_adam()),
    "Adam of projected gradients": lambda g, r: normalized(
        g, r, optim.project_tangent(g), optax.scale_by_adam()
    ),
}


def _descents() -> tuple[dict[str, Descent], dict[str, Descent]]:
    """Return the descents that reach minima, and the descents that stop elsewhere."""
    reach, miss = {}, {}

    def enter(table: dict, name: str, manifold: Any, first: float, make: str) -> None:
        table[name] = Descent(manifold, first, MAKE[make])

    for name, manifold in SETS.items():
        # Rates must fall below the tolerance if steps do not follow singular vectors.
        wide = dataclasses.replace(manifold, active_tolerance=1e-2)
        for norm, step_norm in NORMS.items():
            full = dataclasses.replace(manifold if norm in INVARIANT else wide, step_norm=step_norm)
            flat = dataclasses.replace(full, solver=None)
            adam = dataclasses.replace(wide, step_norm=step_norm)
            steps, first = f"{name}, {norm} steps", 0.3 if norm == "Frobenius" else 0.1
            projected = f"{steps}, solver=None, projected gradients"
            enter(reach, f"{steps}, manifold_muon", full, first, "manifold_muon")
            enter(reach, projected, flat, first, "projected gradients")
            enter(reach, f"{steps}, normalize", full, first, "normalize")
            key = "Adam of projected gradients"
            enter(reach, f"{steps}, normalize, {key}", adam, first, key)
            safe = norm == "Frobenius" or (name == "SpectralBall" and norm == "Spectral")
            # The normal part counts in the length, so that tangent steps are short.
            first = 1.0 if norm == "Frobenius" else 0.1
            enter(reach if safe else miss, f"{steps}, solver=None", flat, first, "no momentum")
        for key, which, first in (
            ("riemannian_sgd", manifold, 0.5),
            ("riemannian_sgd, momentum", manifold, 0.1),
            ("riemannian_adam", wide, 0.1),
        ):
            enter(reach, f"{name}, {key}", which, first, key)
        key = "Adam of gradients"
        enter(miss, f"{name}, normalize, {key}", manifold, 0.1, key)
    name, capped = "SpectralBall, SoftCap", SpectralBall(retraction=SoftCap(), solver=None)
    enter(reach, f"{name}, Spectral steps, solver=None", capped, 0.1, "no momentum")
    enter(miss, f"{name}, riemannian_sgd", capped, 0.3, "riemannian_sgd")
    return reach, miss


REACH, MISS = _descents()


def loss(xp: Any, w: Any, d: dict[str, Any]) -> Any:
    """Return `||M (W - A)||^2 / 2 + <C, W> + ||W X - Y||^2 / 2`, with M applied elementwise."""
    squares, errors = (d["M"] * (w - d["A"])) ** 2, (w @ d["X"] - d["Y"]) ** 2
    return xp.sum(squares / 2 + d["C"] * w, (-2, -1)) + xp.sum(errors / 2, (-2, -1))


def gradient(w: Any, d: dict[str, Any]) -> Any:
    """Return the gradient of `loss`."""
    errors = w @ d["X"] - d["Y"]
    return d["M"] ** 2 * (w - d["A"]) + d["C"] + errors @ np.swapaxes(d["X"], -1, -2)


def clipped(x: np.ndarray, low: float, high: float) -> np.ndarray:
    """Project matrices to singular values between `low` and `high`."""
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    return (u * np.clip(s, low, high)[..., None, :]) @ vt


def costs(low: float, rng: np.random.Generator) -> tuple[list[str], dict[str, np.ndarray]]:
    """Draw stacked costs with minima inside the set, on faces and at vertices."""

    def matrix(*values: float) -> np.ndarray:
        m, n = SHAPE
        left = np.linalg.qr(rng.standard_normal((m, n)))[0]
        return (left * values) @ np.linalg.qr(rng.standard_normal((n, n)))[0]

    none = {key: np.zeros(SHAPE) for key in "MAC"} | {"X": np.zeros((4, 9)), "Y": np.zeros((6, 9))}
    inside = (1.8, 1.2, 0.9, 0.7) if low else (0.8, 0.6, 0.4, 0.2)
    face, vertex = (3.0, 1.5, 0.8, 0.1), (5.0, 4.0, *((0.2, 0.1) if low else (3.0, 2.5)))
    minima = {"inside": inside, "face": face, "vertex": vertex}
    found = {f"nearest, {k}": {"M": np.ones(SHAPE), "A": matrix(*v)} for k, v in minima.items()}
    found["linear, vertex"] = {"C": matrix(2.0, 1.0, 0.6, 0.3)}
    if not low:  # convex
        found |= {
            f"weighted, {k}": {"M": rng.uniform(0.5, 1.5, SHAPE), "A": matrix(*v)}
            for k, v in minima.items()
        }
        x = np.linalg.qr(rng.standard_normal((9, 4)))[0].T * rng.uniform(0.7, 1.3, (4, 1))
        y = matrix(*face) @ x + 0.1 * rng.standard_normal((6, 9))
        found |= {"regression, face": {"X": x, "Y": y}, "linear, face": {"C": matrix(2, 1, 0, 0)}}
    return list(found), {k: np.stack([(none | cost)[k] for cost in found.values()]) for k in none}


def minimizers(low: float, high: float, d: dict[str, np.ndarray]) -> np.ndarray:
    """Compute minimizers by projected gradient, or in closed form in a band (not convex)."""
    if low:
        u, _, vt = np.linalg.svd(d["C"], full_matrices=False)
        linear = (d["C"] != 0).any((-2, -1), keepdims=True)
        return np.where(linear, -high * u @ vt, clipped(d["A"], low, high))
    w = np.zeros_like(d["A"])
    for _ in range(2000):
        w = clipped(w - gradient(w, d) / 2.5, 0, high)
    return w


@functools.cache
def _problems(low: float, high: float, seed: int, starts: int) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    names, data = costs(low, rng)
    best = minimizers(low, high, data)
    sizes = np.linalg.svd(gradient(best, data), compute_uv=False).sum(-1)
    drawn = rng.standard_normal((len(names) * starts, *SHAPE))
    drawn[::2] *= 0.3 * high  # the other starts touch the boundary
    repeated = {key: np.repeat(x, starts, 0) for key, x in data.items()}
    start = clipped(drawn, low, high).astype(np.float32)
    return names, repeated, loss(np, best, data), np.maximum(sizes, 1), start


def excesses(
    descent: Descent, last: float = LAST, steps: int = 600, seed: int = 0, starts: int = 2
) -> dict[str, float]:
    """Return the largest excess of each cost over its starts.

    Args:
      descent: descent on a ball or band of scale 1.
      last: last learning rate, after exponential decay.
      steps: number of steps.
      seed: seed of costs and starts.
      starts: number of starts per cost.
    """
    manifold, first, make = descent
    names, data, least, sizes, start = _problems(manifold.low, manifold.high, seed, starts)
    tx = make(manifold.stacked(), optax.exponential_decay(first, steps, last / first))
    single = {key: jnp.asarray(x, jnp.float32) for key, x in data.items()}

    @jax.jit
    def run(w):
        def step(carry, _):
            w, state = carry
            updates, state = tx.update(gradient(w, single), state, w)
            return (optax.apply_updates(w, updates), state), None

        return jax.lax.scan(step, (w, tx.init(w)), length=steps)[0][0]

    found = loss(np, np.asarray(run(jnp.asarray(start)), np.float64), data)
    excess = (found.reshape(len(names), starts) - least[:, None]).max(1) / sizes
    return dict(zip(names, map(float, excess), strict=True))


def check_minimum(name: str, **options: Any) -> dict[str, float]:
    """Return the excesses of a descent in `REACH`; see `excesses` for options.

    Singular values oscillate by the learning rate, and stop short of the boundary by the tolerance.

    Raises:
      AssertionError: an excess is more than twice the sum of the last rate and the tolerance.
    """
    found = excesses(REACH[name], **options)
    most = 2 * (options.get("last", LAST) + REACH[name].manifold.active_tolerance)
    for cost, excess in found.items():
        assert excess <= most, f"{cost}: excess {excess:.2g} > {most:.2g} with {name}"
    return found
