"""Tunix: LoRA trained by `PeftTrainer`; the constrained factors are orthonormal.

python -m examples.trainers.tunix    # after pip install google-tunix
"""

# pyright: reportMissingImports=false

import functools
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from examples.trainers.runs import Run, main, optimizer
from manifoldmuon.frameworks.nnx import geometry
from manifoldmuon.manifolds import Manifold

WORDS, WIDTH, RANK = 17, 32, 4


class Model(nnx.Module):
    """Predict the next token from the current token; the linear layers have adapters."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.up = nnx.LoRALinear(WIDTH, 2 * WIDTH, lora_rank=RANK, rngs=rngs)
        self.down = nnx.LoRALinear(2 * WIDTH, WORDS, lora_rank=RANK, rngs=rngs)

    def __call__(self, tokens):
        return self.down(nnx.relu(self.up(self.embed(tokens))))


def factors(model: nnx.Module, matrix: Manifold) -> Any:
    """Return `matrix` for the first factors, None for the second, which start at zero.

    `lora_geometry` constrains the first factors and moves the second in the RMS-to-RMS norm.
    """
    overrides = {nnx.LoRA: {"lora_a": matrix, "lora_b": None}}
    return geometry(model, None, overrides=overrides, wrt=nnx.LoRAParam)


def flat(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Keep the state as a list of arrays: Tunix cannot restore the `MaskedNode`s of Optax.

    They are in the state of every optimizer that trains parameters by different rules, and Orbax
    restores them as None.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        structure = jax.tree.structure(jax.eval_shape(tx.init, params))
        updates, new = tx.update(updates, jax.tree.unflatten(structure, state), params)
        return updates, jax.tree.leaves(new)

    return optax.GradientTransformation(lambda params: jax.tree.leaves(tx.init(params)), update)


def loss_fn(model: Model, input_tokens: Any, input_mask: Any) -> jax.Array:
    """Return the mean cross-entropy of the unmasked next tokens."""
    losses = optax.softmax_cross_entropy_with_integer_labels(
        model(input_tokens[:, :-1]), input_tokens[:, 1:]
    )
    return (losses * input_mask[:, 1:]).sum() / input_mask[:, 1:].sum()


def batches(steps: int) -> Iterator[Any]:
    """Yield sequences that count upwards by three."""
    from tunix.sft import peft_trainer

    first = np.random.default_rng(0).integers(WORDS, size=(steps, 8, 1))
    for start in first:
        tokens = (start + 3 * np.arange(16)) % WORDS
        yield peft_trainer.TrainingInput(jnp.asarray(tokens), jnp.ones(tokens.shape))


def train(run: Run) -> None:
    """Fine-tune on a mesh of all devices: the batch and the parameters' first axes are sharded."""
    import orbax.checkpoint as ocp
    from tunix.sft import peft_trainer

    class Trainer(peft_trainer.PeftTrainer):
        """A trainer that reports the losses."""

        def _log_metrics(self, loss, step: Any = None, additional_metrics=None):
            super()._log_metrics(loss, step, additional_metrics)
            run.report(step - 1, loss)

    model = Model(nnx.Rngs(0))
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), auto)

    def shard(leaf: jax.Array) -> jax.Array:
        axis = "fsdp" if leaf.ndim and leaf.shape[0] % jax.device_count() == 0 else None
        return jax.device_put(leaf, jax.NamedSharding(mesh, jax.P(axis)))

    nnx.update(model, jax.tree.map(shard, nnx.state(model)))
    spaces = functools.partial(factors, model)
    rate = optax.cosine_decay_schedule(run.rate, run.steps)
    config = peft_trainer.TrainingConfig(
        eval_every_n_steps=run.steps + 1,
        max_steps=run.steps,
        checkpoint_root_directory=str(run.folder / "checkpoints"),
        checkpointing_options=ocp.CheckpointManagerOptions(save_interval_steps=run.save_every),
    )
    with mesh:
        tx = flat(optimizer(run.name, rate, spaces, optax.adamw(run.rate / 10)))
        trainer = Trainer(model, tx, config).with_loss_fn(loss_fn)
        trainer = trainer.with_gen_model_input_fn(
            lambda x: {"input_tokens": x.input_tokens, "input_mask": x.input_mask}
        )
        trainer.train(batches(run.steps))
    run.report_distance(spaces, nnx.state(model, nnx.LoRAParam))


if __name__ == "__main__":
    sys.exit(main(train))
