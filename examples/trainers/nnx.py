"""Flax NNX, Grain and Orbax: a language model without a trainer.

python -m examples.trainers.nnx    # after pip install flax grain orbax-checkpoint
"""

# pyright: reportMissingImports=false

import functools
import sys
from typing import Any

import grain
import jax
import optax
import orbax.checkpoint as ocp
from flax import nnx

from examples.trainers.runs import Run, main, optimizer, text
from manifoldmuon.frameworks.nnx import geometry

WORDS, WIDTH, HEADS, LENGTH = 128, 64, 4, 64


class Block(nnx.Module):
    """A layer of a transformer."""

    def __init__(self, rngs: nnx.Rngs):
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norms[0](x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Model(nnx.Module):
    """Predict the next byte of a text."""

    def __init__(self, rngs: nnx.Rngs):
        self.words = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, WORDS, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.words(tokens) + self.positions.embedding[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@nnx.jit(donate_argnums=(0, 1))
def step(model: Model, tx: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    """Update the model; return the loss."""

    def loss(model: Model) -> jax.Array:
        logits = model(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    value, grads = nnx.value_and_grad(loss)(model)
    tx.update(model, grads)
    return value


def train(run: Run) -> None:
    """Train with the parameters' first axes and the batch sharded over all devices."""
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), auto)

    def sharding(leaf: Any) -> jax.NamedSharding:
        shards = leaf.ndim and leaf.shape[0] % jax.device_count() == 0
        return jax.NamedSharding(mesh, jax.P("fsdp") if shards else jax.P())

    rate = optax.cosine_decay_schedule(run.rate, run.steps)

    @nnx.jit
    def new() -> tuple[Model, nnx.Optimizer]:
        model = Model(nnx.Rngs(0))
        spaces = functools.partial(geometry, model, overrides={"head/kernel": None})
        tx = optimizer(run.name, rate, spaces, optax.adamw(run.rate / 10))
        made = model, nnx.Optimizer(model, tx, wrt=nnx.Param)
        state = nnx.state(made)
        nnx.update(made, jax.lax.with_sharding_constraint(state, jax.tree.map(sharding, state)))
        return made

    rows = grain.MapDataset.source(text(LENGTH)).seed(0).shuffle().repeat().batch(8)
    batches = iter(rows.to_iter_dataset())
    options = ocp.CheckpointManagerOptions(save_interval_steps=run.save_every)
    with (
        jax.set_mesh(mesh),
        ocp.CheckpointManager(run.folder / "checkpoints", options=options) as checkpoints,
    ):
        model, tx = new()
        first = 0
        if (last := checkpoints.latest_step()) is not None:
            state = ocp.args.StandardRestore(nnx.state((model, tx)))
            position = grain.checkpoint.CheckpointRestore(batches)
            items = ocp.args.Composite(state=state, batches=position)
            nnx.update((model, tx), checkpoints.restore(last, args=items)["state"])
            first = last + 1
        for count in range(first, run.steps):
            tokens = jax.device_put(next(batches), jax.NamedSharding(mesh, jax.P("fsdp")))
            run.report(count, step(model, tx, tokens))
            checkpoints.save(
                count,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(nnx.state((model, tx))),
                    batches=grain.checkpoint.CheckpointSave(batches),
                ),
            )
    spaces = functools.partial(geometry, model, overrides={"head/kernel": None})
    run.report_distance(spaces, nnx.state(model, nnx.Param))


if __name__ == "__main__":
    sys.exit(main(train))
