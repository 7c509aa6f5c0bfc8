"""A custom architecture: an MLP-mixer, with the same learning rate for all sizes.

    python -m studies.mixer

`Patches`, `Transpose` and `Mean` are new bonds; everything else, including norm, budgets and
optimizer, comes from the package's module algebra. The sweep trains two widths and two depths on
the handwritten digits, with learning rates in factors of two.
"""

import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float
from matplotlib.figure import Figure

import manifoldmuon as mm
from manifoldmuon.modules import GELU, Bond, Identity, Linear, MeanSubtract, Module, RMSDivide
from studies.datasets import load_digits
from studies.digits import figure
from studies.program import command, errors_in_one_line, interrupted, parse, progress, save
from studies.records import whole

# --- the architecture, from here ... -------------------------------------------------------------


@dataclass(frozen=True)
class Patches(Bond):
    """Split images `(..., height, width)` into tokens: squares of `side` by `side` pixels."""

    side: int
    sensitivity: ClassVar[float] = 1.0
    gamma: ClassVar[float] = 0.0

    def forward(self, x: Float[Array, "*batch h w"]) -> Float[Array, "*batch t p"]:
        *batch, h, w = x.shape
        grid = x.reshape(*batch, h // self.side, self.side, w // self.side, self.side)
        return jnp.swapaxes(grid, -3, -2).reshape(*batch, -1, self.side**2)


@dataclass(frozen=True)
class Transpose(Bond):
    """Exchange tokens and features: an isometry in the RMS norm over both."""

    sensitivity: ClassVar[float] = 1.0
    gamma: ClassVar[float] = 0.0

    def forward(self, x: Float[Array, "*batch t d"]) -> Float[Array, "*batch d t"]:
        return jnp.swapaxes(x, -2, -1)


@dataclass(frozen=True)
class Mean(Bond):
    """Average the tokens."""

    sensitivity: ClassVar[float] = 1.0
    gamma: ClassVar[float] = 0.0

    def forward(self, x: Float[Array, "*batch t d"]) -> Float[Array, "*batch d"]:
        return jnp.mean(x, axis=-2)


def mixer(classes: int, pixels: int, side: int, width: int, blocks: int) -> Module:
    """Return an MLP-mixer: MLPs alternately over tokens and over features."""
    tokens, keep, step = (pixels // side) ** 2, 1 - 1 / (2 * blocks), 1 / (2 * blocks)
    gelu = GELU(GELU.LIPSCHITZ) / GELU.LIPSCHITZ
    norm = RMSDivide() @ MeanSubtract()
    over_tokens = Linear(tokens, 2 * tokens) @ gelu @ Linear(2 * tokens, tokens)
    over_features = Linear(width, 2 * width) @ gelu @ Linear(2 * width, width)
    mix = keep * Identity() + step * (Transpose() @ over_tokens @ Transpose() @ norm)
    feed = keep * Identity() + step * (over_features @ norm)
    body = ((feed @ mix) ** blocks).tare(absolute=2.0)
    head = Linear(classes, width) @ Mean() @ norm
    return head @ body @ Linear(width, side**2) @ Patches(side)


# --- ... to here ---------------------------------------------------------------------------------

WIDTHS, DEPTHS, SEEDS = (32, 128), (2, 8), (0, 1)
STEPS, BATCH, SIDE = 100, 64, 2
RATES = tuple(2.0**k for k in range(-2, 3))


@functools.partial(jax.jit, static_argnums=0)
def train(network: Module, rate: Any, seed: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Train with a rate that falls linearly to zero; return the mean loss of the batches."""
    tx = mm.optim.modular(optax.linear_schedule(rate, 0.0, STEPS), network)
    start, draws = jax.random.split(jax.random.key(seed))
    params = network.init(start)

    def step(carry, key):
        params, state = carry
        batch = jax.random.choice(key, len(y), (BATCH,))

        def loss(params):
            scores = network.apply(params, x[batch])
            return optax.softmax_cross_entropy_with_integer_labels(scores, y[batch]).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    return jax.lax.scan(step, (params, tx.init(params)), jax.random.split(draws, STEPS))[1].mean()


def main(argv: Sequence[str] | None = None) -> int:
    """Sweep the learning rate for every size; return the exit status."""
    p = command("studies.mixer", "One learning rate for all sizes of an MLP-mixer on the digits.")
    given = parse(p, argv, beside=(".png", ".txt"))
    picture, table_of = (given.out.with_suffix(suffix) for suffix in (".png", ".txt"))
    data = load_digits()
    x = jnp.asarray((data.train_x - data.train_x.mean()) / data.train_x.std())
    y = jnp.asarray(data.train_y)
    sizes = [(width, blocks) for width in WIDTHS for blocks in DEPTHS]
    curves: dict[tuple[int, int], np.ndarray] = {}
    try:
        with progress(len(sizes) * len(RATES) * len(SEEDS) * STEPS) as bar:
            for width, blocks in sizes:
                bar.set_description(f"width {width}, {blocks} blocks")
                network = mixer(10, x.shape[-1], SIDE, width, blocks)
                found = np.empty((len(SEEDS), len(RATES)))
                for i, j in np.ndindex(found.shape):
                    found[i, j] = train(network, RATES[j], SEEDS[i], x, y)
                    bar.update(STEPS)
                curves[width, blocks] = found
                save(given, as_record(curves), replace=True)
    except KeyboardInterrupt:
        return interrupted(f"{len(curves)} of {len(sizes)} sizes are in {given.out}")
    print(table(curves))
    with errors_in_one_line():
        figure.save(draw(curves), picture)
        with whole(table_of) as temporary:
            temporary.write_text(table(curves) + "\n", encoding="utf-8")
    print("written:", given.out, picture, table_of)
    return 0


def as_record(curves: Mapping[tuple[int, int], np.ndarray]) -> dict[str, Any]:
    """Return the mean losses (seeds by rates) and the best rate of every size."""
    runs = [
        {"width": width, "blocks": blocks, "mean_loss": found, "best": best(found)}
        for (width, blocks), found in curves.items()
    ]
    return {"rates": RATES, "seeds": SEEDS, "steps": STEPS, "batch": BATCH, "runs": runs}


def best(found: np.ndarray) -> float:
    """Return the rate of the smallest mean loss over the seeds."""
    return RATES[int(np.argmin(found.mean(axis=0)))]


def table(curves: Mapping[tuple[int, int], np.ndarray]) -> str:
    """Format the mean training loss for every size and rate."""
    lines = ["width blocks " + "".join(f"{rate:>8g}" for rate in RATES) + "    best"]
    for (width, blocks), found in curves.items():
        cells = "".join(f"{value:8.3f}" for value in found.mean(axis=0))
        lines.append(f"{width:5} {blocks:6} {cells}{best(found):8g}")
    return "\n".join(lines)


def draw(curves: Mapping[tuple[int, int], np.ndarray]) -> Figure:
    """Plot the mean loss against the learning rate, with a line for each size."""
    figure = Figure(figsize=(6, 4), dpi=150, layout="constrained")
    panel = figure.subplots()
    colours = dict(zip(WIDTHS, ("#0072B2", "#D55E00"), strict=True))
    styles = dict(zip(DEPTHS, ("-", "--"), strict=True))
    for (width, blocks), found in curves.items():
        label = f"width {width}, {blocks} blocks"
        colour, mean = colours[width], found.mean(axis=0)
        panel.plot(RATES, mean, styles[blocks], color=colour, linewidth=2, label=label)
        panel.fill_between(RATES, found.min(axis=0), found.max(axis=0), color=colour, alpha=0.12)
        panel.plot(best(found), mean.min(), "o", color=colour)
    panel.set_xscale("log", base=2)
    panel.set_xlabel("peak learning rate")
    panel.set_ylabel("mean cross-entropy of the training batches (nats)")
    panel.grid(color="#e2e2e2", linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False)
    return figure


if __name__ == "__main__":
    sys.exit(main())
