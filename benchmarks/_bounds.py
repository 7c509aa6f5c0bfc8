"""Attacks on bounds: gradient ascent to the inputs, weights and directions of largest change.

Outputs and derivatives come from JAX; norms are implemented here. The package contributes only the
bounds under attack.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._sets import scale_of
from manifoldmuon.bounds import L2, RMS, LInf, NormBound, OneHot, bound
from manifoldmuon.contrib import (
    Householder,
    Isospectral,
    NormPool,
    Shift,
    SpaceToDepth,
    SwapAxes,
    TwoTap,
)
from manifoldmuon.manifolds import (
    EmbeddingRows,
    Euclidean,
    Hypersphere,
    Manifold,
    SpectralBall,
    SpectralBand,
    Stiefel,
)
from manifoldmuon.modules import (
    GELU,
    Abs,
    AveragePool,
    Bias,
    Conv2D,
    Embed,
    Flatten,
    FunctionalAttention,
    GroupSort,
    Identity,
    Linear,
    MeanSubtract,
    MergeHeads,
    Module,
    Mul,
    ReLU,
    RMSDivide,
    SplitHeads,
)
from manifoldmuon.norms import ConvRMSToRMS, FanRatio, Frobenius, MaxRowNorm, Spectral

STEPS = 12


def shapes_of(net: Module) -> Any:
    """Return the shapes of the parameters."""
    return jax.eval_shape(net.init, jax.random.key(0))


def norm(size: Any, y: Any) -> Any:
    """Return the norm of `y` in the measure of `size`; for a tuple, the sum over its parts."""
    if isinstance(size, tuple):
        return sum(norm(s, part) for s, part in zip(size, y, strict=True))
    match size.norm:
        case RMS(heads):
            return jnp.max(jnp.sqrt(jnp.mean(y**2, axis=_head_axes(heads)) + 1e-30))
        case L2(axes):
            return jnp.max(jnp.sqrt(jnp.sum(y**2, axis=tuple(range(-axes, 0))) + 1e-30))
        case LInf():
            return jnp.max(jnp.abs(y))
    raise NotImplementedError(size)


def _head_axes(heads: int) -> tuple[int, ...]:
    return (-1,) if heads == 1 else (-3, -1)


def toward(size: Any, g: Any) -> Any:
    """Return the direction of norm 1 that maximises <g, d>; for a tuple, all in its best part."""
    if isinstance(size, tuple):
        ways = [toward(s, part) for s, part in zip(size, g, strict=True)]
        gains = [float(np.sum(w * np.asarray(p))) for w, p in zip(ways, g, strict=True)]
        best = int(np.argmax(gains))
        return tuple(w if i == best else 0 * w for i, w in enumerate(ways))
    g = np.asarray(g, np.float64)
    match size.norm:
        case RMS(heads):
            length = np.sqrt(np.mean(g**2, axis=_head_axes(heads), keepdims=True))
            return g / np.where(length == 0, 1, length)
        case L2(axes):
            length = np.sqrt(np.sum(g**2, axis=tuple(range(-axes, 0)), keepdims=True))
            return g / np.where(length == 0, 1, length)
        case LInf():
            return np.sign(g)
    raise NotImplementedError(size)


def inside(size: Any, x: Any) -> Any:
    """Scale the input, token by token, to the largest size allowed (see `_lengths`)."""
    if isinstance(size, tuple):
        return tuple(inside(s, part) for s, part in zip(size, x, strict=True))
    x = np.asarray(x, np.float64)
    match size.norm:
        case RMS(heads):
            length = np.sqrt(np.mean(x**2, axis=_head_axes(heads), keepdims=True))
            return x * (_lengths(size, length) / np.where(length == 0, 1, length))
        case L2(axes):
            length = np.sqrt(np.sum(x**2, axis=tuple(range(-axes, 0)), keepdims=True))
            return x * (_lengths(size, length) / np.where(length == 0, 1, length))
        case LInf():
            return np.clip(x, -size.upper, size.upper)
    raise NotImplementedError(size)


def _lengths(size: NormBound, length: np.ndarray) -> np.ndarray:
    """Return a target length per token: the largest, alternating with a declared least length."""
    turns = np.resize([size.upper, size.lower or size.upper], length.size)
    return turns.reshape(length.shape)


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


def build(size: Any, shapes: Any, seed: int, kind: int) -> Any:
    if isinstance(size, tuple):
        pairs = zip(size, shapes, strict=True)
        return tuple(build(s, shape, seed + i, kind) for i, (s, shape) in enumerate(pairs))
    return starts(seed, shapes)[kind]


def to_jax(tree: Any) -> Any:
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), tree)


def input_slope(
    function: Callable[[Any], Any], inputs: Any, outputs: Any, shapes: Any, seeds: int = 1
) -> float:
    """Return the largest derivative found by ascent over allowed inputs and directions."""
    climb = jax.jit(
        jax.value_and_grad(
            lambda x, dx: norm(outputs, jax.jvp(function, (x,), (dx,))[1]), argnums=(0, 1)
        )
    )
    worst = 0.0
    for seed in range(seeds):
        for kind in range(5):
            x = inside(inputs, build(inputs, shapes, 10 * seed, kind))
            dx = toward(inputs, build(inputs, shapes, 10 * seed + 5, (kind + seed) % 5))
            for step in range(STEPS):
                value, (gx, gdx) = climb(to_jax(x), to_jax(dx))
                worst = float(np.maximum(worst, value))  # a NaN stays
                dx = toward(inputs, gdx)
                way = toward(inputs, gx)
                x = inside(inputs, jax.tree.map(lambda a, b, s=step: a + b / (2 + s), x, way))
    return worst


def atoms(module: Module) -> list[Any]:
    """Return the atoms, in the order of the parameters' leaves."""
    found: list[Any] = []
    module.map_atoms(lambda atom: found.append(atom) or atom)
    return found


