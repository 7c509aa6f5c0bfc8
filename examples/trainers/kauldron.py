"""Kauldron: a classifier trained by `Trainer`, with its optimizer for the kernels.

python -m examples.trainers.kauldron    # after pip install kauldron tensorflow-cpu
"""

import sys
from typing import Any

import numpy as np
import optax
from flax import linen

import manifoldmuon as mm
from examples.trainers.runs import Run, main, optimizer
from manifoldmuon.manifolds import Manifold


class Net(linen.Module):
    """A network with two layers."""

    def __kontext_keys__(self) -> dict[str, str]:
        """Return the keys of the inputs in Kauldron's context, by argument name of `__call__`."""
        return {"images": "batch.images"}

    @linen.compact
    def __call__(self, images):
        return linen.Dense(8)(linen.relu(linen.Dense(32)(images)))


def geometry(matrix: Manifold) -> Any:
    """Return `matrix` for the kernels, None for biases; paths are as in Linen, without `params`."""
    return mm.optim.by_path({"**/kernel": matrix.transposed(), "**": None})


def examples(count: int = 256) -> list[dict[str, np.ndarray]]:
    """Return random points, labelled by the largest of eight linear functions."""
    rng = np.random.default_rng(0)
    points = rng.normal(size=(count, 16)).astype(np.float32)
    labels = (points @ rng.normal(size=(16, 8))).argmax(-1)[:, None].astype(np.int32)
    return [{"images": x, "labels": y} for x, y in zip(points, labels, strict=True)]


def train(run: Run) -> None:
    """Train with the kernels sharded over all devices."""
    from kauldron import kd  # pyright: ignore[reportAttributeAccessIssue]

    class Writer(kd.train.metric_writer.NoopWriter):
        """A writer that reports the losses."""

        def write_step_metrics(self, *, step, aux, **others) -> None:
            run.report(step, aux.compute(flatten=True).loss_values["losses/xent"])

    fsdp = kd.sharding.FSDPSharding(min_size_to_shard_mb=0)
    # Made once: the trainer hashes the optimizer.
    rate = optax.cosine_decay_schedule(run.rate, run.steps)
    tx = optimizer(run.name, rate, geometry, optax.adamw(run.rate / 10))
    trainer = kd.train.Trainer(
        workdir=run.folder,
        seed=0,
        train_ds=kd.data.py.DataSource(
            data_source=examples(), shuffle=True, batch_size=64, num_workers=0
        ),
        model=Net(),
        num_train_steps=run.steps - 1,  # it takes one more
        log_metrics_every=1,
        train_losses={
            "xent": kd.losses.SoftmaxCrossEntropyWithIntLabels(
                logits="preds", labels="batch.labels"
            )
        },
        optimizer=tx,
        sharding=kd.sharding.ShardingStrategy(params=fsdp, opt_state=fsdp),
        checkpointer=kd.ckpts.Checkpointer(save_interval_steps=run.save_every),
        writer=Writer(),
    )
    state, _ = trainer.train()
    run.report_distance(geometry, state.params)


if __name__ == "__main__":
    sys.exit(main(train))
