"""EasyDeL: its own `Trainer`, with an optimizer from a subclass of `TrainingArguments`.

python -m examples.trainers.easydel    # after pip install 'easydel[torch]' pillow
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import sys
from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers

import manifoldmuon as mm
from examples.trainers.runs import Run, main, optimizer, text
from examples.trainers.tunix import flat
from manifoldmuon.manifolds import Manifold

LENGTH = 64


def geometry(matrix: Manifold) -> Any:
    """Return `matrix` for the kernels of attention and MLP, None for the rest."""
    return mm.optim.by_path({"**/*_proj/kernel": matrix.transposed(), "**": None})


def dimension_numbers(params: Any) -> Any:
    """Return the same for Optax's Muon."""
    entries = mm.optim.resolve_geometry(geometry(mm.manifolds.Stiefel()), params)
    return jax.tree.map(
        lambda entry: entry and MuonDimensionNumbers(), entries, is_leaf=lambda x: x is None
    )


def train(run: Run) -> None:
    """Train a Llama of two layers on a text, a byte a token."""
    import easydel
    import jax.numpy as jnp
    from datasets import Dataset
    from flax import nnx

    class Arguments(easydel.TrainingArguments):
        """Arguments with an optimizer of this package."""

        def get_optimizer_and_scheduler(self, steps: int | None = None) -> Any:
            rate = optax.cosine_decay_schedule(run.rate, run.steps)
            rest = optax.adamw(run.rate / 10)
            dims = {"muon_weight_dimension_numbers": dimension_numbers}
            # EasyDeL shards numbers in the state as the kernels in whose paths their names end.
            return flat(optimizer(run.name, rate, geometry, rest, **dims)), rate

    class Trainer(easydel.Trainer):
        """A trainer that reports the losses."""

        def on_step_end(self, state: Any, metrics: Any, step: int) -> Any:
            run.report(step - 1, metrics.loss)
            return state, metrics

    config = easydel.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH,
        sharding_axis_dims=(1, -1, 1, 1, 1),
    )  # fmt: skip
    model = easydel.LlamaForCausalLM(
        config=config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0)
    )
    rows = text(LENGTH)
    data = Dataset.from_dict({"input_ids": rows, "attention_mask": rows * 0 + 1, "labels": rows})
    arguments = Arguments(
        model_name="run",
        save_directory=str(run.folder / "checkpoints"),
        num_train_epochs=run.steps,
        max_training_steps=run.steps,
        total_batch_size=8,
        max_length=LENGTH,
        learning_rate=run.rate,
        save_steps=run.save_every,
        resume_if_possible=True,
        use_wandb=False,
        report_metrics=False,
        do_last_save=False,
    )
    trainer = Trainer(arguments=arguments, model=model, dataset_train=data)
    output = trainer.train()
    run.report_distance(geometry, output.state.graphstate)


if __name__ == "__main__":
    sys.exit(main(train))
