"""Attacks on bounds: gradient ascent to the inputs, weights and directions of largest change.

Outputs and derivatives come from JAX; norms are implemented here. The package contributes only the
bounds under attack.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from manifoldmuon import contrib, modules
from manifoldmuon.bounds import L2, RMS, LInf, NormBound, bound
from manifoldmuon.manifolds import (
    EmbeddingRows,
    Euclidean,
    Hypersphere,
    Manifold,
    SpectralBall,
    SpectralBand,
    Stiefel,
)
from manifoldmuon.modules import Linear, Module
from manifoldmuon.norms import ConvRMSToRMS, FanRatio, Frobenius, MaxRowNorm, Spectral
from tests.oracles.sets import scale_of

STEPS = 12


def shapes_of(net: Module) -> Any:
    """Return the shapes of the parameters."""
    return jax.eval_shape(net.init, jax.random.key(0))


def _squares(measure: Any, x: Any) -> Any:
    """Return squared RMS or L2 norms, per token, with kept axes."""
    if isinstance(measure, RMS):
        return (x**2).mean(axis=(-1,) if measure.heads == 1 else (-3, -1), keepdims=True)
    assert isinstance(measure, L2)
    return (x**2).sum(axis=tuple(range(-measure.axes, 0)), keepdims=True)


def _divided(x: np.ndarray, length: np.ndarray) -> np.ndarray:
    return x / np.where(length == 0, 1, length)


def norm(size: Any, y: Any) -> Any:
    """Return the norm of `y` in the measure of `size`; for a tuple, the sum over its parts."""
    if isinstance(size, tuple):
        return sum(norm(s, part) for s, part in zip(size, y, strict=True))
    if size.norm == LInf():
        return jnp.max(jnp.abs(y))
    return jnp.max(jnp.sqrt(_squares(size.norm, y) + 1e-30))


def toward(size: Any, g: Any) -> Any:
    """Return the direction of norm 1 that maximises <g, d>; for a tuple, all in its best part."""
    if isinstance(size, tuple):
        ways = [toward(s, part) for s, part in zip(size, g, strict=True)]
        gains = [float(np.sum(w * np.asarray(p))) for w, p in zip(ways, g, strict=True)]
        return tuple(w * (i == np.argmax(gains)) for i, w in enumerate(ways))
    g = np.asarray(g, np.float64)
    if size.norm == LInf():
        return np.sign(g)
    return _divided(g, np.sqrt(_squares(size.norm, g)))


def inside(size: Any, x: Any) -> Any:
    """Scale the input, token by token, to the largest size allowed.

    With a declared least length, tokens alternate between both.
    """
    if isinstance(size, tuple):
        return tuple(inside(s, part) for s, part in zip(size, x, strict=True))
    x = np.asarray(x, np.float64)
    if size.norm == LInf():
        return np.clip(x, -size.upper, size.upper)
    length = np.sqrt(_squares(size.norm, x))
    turns = np.resize([size.upper, size.lower or size.upper], length.size)
    return _divided(x, length) * turns.reshape(length.shape)


def starts(seed: int, shape: tuple[int, ...]) -> list[np.ndarray]:
    """Return starts: random, positive, constant, spiked, and nonzero only in the first half."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    spike = np.zeros(shape)
    # Tokens have different spikes, so that heads disagree on which token is large.
    flat = spike.reshape(-1, shape[-1])
    flat[np.arange(len(flat)), np.arange(len(flat)) % shape[-1]] = 1
    half = x * (np.arange(shape[-1]) < max(shape[-1] // 2, 1))
    return [x, np.abs(x) + 0.1, np.ones(shape), spike, half]


def to_jax(tree: Any) -> Any:
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), tree)


def atoms(module: Module) -> list[Any]:
    """Return the atoms, in the order of the parameters' leaves."""
    found: list[Any] = []
    module.map_atoms(lambda atom: found.append(atom) or atom)
    return found


def _lengths(norm: Any, x: np.ndarray) -> np.ndarray:
    """Return the lengths of rows or whole weights, in units of a row or Frobenius norm."""
    ndim = 1 if isinstance(norm, MaxRowNorm) else norm.ndim
    length = np.sqrt(np.sum(x**2, axis=tuple(range(-ndim, 0)), keepdims=True))
    return length / scale_of(norm.scale, x.shape[x.ndim - ndim :])


def _spectral_scale(norm: Any, shape: tuple[int, ...]) -> float:
    if isinstance(norm, ConvRMSToRMS):
        return math.sqrt(shape[-2] / shape[-1]) / math.prod(shape[-4:-2])
    assert isinstance(norm, Spectral)
    return scale_of(norm.scale, shape[-2:])


