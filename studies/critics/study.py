"""Wasserstein critics: laws, evaluation, settings and table."""

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from manifoldmuon.bounds import L2, NormBound, bound
from manifoldmuon.modules import Bias, GroupSort, Linear, Module, ReLU
from studies.display import COLOURS, dress, panels, text_table
from studies.estimates import estimate, half_width, shown
from studies.study import Cell, Record, Row, Study, check_choices, check_rival, option

OURS = "manifold Muon"
MEASURED = "fraction", "raw", "proved", "found", "milliseconds"

SAMPLES, ROUNDS, KEPT = 2**15, 20, 128
"""Pairs of the optimal coupling in an evaluation; rounds of the search for the steepest point, and
the points that it keeps."""

Points = Float[Array, "n d"]


class Problem(NamedTuple):
    """A law of x and an optimal coupling, `x -> factor * x + offset * ones / sqrt(d)`.

    The coupling bounds the distance from above. Potentials of slope 1 gain the length of each pair:
    `sum(x) / sqrt(d)`, `|x|`, and for tori the sum of the blocks' lengths over `sqrt(d / 2)`.

    Attributes:
      tori: whether x is uniform on a product of unit circles instead of standard normal.
      factor: stretches x.
      offset: the length of the shift.
    """

    tori: bool = False
    factor: float = 1.0
    offset: float = 0.0

    def pairs(self, key: Any, count: int, dim: int) -> tuple[Points, Points]:
        """Draw points, and their images under the coupling."""
        x = jax.random.normal(key, (count, dim))
        blocks = x.reshape(count, -1, 2)
        circles = blocks / jnp.linalg.norm(blocks, axis=-1, keepdims=True)
        x = jnp.where(self.tori, circles.reshape(x.shape), x)
        return x, self.factor * x + self.offset / math.sqrt(dim)


