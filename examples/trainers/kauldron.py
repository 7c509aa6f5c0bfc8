"""Kauldron: a classifier with Stiefel kernels, AdamW for biases, trained by `Trainer`.

python -m examples.trainers.kauldron    # after pip install kauldron
"""

import tempfile
from typing import Any

import numpy as np
import optax
from flax import linen

import manifoldmuon as mm
from manifoldmuon.manifolds import Stiefel

GEOMETRY = mm.optim.by_path({"**/kernel": Stiefel().transposed(), "**": None})


class Net(linen.Module):
    """A network with two layers."""

    def __kontext_keys__(self) -> dict[str, str]:
        """Return the keys of the inputs in Kauldron's context, by argument name of `__call__`."""
        return {"images": "batch.images"}

    @linen.compact
    def __call__(self, images):
        return linen.Dense(4)(linen.relu(linen.Dense(32)(images)))


def optimizer(steps: int) -> optax.GradientTransformation:
    """Return manifold Muon for the kernels and AdamW for the rest."""
    rate = optax.cosine_decay_schedule(0.1, steps)
    return mm.optim.manifold_muon(rate, GEOMETRY, rest=optax.adamw(1e-3))


def examples(count: int = 256) -> dict[str, np.ndarray]:
    """Return random points, labelled by the largest of four linear functions."""
    rng = np.random.default_rng(0)
    points = rng.normal(size=(count, 8)).astype(np.float32)
    labels = (points @ rng.normal(size=(8, 4))).argmax(-1)
    return {"images": points, "labels": labels[:, None].astype(np.int32)}


def main(steps: int = 60) -> tuple[float, float, float]:
    """Train; return the loss before and after, and the largest distance from a manifold."""
    from kauldron import kd  # pyright: ignore[reportAttributeAccessIssue]

    class Project(kd.ckpts.InitTransform):
        """Project the kernels onto their manifolds before the first step."""

        def transform(self, state: Any) -> Any:
            return state.replace(params=mm.optim.project_tree(GEOMETRY, state.params))

    trainer = kd.train.Trainer(
        workdir=tempfile.mkdtemp(),
        train_ds=kd.data.InMemoryPipeline(loader=examples, batch_size=64, shuffle=True),
        model=Net(),
        num_train_steps=steps,
        train_losses={
            "xent": kd.losses.SoftmaxCrossEntropyWithIntLabels(
                logits="preds", labels="batch.labels"
            )
        },
        optimizer=optimizer(steps),
        init_transform=Project(),
        writer=kd.train.metric_writer.NoopWriter(),
    )
    data = examples()

    def loss(state: Any) -> float:
        scores = trainer.model.apply({"params": state.params}, data["images"])
        labels = data["labels"][:, 0]
        return float(optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean())

    before = loss(trainer.init_state())
    state, _ = trainer.train()
    after, distances = loss(state), mm.optim.monitor_distance(GEOMETRY, state.params)
    far = float(max(distances.values()))
    print(f"loss {before:.3f} -> {after:.3f}; kernels off their manifolds by {far:.1e} at most")
    return before, after, far


if __name__ == "__main__":
    main()