def steepest(atom: Any, g: np.ndarray) -> np.ndarray:
    """Return the step of norm 1, in the manifold's norm, that maximises <g, step>."""
    g, norm = np.asarray(g, np.float64), atom.manifold.norm
    if isinstance(norm, MaxRowNorm | Frobenius):
        return _divided(g, _lengths(norm, g))
    u, _, vt = np.linalg.svd(g, full_matrices=False)
    return u @ vt * _spectral_scale(norm, g.shape)


def step_size(atom: Any, step: np.ndarray) -> float:
    """Return the norm of a step, in the manifold's norm."""
    norm = atom.manifold.norm
    if isinstance(norm, MaxRowNorm | Frobenius):
        return float(np.max(_lengths(norm, step)))
    return float(np.linalg.norm(step, 2, axis=(-2, -1)).max()) / _spectral_scale(norm, step.shape)


def project(atom: Any, w: np.ndarray) -> np.ndarray:
    """Return the nearest weight on the atom's manifold, or of norm at most 1 for `Euclidean`."""
    manifold, norm = atom.manifold, atom.manifold.norm
    if isinstance(manifold, EmbeddingRows):
        scale = scale_of(manifold.scale, w.shape[-1:])
        return scale * w / np.linalg.norm(w, axis=-1, keepdims=True)
    if isinstance(norm, MaxRowNorm | Frobenius) and isinstance(manifold, Euclidean):
        return w / np.maximum(_lengths(norm, w), 1)
    u, s, vt = np.linalg.svd(w, full_matrices=False)
    if isinstance(manifold, Stiefel):
        return scale_of(manifold.scale, w.shape[-2:]) * u @ vt
    assert isinstance(manifold, Euclidean)
    return (u * np.minimum(s, _spectral_scale(norm, w.shape))[..., None, :]) @ vt


def weights_of(net: Module, seed: int = 0) -> Any:
    """Draw random weights on the manifolds in NumPy: compiling `init` would be slower."""
    rng = np.random.default_rng(seed)
    leaves, structure = jax.tree.flatten(shapes_of(net))
    pairs = zip(atoms(net), leaves, strict=True)
    points = [project(atom, rng.standard_normal(leaf.shape)) for atom, leaf in pairs]
    return to_jax(jax.tree.unflatten(structure, points))