def steepest(atom: Any, g: np.ndarray) -> np.ndarray:
    """Return the step of norm 1, in the manifold's norm, that maximises <g, step>."""
    g, norm = np.asarray(g, np.float64), atom.manifold.norm
    if isinstance(norm, MaxRowNorm | Frobenius):
        ndim = 1 if isinstance(norm, MaxRowNorm) else norm.ndim
        length = np.sqrt(np.sum(g**2, axis=tuple(range(-ndim, 0)), keepdims=True))
        scale = scale_of(norm.scale, g.shape[g.ndim - ndim :])
        return scale * g / np.where(length == 0, 1, length)
    u, _, vt = np.linalg.svd(g, full_matrices=False)
    return u @ vt * _spectral_scale(norm, g.shape)


def step_size(atom: Any, step: np.ndarray) -> float:
    """Return the norm of a step, in the manifold's norm."""
    norm = atom.manifold.norm
    if isinstance(norm, MaxRowNorm | Frobenius):
        ndim = 1 if isinstance(norm, MaxRowNorm) else norm.ndim
        length = np.sqrt(np.sum(step**2, axis=tuple(range(-ndim, 0))))
        return float(np.max(length)) / scale_of(norm.scale, step.shape[step.ndim - ndim :])
    return float(np.linalg.norm(step, 2, axis=(-2, -1)).max()) / _spectral_scale(norm, step.shape)


def _spectral_scale(norm: Any, shape: tuple[int, ...]) -> float:
    if isinstance(norm, ConvRMSToRMS):
        return math.sqrt(shape[-2] / shape[-1]) / math.prod(shape[-4:-2])
    assert isinstance(norm, Spectral)
    return scale_of(norm.scale, shape[-2:])


def project(atom: Any, w: np.ndarray) -> np.ndarray:
    """Return the nearest weight on the atom's manifold, or of norm at most 1 for `Euclidean`."""
    if isinstance(atom.manifold, Stiefel | EmbeddingRows):
        return _unit_scale(atom, w)
    assert isinstance(atom.manifold, Euclidean)
    norm = atom.manifold.norm
    if isinstance(norm, MaxRowNorm):
        length = np.linalg.norm(w, axis=-1, keepdims=True) / scale_of(norm.scale, w.shape[-1:])
        return w / np.maximum(length, 1)
    if isinstance(norm, Frobenius):
        return w / max(step_size(atom, w), 1.0)
    u, s, vt = np.linalg.svd(w, full_matrices=False)
    return (u * np.minimum(s, _spectral_scale(norm, w.shape))[..., None, :]) @ vt


