"""Tokens per second of the character GPT on manifolds, compared with unconstrained Muon.

    python -m benchmarks gpt_throughput    # minutes; docs/benchmarks/results/gpt_throughput.*

Trains the network of the constrained run of `studies.gpt` with manifold Muon, with either solver
preset, and with `optax.contrib.muon` at its defaults, from the same weights on the same tokens.
Each chunk of steps is a compiled program. The parts of a step are separate programs, timed the
same way.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import manifoldmuon as mm
from benchmarks._harness import command, save_with_table, timed
from manifoldmuon.manifolds.solvers import ClosedForm, ProjectedPolar
from studies.display import markdown_table
from studies.gpt.methods import METHODS, Job, build_equal, build_muon, constrained
from studies.gpt.study import CharacterGPT
from studies.gpt.training import chunk_of_steps, mean_loss
from studies.program import parse

VOCABULARY = 65
RATE = METHODS["constrained"].learning_rate
MUON = "optax.contrib.muon"
LEAST_WINDOWS = 36  # per measurement: a single step is short at a small batch
BATCHES = (12, 96)
PRESETS = {"ProjectedPolar()": ProjectedPolar(), "ClosedForm()": ClosedForm()}

Functions = dict[str, Callable[[], Any]]


def starts_of(settings: CharacterGPT, steps: int, tokens: jax.Array) -> jax.Array:
    """Draw the positions where each step's windows start."""
    last = len(tokens) - settings.context
    places = np.random.default_rng(0).integers(last, size=(steps, settings.batch))
    return jnp.asarray(places, jnp.int32)


def whole_steps(settings: CharacterGPT, steps: int, tokens: jax.Array) -> Functions:
    """Return functions that take this many steps each, by optimizer."""
    networks = {name: constrained(settings, VOCABULARY, x) for name, x in PRESETS.items()}
    jobs = {f"manifold Muon, {k}": Job(net, build_equal(RATE, net)) for k, net in networks.items()}
    jobs[MUON] = Job(networks["ProjectedPolar()"], build_muon(RATE, networks["ProjectedPolar()"]))
    functions, starts = {}, starts_of(settings, steps, tokens)
    for name, job in jobs.items():
        weights = job.network.init(jax.random.key(0))
        chunk = jax.jit(chunk_of_steps(job, settings.context))
        functions[name] = functools.partial(chunk, (weights, job.tx.init(weights)), tokens, starts)
    return functions


def parts(settings: CharacterGPT, tokens: jax.Array) -> Functions:
    """Return functions that compute loss and gradients of a batch, or a part of the optimizer."""
    networks = {name: constrained(settings, VOCABULARY, x) for name, x in PRESETS.items()}
    network, geometry = networks["ProjectedPolar()"], networks["ProjectedPolar()"].geometry()
    weights = network.init(jax.random.key(0))
    gradient = jax.jit(jax.value_and_grad(mean_loss(network, settings.context)))
    keys = jax.random.split(jax.random.key(1), len(jax.tree.leaves(weights)))
    keys = jax.tree.unflatten(jax.tree.structure(weights), list(keys))
    grads = jax.tree.map(lambda w, key: jax.random.normal(key, w.shape), weights, keys)

    def update(tx: Any, given: Any) -> Callable[[], Any]:
        return functools.partial(jax.jit(tx.update), given, tx.init(weights), weights)

    starts = starts_of(settings, 1, tokens)[0]
    found: Functions = {
        "forward and backward": functools.partial(gradient, weights, tokens, starts)
    }
    found["momentum"] = update(optax.trace(0.95, nesterov=True, accumulator_dtype="float32"), grads)
    for name, net in networks.items():
        found[f"direction, {name}"] = update(mm.optim.scale_by_steepest(net.geometry()), grads)
    # Longer steps take more work to retract, so scale them as in training.
    steps = jax.tree.map(lambda x: -RATE * x, found["direction, ClosedForm()"]()[0])
    found["retraction"] = update(mm.optim.retract(geometry), steps)
    found[f"all of {MUON}"] = update(build_muon(RATE, network), grads)
    return found


def measure(batch: int, rounds: int) -> dict[str, Any]:
    """Measure a batch size."""
    settings, steps = CharacterGPT(batch=batch), max(1, LEAST_WINDOWS // batch)
    # Random tokens suffice: times do not depend on the text.
    tokens = jnp.asarray(np.random.default_rng(0).integers(VOCABULARY, size=100_000), jnp.int32)
    whole = timed(whole_steps(settings, steps, tokens), rounds)
    pieces = timed(parts(settings, tokens), rounds)["seconds"]
    per_step = batch * settings.context
    rate = {name: steps * per_step / seconds for name, seconds in whole["seconds"].items()}
    return {
        "batch": batch,
        "tokens_per_step": per_step,
        "tokens_per_second": rate,
        "spread": whole["spread"],
        "relative_to_muon": {name: rate[name] / rate[MUON] for name in rate},
        "milliseconds_per_step": {k: 1e3 * s / steps for k, s in whole["seconds"].items()},
        "milliseconds_of_part": {name: 1e3 * s for name, s in pieces.items()},
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    lines = [
        [row["batch"], name, f"{row['milliseconds_per_step'][name]:.1f}", f"{speed:,.0f}",
         f"{100 * row['relative_to_muon'][name]:.0f} %"]
        for row in rows
        for name, speed in row["tokens_per_second"].items()
    ]  # fmt: skip
    pieces = [
        [name, *(f"{row['milliseconds_of_part'][name]:.2f}" for row in rows)]
        for name in rows[0]["milliseconds_of_part"]
    ]
    whole = markdown_table(["batch", "optimizer", "ms/step", "tokens/s", "against Muon"], lines)
    batches = [f"batch {row['batch']}" for row in rows]
    return f"{whole}\n\n{markdown_table(['part of a step, ms', *batches], pieces)}"


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    p = command("gpt_throughput", __doc__, rounds=11)
    p.add_argument("--batches", type=int, nargs="+", default=BATCHES, metavar="N")
    options = parse(p, argv, beside=(".md",))
    if min(*options.batches, options.rounds) < 1:
        p.error("--batches and --rounds must be at least 1")
    rows = [measure(batch, options.rounds) for batch in tqdm(options.batches, unit="batch size")]
    record = {
        "what": "tokens per second of the character GPT, all optimizers in one run",
        "settings": CharacterGPT().settings(),
        "rounds": options.rounds,
        "rows": rows,
    }
    save_with_table(options, record, table(rows))


if __name__ == "__main__":
    main()