@dataclasses.dataclass
class Attack:
    """Ascent over weights, inputs and directions of a network; compiled once.

    Attributes:
      net: the network.
      inputs: size of the network's input.
      outputs: size of its output, which selects the norm.
      x: example input, which gives the shape.
      drift: how far the weights may be from their manifolds; used instead of exact projection.
      center: center of a ball of weights; None for all weights on the manifolds.
      radius: radius of the ball, in the modular norm.
    """

    net: Module
    inputs: Any
    outputs: Any
    x: Any
    drift: float | None = None
    center: Any = None
    radius: float = 0.0

    def __post_init__(self):
        self.atoms, self.budgets = atoms(self.net), jax.tree.leaves(self.net.budgets())
        self.largest = 0.0  # norm of the outputs seen

        def slope(w, x, dw, dx):
            return norm(self.outputs, jax.jvp(self.net.apply, (w, x), (dw, dx))[1])

        self.output = jax.jit(lambda w, x: norm(self.outputs, self.net.apply(w, x)))
        self.slope = jax.jit(jax.value_and_grad(slope, argnums=(0, 1, 2, 3)))

    def random(self, seed: int) -> tuple[Any, Any, Any, Any]:
        """Draw weights, an input, and steps of both."""
        rng = np.random.default_rng(seed)
        w = jax.tree.map(lambda a: rng.standard_normal(a.shape), shapes_of(self.net))
        x = inside(self.inputs, starts(seed, self.x.shape)[seed % 5])
        dx = toward(self.inputs, starts(seed + 1, self.x.shape)[0])
        return self.allowed(w), x, self.step(w), dx

    def allowed(self, w: Any) -> Any:
        """Return the nearest allowed weights."""
        if self.center is None:
            return self._leaves(lambda atom, leaf, _: self._near(atom, np.asarray(leaf, float)), w)

        def into_ball(atom: Any, step: np.ndarray, budget: float) -> np.ndarray:
            size = step_size(atom, step)
            return step * min(1.0, self.radius * budget / size) if size else step

        moved = jax.tree.map(lambda a, b: np.asarray(a, float) - b, w, self.center)
        return jax.tree.map(np.add, self.center, self._leaves(into_ball, moved))

    def _near(self, atom: Any, w: np.ndarray) -> np.ndarray:
        if self.drift is None or not atom.manifold.constrained:
            return project(atom, w)
        return np.asarray(_pull(atom.manifold, w[None], self.drift)[1])[0]

    def step(self, g: Any) -> Any:
        """Return the steepest step of modular norm 1."""
        return self._leaves(lambda atom, leaf, budget: budget * steepest(atom, leaf), g)

    def _leaves(self, function: Any, tree: Any) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        mapped = map(function, self.atoms, leaves, self.budgets)
        return jax.tree.unflatten(structure, list(mapped))

    def climb(self, seeds: int, *, weights: bool, free: bool, params: Any = None) -> float:
        """Return the largest slope found, in the weights or in the input.

        Args:
          seeds: number of starts.
          weights: whether to perturb the weights; otherwise the input.
          free: whether to optimise the weights as well, within their set; otherwise fix them.
          params: starting weights; None for random.
        """
        worst = 0.0
        for seed in range(seeds):
            w, x, dw, dx = self.random(seed)
            w = w if params is None else params
            for step in range(2 * STEPS):
                dw = dw if weights else jax.tree.map(np.zeros_like, dw)
                dx = np.zeros_like(dx) if weights else dx
                value, (gw, gx, gdw, gdx) = self.slope(*map(to_jax, (w, x, dw, dx)))
                worst = float(np.maximum(worst, value))  # a NaN stays
                if step % 8 == 0:
                    found = self.output(to_jax(w), to_jax(x))
                    self.largest = float(np.maximum(self.largest, found))
                rate = 1 / (1 + 0.3 * step)
                dw, dx = self.step(gdw), toward(self.inputs, gdx)
                x = inside(self.inputs, x + rate * toward(self.inputs, gx))
                if free:
                    way = self._leaves(lambda atom, g, _: steepest(atom, g), gw)
                    w = self.allowed(jax.tree.map(lambda a, b, r=rate: a + r * b, w, way))
        return worst