def _unit_scale(atom: Any, w: np.ndarray) -> np.ndarray:
    """Return the nearest point of a Stiefel manifold or of spheres."""
    scale = atom.manifold.scale
    if isinstance(atom.manifold, EmbeddingRows):
        return scale_of(scale, w.shape[-1:]) * w / np.linalg.norm(w, axis=-1, keepdims=True)
    u, _, vt = np.linalg.svd(w, full_matrices=False)
    return scale_of(scale, w.shape[-2:]) * u @ vt


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
      x: example input: gives the shape, and is the input itself when it holds integers.
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
        self.whole = isinstance(self.inputs, NormBound) and self.inputs.norm == OneHot()
        self.atoms = atoms(self.net)
        self.budgets = self.net.budgets()

        def apply(w, x):
            return self.net.apply(w, self.x if self.whole else x)

        def first(w, x, dw, dx):
            return norm(self.outputs, jax.jvp(apply, (w, x), (dw, dx))[1])

        self.largest = 0.0  # norm of the outputs seen
        self.output = jax.jit(lambda w, x: norm(self.outputs, apply(w, x)))
        self.first = jax.jit(jax.value_and_grad(first, argnums=(0, 1, 2, 3)))

    def random(self, seed: int) -> tuple[Any, Any, Any, Any]:
        rng = np.random.default_rng(seed)
        w = jax.tree.map(lambda a: rng.standard_normal(a.shape), shapes_of(self.net))
        kind = seed % 5
        start = np.zeros(()) if self.whole else starts(seed, self.x.shape)[kind]
        x = start if self.whole else inside(self.inputs, start)
        dx = x if self.whole else toward(self.inputs, starts(seed + 1, self.x.shape)[0])
        return self.on_manifolds(w), x, self.step(w), dx

    def on_manifolds(self, w: Any) -> Any:
        if self.center is not None:
            moved = jax.tree.map(lambda a, b: np.asarray(a, float) - np.asarray(b), w, self.center)
            moved = self._leaves(self._into_ball, moved)
            return jax.tree.map(lambda a, b: np.asarray(a) + b, self.center, moved)
        return self._leaves(lambda atom, leaf, _: self._near(atom, np.asarray(leaf, float)), w)

    def _into_ball(self, atom: Any, step: np.ndarray, budget: float) -> np.ndarray:
        size = step_size(atom, step)
        return step * min(1.0, self.radius * budget / size) if size else step

    def _near(self, atom: Any, w: np.ndarray) -> np.ndarray:
        if self.drift is None or not atom.manifold.constrained:
            return project(atom, w)
        return np.asarray(_pull(atom.manifold, w[None], self.drift)[1])[0]

    def step(self, g: Any) -> Any:
        """Return the steepest step of modular norm 1."""
        return self._leaves(lambda atom, leaf, b: b * steepest(atom, leaf), g)

    def _leaves(self, function: Any, tree: Any) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        budgets = jax.tree.leaves(self.budgets)
        mapped = [function(*each) for each in zip(self.atoms, leaves, budgets, strict=True)]
        return jax.tree.unflatten(structure, mapped)

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
                value, (gw, gx, gdw, gdx) = self.first(*map(to_jax, (w, x, dw, dx)))
                worst = float(np.maximum(worst, value))  # a NaN stays
                if step % 8 == 0:
                    self.largest = float(
                        np.maximum(self.largest, self.output(*map(to_jax, (w, x))))
                    )
                dw, rate = self.step(gdw), 1 / (1 + 0.3 * step)
                if not self.whole:
                    dx = toward(self.inputs, gdx)
                    x = inside(self.inputs, x + rate * toward(self.inputs, gx))
                if free:
                    way = self._leaves(lambda atom, g, _: steepest(atom, g), gw)
                    moved = jax.tree.map(lambda a, b, r=rate: np.asarray(a) + r * b, w, way)
                    w = self.on_manifolds(moved)
        return worst