PROBLEMS = {
    "shift": Problem(offset=2.0), "scale": Problem(factor=2.0), "tori": Problem(True, 2.0),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to keep a critic Lipschitz; `studies.critics.networks` has its layer and its optimizer.

    Attributes:
      log2_rate: log2 of the middle rate of the grid.
      activation: between layers.
      penalty: weight of the gradient penalty; a method with penalty proves no bound.
    """

    log2_rate: int
    activation: Any = GroupSort(2)
    penalty: float = 0.0


METHODS = {
    OURS: Method(-4),
    "Björck": Method(-6),
    "spectral norm": Method(-8, ReLU()),
    "spectral norm, MaxMin": Method(-8),
    "gradient penalty": Method(-8, ReLU(), penalty=10.0),
}


def network(activation: Module, layers: Any) -> tuple[Module, Any]:
    """Return a trained critic as a module of the library, and its weights."""
    parts: list[tuple[Module, Any]] = []
    for kernel, bias in layers:
        parts += [(Linear(*kernel.shape), kernel), (Bias(len(bias)), bias), (activation, ())]
    parts = parts[:-1]
    net = functools.reduce(lambda inner, outer: outer @ inner, [part for part, _ in parts])
    return net, tuple(weight for _, weight in parts)


@functools.partial(jax.jit, static_argnums=0)
def _evaluate(net: Module, params: Any, problem: Problem, key: Any) -> Any:
    """Return gains and lengths of the pairs of the coupling, and the largest slope of a search.

    The search draws points on segments between samples of both laws, ends included, half of them
    between pairs of the coupling. Then it perturbs the steepest points by less and less.
    """

    def critic(z: Any) -> Any:
        return net.apply(params, z)[..., 0]

    dim, (draw, order, between, *rounds) = params[0].shape[-1], jax.random.split(key, 3 + ROUNDS)
    x, y = problem.pairs(draw, SAMPLES, dim)
    slopes = jax.vmap(lambda z: jnp.linalg.norm(jax.grad(critic)(z)))
    at = jnp.clip(jax.random.uniform(between, (SAMPLES, 1), minval=-0.2, maxval=1.2), 0, 1)
    ends = jnp.where(jnp.arange(SAMPLES)[:, None] % 2, y, jax.random.permutation(order, y))
    points = x + at * (ends - x)
    found = slopes(points)
    for count, own in enumerate(rounds):
        best = points[jax.lax.top_k(found, KEPT)[1]]
        size = 0.5 * 0.8**count / math.sqrt(dim)
        noise = size * jax.random.normal(own, (SAMPLES // KEPT // 16, *best.shape))
        points = jnp.concatenate([best, (best + noise).reshape(-1, dim)])
        found = slopes(points)
    return critic(y) - critic(x), jnp.linalg.norm(y - x, axis=-1), found.max()


def measure(method: Method, layers: Any, problem: Problem, key: Any) -> dict[str, float]:
    """Measure a trained critic.

    The fraction is a ratio over the same pairs of the optimal coupling: no sampling error lifts it
    above 1 if the Lipschitz constant holds.
    """
    net, params = network(method.activation, layers)
    gains, lengths, slope = _evaluate(net, params, problem, key)
    bounds, found = bound(net, params, input_norm=NormBound(math.inf, norm=L2())), float(slope)
    raw = float(np.asarray(gains, np.float64).mean() / np.asarray(lengths, np.float64).mean())
    proved = bounds.lipschitz_inputs
    fraction = raw / (found if method.penalty else proved)
    return {"fraction": fraction, "raw": raw, "proved": proved, "found": found}


@functools.lru_cache(maxsize=1)
def _tuned(name: str, problem: str, seed: int, octaves: tuple[int, ...], *sizes: Any) -> Any:
    """Return the best rate of the grid for a seed, and the fraction at each rate."""
    rates = [2.0 ** (METHODS[name].log2_rate + octave) for octave in octaves]
    tried = [_trained(name, problem, seed, rate, *sizes)["fraction"] for rate in rates]
    best = np.nanargmax(np.where(np.isfinite(tried), tried, -1.0))
    return rates[best], {"rates": rates, "fractions": tried}


def _trained(name: str, problem: str, seed: int, rate: float, *sizes: Any) -> dict[str, float]:
    from studies.critics.networks import training  # needs Flax

    program, chosen = training(name, *sizes), PROBLEMS[problem]
    clock = time.process_time()
    layers = jax.block_until_ready(program(seed, rate, chosen))
    seconds = time.process_time() - clock
    found = measure(METHODS[name], layers, chosen, jax.random.fold_in(jax.random.key(2), seed))
    return {**found, "milliseconds": 1e3 * seconds / sizes[1]}


@dataclasses.dataclass(frozen=True)
class Critics(Study):
    """How much of a known Wasserstein-1 distance does a Lipschitz critic attain?

    `shift`: two normal laws with means 2 apart. `scale`: a standard normal vector and its
    double. `tori`: products of circles of radius 1 and 2. A critic f, a network with three hidden
    layers, ascends E f(y) - E f(x) on fresh samples; all start from orthonormal kernels, and all
    rates fall linearly to zero. The fraction is this gain over Lipschitz constant and distance,
    measured on pairs of the optimal coupling: at most 1 if the constant is proved. The constant is
    the product of the largest singular values in float64; for the gradient penalty, which proves
    none, the largest slope that a search finds. The first seed chooses one of five rates for each
    problem and dimension; the others count, paired by seed. Times are processor time.
    """

    name: ClassVar[str] = "critics"
    traced: ClassVar[tuple[str, ...]] = ("seed", "problem")

    # fmt: off
    problems: tuple[str, ...] = option(
        tuple(PROBLEMS), "pairs of distributions", choices=tuple(PROBLEMS))
    dims: tuple[int, ...] = option((2, 8, 64), "dimensions, even")
    methods: tuple[str, ...] = option(
        tuple(METHODS), f"methods, {OURS!r} among them", choices=tuple(METHODS))
    seeds: tuple[int, ...] = option((0, 1, 2, 3, 4, 5), "seeds; the first tunes")
    octaves: tuple[int, ...] = option(
        (-4, -2, 0, 2, 4), "rates to try, in octaves from each method's own")
    steps: int = option(600, "steps of each training")
    batch: int = option(128, "fresh samples of each distribution per step")
    width: int = option(64, "width of the three hidden layers; at least twice the dimension")
    # fmt: on

    def __post_init__(self):
        check_choices(self)
        check_rival(OURS, self.methods, self.seeds)
        least = min(*self.dims, self.width, 2 * self.steps, 2 * self.batch, 2 * len(self.octaves))
        if least < 2 or any(size % 2 for size in (*self.dims, self.width)):
            raise ValueError(
                f"dims and width must be even; steps, batch and octaves at least 1; got {self}"
            )

    def cells(self) -> Sequence[Cell]:
        names = "dim", "method", "problem", "seed"
        places = itertools.product(self.dims, self.methods, self.problems, self.seeds[1:])
        return [dict(zip(names, place, strict=True)) for place in places]

    def timed(self, cell: Cell) -> bool:
        del cell
        return True

    def run(self, cell: Cell) -> Mapping[str, Any]:
        name, problem = cell["method"], cell["problem"]
        sizes = (cell["dim"], *[max(self.width, 2 * cell["dim"])] * 3), self.steps, self.batch
        rate, tried = _tuned(name, problem, self.seeds[0], self.octaves, *sizes)
        return {"rate": rate, "tried": tried, **_trained(name, problem, cell["seed"], rate, *sizes)}

    def summarise(self, rows: Sequence[Row]) -> Mapping[str, Any]:
        found: dict[str, Any] = {}
        for problem, dim, name in itertools.product(self.problems, self.dims, self.methods):
            own, ours = (
                [row for row in rows if (row["problem"], row["dim"], row["method"]) == place]
                for place in ((problem, dim, name), (problem, dim, OURS))
            )
            values = {key: np.array([row[key] for row in own], np.float64) for key in MEASURED}
            lead = np.array([row["fraction"] for row in ours], np.float64) - values["fraction"]
            rate, rates = own[0]["rate"], own[0]["tried"]["rates"]
            found.setdefault(f"{problem}-{dim}", {})[name] = {
                **{key: estimate(value) for key, value in values.items()},
                "rate": rate,
                "edge": rate in (rates[0], rates[-1]),
                "lead": estimate(lead),
            }
        return found

    def table(self, record: Record) -> str:
        header = [f"{OURS}'s lead", *MEASURED, "rate"]
        forms = dict(zip(MEASURED, (".4f", ".3f", ".3f", ".3f", ".2f"), strict=True))
        texts = []
        for place, methods in record["summary"].items():
            lines = [
                [name, shown(own["lead"], "+.4f"), *(shown(own[key], forms[key]) for key in forms),
                 f"2^{math.log2(own['rate']):.0f}" + "*" * own["edge"]]
                for name, own in methods.items()
            ]  # fmt: skip
            texts.append(text_table([place, *header], lines))
        return "\n\n".join([*texts, "* at an end of the grid"])

    def plot(self, record: Record) -> Any:
        figure, grid = panels(1, 1, width=7.6, height=4.0)
        panel, places = grid[0, 0], list(record["summary"])
        for k, (name, colour) in enumerate(zip(self.methods, COLOURS, strict=False)):
            own = [record["summary"][place][name]["fraction"] for place in places]
            at = np.arange(len(places)) + 0.15 * (k - (len(self.methods) - 1) / 2)
            bars = [half_width(value["interval"]) or 0.0 for value in own]
            panel.errorbar(at, [value["mean"] for value in own], yerr=bars, fmt="os^vD"[k],
                           color=colour, markersize=4, capsize=2, label=name)  # fmt: skip
        panel.axhline(1, color=COLOURS[4], linewidth=0.9)
        panel.set_xticks(range(len(places)), [place.replace("-", "\n") for place in places])
        panel.legend(frameon=False, fontsize=8, loc="lower left")
        dress(panel, "Known distances, attained by critics", "95 % intervals; 1 is perfect",
              "pair of laws and dimension", "fraction of the distance")  # fmt: skip
        return figure