def random_network(seed: int) -> tuple[Module, tuple[int, ...], NormBound]:
    """Draw a network of compatible modules, its input shape, and the declared input size."""
    rng = np.random.default_rng(seed)
    shape: tuple[int, ...] = (1, 4, 4, 4) if rng.random() < 0.4 else (2, 4, 6)
    axes, at = len(shape) - 1, shape
    net: Module = modules.Identity()

    def linear(m: int, n: int) -> Module:
        manifolds = [
            Stiefel(FanRatio()),
            Euclidean(Spectral(scale=FanRatio())),
            SpectralBall(FanRatio()),
            SpectralBand(0.5, 1.5),
            Hypersphere(FanRatio(), ndim=2),
            EmbeddingRows(0.5),
        ]
        return Linear(m, n, manifolds[rng.integers(len(manifolds))])

    for _ in range(int(rng.integers(1, 5))):
        d, m = at[-1], int(rng.choice([4, 6]))
        half = rng.choice([-2, -3]) if axes == 3 and len(at) == 4 else -2
        first = [modules.Abs(), modules.ReLU(), math.sqrt(2) * modules.ReLU(), modules.GELU()]
        first += [modules.GroupSort(2), modules.Mul(1.5), modules.MeanSubtract()]
        first += [modules.MeanSubtract(), modules.RMSDivide()]
        kinds: list[tuple[Module, tuple[int, ...]]] = [(module, at) for module in first]
        kinds += 4 * [(linear(m, d), (*at[:-1], m))]
        block = 0.5 * modules.Identity() + 0.5 * (linear(d, d) @ modules.Abs())
        atoms = [modules.Bias(d), contrib.TwoTap(d, d // 2, int(half))]
        kinds += [(module, at) for module in (*atoms, block)]
        if len(at) == 4 and at[1] % 2 == at[2] % 2 == 0 and d < 8:
            small = (at[0], at[1] // 2, at[2] // 2)
            kinds += [
                (contrib.SpaceToDepth(2), (*small, 4 * d)),
                (modules.AveragePool(*small[1:]), (*small, d)),
                (contrib.Shift(), at),
                (modules.Conv2D(m, d, 2), (*at[:-1], m)),
                (modules.Flatten(3), (at[0], math.prod(at[1:]))),
            ]
        if len(at) == 3:
            split = [modules.SplitHeads(2) @ linear(d, d) for _ in range(3)]
            kinds += [(modules.MergeHeads() @ modules.FunctionalAttention() @ tuple(split), at)]
        part, after = kinds[rng.integers(len(kinds))]
        if len(after) > 1:
            net, at = part @ net, after
    measure = RMS() if rng.random() < 0.5 else L2(axes)
    least = float(rng.choice([0.0, 0.8]))
    return net, shape, NormBound(1.5, least, measure, shape[-1])


def attack_network(seed: int, starts: int = 2) -> dict[str, float]:
    """Attack the bounds of a random network; return the slopes found over their bounds.

    Covers the slopes in input and weights and the largest output, both for all weights within a
    drift and for weights in a ball. A ratio above 1 breaks a bound. Empty if the network has no
    bounds.
    """
    net, shape, size = random_network(seed)
    try:
        bound(net, input_norm=size)
    except ValueError:  # the network has a norm without known bound
        return {}
    rng, found = np.random.default_rng(seed), {}
    center = jax.tree.map(lambda a: rng.standard_normal(a.shape) / 2, shapes_of(net))
    for how, given in (("drift", {"drift": 0.1}), ("radius", {"radius": 0.3})):
        params = center if how == "radius" else None
        known = bound(net, params, input_norm=size, **given)
        attack = Attack(net, size, known.outputs, jnp.zeros(shape), center=params, **given)
        slopes = (("inputs", known.lipschitz_inputs), ("weights", known.lipschitz_weights))
        for name, most in slopes:
            moving = name == "weights"
            if 0 < most < math.inf and (not moving or jax.tree.leaves(center)):
                worst = attack.climb(starts, weights=moving, free=True)
                found[f"{how}, {name}"] = worst / most
        found[f"{how}, output"] = attack.largest / known.output_norm
    return found


def _singular(at: int, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a singular value and its gradient."""
    u, s, vt = np.linalg.svd(w, full_matrices=False)
    return s[..., at], u[..., :, at, None] * vt[..., at, None, :]


def _row(which: Any, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the length of a row and its gradient."""
    length = np.linalg.norm(w, axis=-1)
    at = np.arange(w.shape[-2]) == which(length, axis=-1)[..., None]
    return np.sum(length * at, axis=-1), _divided(w, length[..., None]) * at[..., None]


# Fields of `MatrixBounds`: functions from a matrix to the figure and its gradient.
FIGURES = {
    "spectral": functools.partial(_singular, 0),
    "row": functools.partial(_row, np.argmax),
    "least_singular": functools.partial(_singular, -1),
    "least_row": functools.partial(_row, np.argmin),
}


@functools.partial(jax.jit, static_argnums=0)
def _pull(manifold: Manifold, w: Any, drift: float) -> tuple[Any, Any]:
    """Move each matrix towards its projection until `Manifold.distance` is at most `drift`."""
    on = manifold.project(w)
    shares = jnp.linspace(0, 1, 101).reshape(-1, 1, 1, 1)
    line = on + shares * (w - on)
    distance = manifold.distance(line)
    distance = jnp.max(distance.reshape(*line.shape[:2], -1), axis=-1)
    last = jnp.max(jnp.where(distance <= drift, jnp.arange(101)[:, None], 0), axis=0)
    return on, line[last, jnp.arange(len(w))]


def drifted(
    manifold: Manifold, shape: tuple[int, int], drift: float, seed: int = 0
) -> dict[str, float]:
    """Return the most extreme figures found among matrices within `drift` of a manifold.

    Ascends the gradient of each figure from random and patterned matrices. After each step, moves
    the matrix towards its projection until `Manifold.distance` is at most `drift`.
    """
    rng, (m, n) = np.random.default_rng(seed), shape
    signs = np.outer(np.resize([1.0, -1.0], m), np.resize([1.0, -1.0], n))
    starts = np.concatenate([signs[None], np.eye(m, n)[None], rng.standard_normal((10, m, n))])
    found = {}
    with jax.enable_x64(True):
        on, _ = _pull(manifold, starts, drift)
        size = np.linalg.norm(on, 2, axis=(-2, -1)).max()
        for name, figure in FIGURES.items():
            sign = -1 if name.startswith("least") else 1
            w, best = on + size * starts, -np.inf
            for step in range(3 * STEPS):
                w = np.asarray(_pull(manifold, w, drift)[1])
                values, gradient = figure(w)
                best = float(np.maximum(best, np.max(sign * values)))
                w = w + sign * size * max(drift, 1e-3) * (4 / (1 + 0.3 * step)) * gradient
            found[name] = sign * best
    return found