def tokens(seed: int, net: Module, *shape: int) -> jax.Array:
    """Draw integers for a network that starts with an embedding."""
    vocabulary = next(atom.vocabulary for atom in atoms(net) if isinstance(atom, Embed))
    return jnp.asarray(np.random.default_rng(seed).integers(vocabulary, size=shape))


def random_network(seed: int) -> tuple[Module, tuple[int, ...], NormBound]:
    """Draw a network of compatible modules, its input shape, and the declared input size."""
    rng = np.random.default_rng(seed)
    shape: tuple[int, ...] = (1, 4, 4, 4) if rng.random() < 0.4 else (2, 4, 6)
    axes, at = len(shape) - 1, shape
    net: Module = Identity()

    def linear(m: int, n: int) -> Module:
        values = tuple(np.linspace(1.5, 0.5, min(m, n)).tolist())
        manifolds = [
            Stiefel(FanRatio()),
            Euclidean(Spectral(scale=FanRatio())),
            SpectralBall(FanRatio()),
            SpectralBand(0.5, 1.5),
            Isospectral(values),
            Hypersphere(FanRatio(), ndim=2),
            EmbeddingRows(0.5),
        ]
        return Linear(m, n, manifolds[rng.integers(len(manifolds))])

    for _ in range(int(rng.integers(1, 5))):
        d, m = at[-1], int(rng.choice([4, 6]))
        half = rng.choice([-2, -3]) if axes == 3 and len(at) == 4 else -2
        heads = SplitHeads(2)
        bonds = (Abs(), ReLU(), math.sqrt(2) * ReLU(), GELU(), GroupSort(2), Mul(1.5))
        kinds: list[tuple[Module, tuple[int, ...]]] = [(bond, at) for bond in bonds]
        kinds += [*2 * [(MeanSubtract(), at)], (RMSDivide(), at)]
        kinds += 4 * [(linear(m, d), (*at[:-1], m))]
        kinds += [(Bias(d), at), (Householder(d), at), (TwoTap(d, d // 2, int(half)), at)]
        kinds += [(0.5 * Identity() + 0.5 * (linear(d, d) @ Abs()), at), (SwapAxes(), _swapped(at))]
        if len(at) == 4 and at[1] % 2 == at[2] % 2 == 0 and d < 8:
            small = (at[0], at[1] // 2, at[2] // 2)
            kinds += [(NormPool(2), (*small, d)), (SpaceToDepth(2), (*small, 4 * d))]
            kinds += [(AveragePool(*small[1:]), (*small, d)), (Shift(), at)]
            kinds += [(Conv2D(m, d, 2), (*at[:-1], m)), (Flatten(3), (at[0], math.prod(at[1:])))]
        if len(at) == 3:
            split = [heads @ linear(d, d) for _ in range(3)]
            kinds += [(MergeHeads() @ FunctionalAttention() @ tuple(split), at)]
        part, after = kinds[rng.integers(len(kinds))]
        if len(after) > 1:
            net, at = part @ net, after
    measure = RMS() if rng.random() < 0.5 else L2(axes)
    least = float(rng.choice([0.0, 0.8]))
    return net, shape, NormBound(1.5, least, measure, shape[-1])


def _swapped(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2])


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


def _largest_singular(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    u, s, vt = np.linalg.svd(w, full_matrices=False)
    return s[..., 0], u[..., :, :1] * vt[..., :1, :]


def _smallest_singular(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    u, s, vt = np.linalg.svd(w, full_matrices=False)
    return s[..., -1], u[..., :, -1:] * vt[..., -1:, :]


def _row(which: Any, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    length = np.linalg.norm(w, axis=-1)
    at = np.arange(w.shape[-2]) == which(length, axis=-1)[..., None]
    unit = w / np.where(length == 0, 1, length)[..., None]
    return np.sum(length * at, axis=-1), unit * at[..., None]


# Fields of `MatrixBounds`: functions from a matrix to the figure and its gradient.
FIGURES = {
    "spectral": _largest_singular,
    "row": functools.partial(_row, np.argmax),
    "least_singular": _smallest_singular,
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
