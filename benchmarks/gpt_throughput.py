"""Tokens per second of the character GPT: weights on manifolds against unconstrained Muon.

    python -m benchmarks.gpt_throughput    # minutes; docs/benchmarks/results/gpt_throughput.*

Trains the network of the constrained run of `studies.gpt` with manifold Muon, with either solver
preset, and with `optax.contrib.muon` at its defaults, from the same weights on the same tokens.
Each chunk of steps is one compiled program. Rounds interleave the programs, so that a slow machine
affects all of them equally. The parts of a step are separate programs, timed the same way.
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
from benchmarks._command import command, save_with_table
from manifoldmuon.manifolds.solvers import ClosedForm, ProjectedPolar
from manifoldmuon.modules import Module
from studies.display import markdown_table
from studies.gpt.methods import METHODS, Job, build_equal, build_muon, constrained
from studies.gpt.study import CharacterGPT
from studies.gpt.training import chunk_of_steps, mean_loss
from studies.program import parse
from studies.timing import interleaved_seconds

VOCABULARY = 65
RATE = METHODS["constrained"].learning_rate
MUON = "optax.contrib.muon"
LEAST_WINDOWS = 36  # per measurement: a single step is short at a small batch
BATCHES = (12, 96)
PRESETS = {"fast": ProjectedPolar(), "accurate": ClosedForm()}


def networks(settings: CharacterGPT) -> dict[str, Module]:
    """Return the constrained network with either solver."""
    return {name: constrained(settings, VOCABULARY, solver) for name, solver in PRESETS.items()}


def jobs(settings: CharacterGPT) -> dict[str, Job]:
    """Return manifold Muon with either solver, and Muon on the same network unconstrained."""
    found = {
        f"manifold Muon, {name}": Job(network, build_equal(RATE, network))
        for name, network in networks(settings).items()
    }
    network = constrained(settings, VOCABULARY, ProjectedPolar())
    return found | {MUON: Job(network, build_muon(RATE, network))}


def whole_steps(
    settings: CharacterGPT, steps: int, tokens: jax.Array
) -> dict[str, Callable[[], Any]]:
    """Return functions that take this many steps each, by optimizer."""
    functions = {}
    for name, job in jobs(settings).items():
        weights = job.network.init(jax.random.key(0))
        carry = weights, job.tx.init(weights)
        chunk = jax.jit(chunk_of_steps(job, settings.context))
        functions[name] = functools.partial(
            chunk, carry, tokens, starts_of(settings, steps, tokens)
        )
    return functions


def optimizer_parts(settings: CharacterGPT) -> dict[str, Callable[[], Any]]:
    """Return functions that run each part of the optimizer separately."""
    versions = networks(settings)
    weights = versions["fast"].init(jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), len(jax.tree.leaves(weights)))
    grads = jax.tree.map(
        lambda w, key: jax.random.normal(key, w.shape),
        weights,
        jax.tree.unflatten(jax.tree.structure(weights), list(keys)),
    )
    trace = optax.trace(0.95, nesterov=True, accumulator_dtype="float32")
    found = {"momentum": functools.partial(jax.jit(trace.update), grads, trace.init(weights))}
    tangent = grads
    for name, network in versions.items():
        steepest = mm.optim.scale_by_steepest(network.geometry())
        direct = functools.partial(jax.jit(steepest.update), grads, steepest.init(weights), weights)
        tangent, _ = direct()
        found[f"direction, {name}"] = direct
    # Longer steps take more work to retract, so scale them as in training.
    steps = jax.tree.map(lambda x: -RATE * x, tangent)
    retract = mm.optim.retract(versions["fast"].geometry())
    found["retraction"] = functools.partial(
        jax.jit(retract.update), steps, retract.init(weights), weights
    )
    muon = build_muon(RATE, versions["fast"])
    found[f"all of {MUON}"] = functools.partial(
        jax.jit(muon.update), grads, muon.init(weights), weights
    )
    return found


def forward_and_backward(settings: CharacterGPT, tokens: jax.Array) -> Callable[[], Any]:
    """Return a function that computes loss and gradients of a batch."""
    network = networks(settings)["fast"]
    gradient = jax.jit(jax.value_and_grad(mean_loss(network, settings.context)))
    weights = network.init(jax.random.key(0))
    return functools.partial(gradient, weights, tokens, starts_of(settings, 1, tokens)[0])


def starts_of(settings: CharacterGPT, steps: int, tokens: jax.Array) -> jax.Array:
    """Draw the positions where each step's windows start."""
    last = len(tokens) - settings.context
    places = np.random.default_rng(0).integers(last, size=(steps, settings.batch))
    return jnp.asarray(places, jnp.int32)


def measure(batch: int, rounds: int, parts: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Measure a batch size."""
    settings, steps = CharacterGPT(batch=batch), max(1, LEAST_WINDOWS // batch)
    # Random tokens suffice: times do not depend on the text.
    tokens = jnp.asarray(np.random.default_rng(0).integers(VOCABULARY, size=100_000), jnp.int32)
    whole = interleaved_seconds(whole_steps(settings, steps, tokens), rounds)
    first = {"forward and backward": forward_and_backward(settings, tokens)}
    pieces = interleaved_seconds(first | parts, rounds)
    per_step = batch * settings.context
    rate = {name: steps * per_step / seconds for name, seconds in whole.items()}
    return {
        "batch": batch,
        "tokens_per_step": per_step,
        "tokens_per_second": rate,
        "relative_to_muon": {name: rate[name] / rate[MUON] for name in rate},
        "milliseconds_per_step": {name: 1e3 * s / steps for name, s in whole.items()},
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
    parts = [
        [name, *(f"{row['milliseconds_of_part'][name]:.2f}" for row in rows)]
        for name in rows[0]["milliseconds_of_part"]
    ]
    whole = markdown_table(["batch", "optimizer", "ms/step", "tokens/s", "against Muon"], lines)
    batches = [f"batch {row['batch']}" for row in rows]
    return f"{whole}\n\n{markdown_table(['part of a step, ms', *batches], parts)}"


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    p = command("gpt_throughput", "Tokens per second of the character GPT.")
    p.add_argument("--batches", type=int, nargs="+", default=BATCHES, metavar="N")
    p.add_argument("--rounds", type=int, default=11, help="measurements of each (default: 11)")
    options = parse(p, argv, beside=(".md",))
    if min(*options.batches, options.rounds) < 1:
        p.error("--batches and --rounds must be at least 1")
    parts = optimizer_parts(CharacterGPT())
    rows = [
        measure(batch, options.rounds, parts) for batch in tqdm(options.batches, unit="batch size")
    ]
    record = {
        "what": "tokens per second of the character GPT, all optimizers in one run",
        "settings": CharacterGPT().settings(),
        "rounds": options.rounds,
        "rows": rows,
    }
    save_with_table(options, record, table(rows))


if __name__ == "__main__":
    main()
