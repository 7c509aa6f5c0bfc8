"""Levanter: its own `train_lm`, with an optimizer for its configuration files.

python -m examples.trainers.levanter    # after pip install 'marin-levanter>=0.2.dev0'

Import this module in the program that starts Levanter's training; then a configuration has

    optimizer: {type: manifold_muon, name: stiefel, learning_rate: 0.05, adam_lr: 3.0e-3}
"""

# pyright: reportMissingImports=false

import dataclasses
import json
import sys
from typing import Any

import equinox
import haliax
import jax
import optax
from haliax.util import ensure_tuple
from levanter.optim.config import OptimizerConfig
from levanter.tracker import NoopTracker
from levanter.tracker.tracker import TrackerConfig

import manifoldmuon as mm
from examples.trainers.runs import Run, main, optimizer, text
from manifoldmuon.manifolds import LaidOut, Layout, Manifold


def layouts(model: Any) -> dict[str, Layout]:
    """Return the layouts of the weights of linear layers except `lm_head`, by path.

    A `haliax.nn.Linear` declares its fan-in and fan-out axes. Other axes are scanned layers or
    experts, and can have any position: independent copies.
    """
    found = {}
    for path, layer in jax.tree_util.tree_leaves_with_path(model, is_leaf=_is_linear):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if not _is_linear(layer) or "lm_head" in name or layer.weight is None:
            continue
        axes = [axis.name for axis in layer.weight.axes]
        ins, outs = (
            tuple(axes.index(axis.name) for axis in ensure_tuple(fan))
            for fan in (layer.In, layer.Out)
        )
        found[f"{name}/weight"] = Layout(ins, outs, ndim=len(axes))
    return found


def _is_linear(node: Any) -> bool:
    return isinstance(node, haliax.nn.Linear)


def geometry(model: Any, matrix: Manifold) -> Any:
    """Return `matrix` for the weights of linear layers except `lm_head`, None for the rest."""
    rules: dict[Any, Any] = {f"{k}/**": LaidOut(matrix, x) for k, x in layouts(model).items()}
    return mm.optim.by_path(rules | {"**": None})


def dimension_numbers(model: Any) -> Any:
    """Return the same for Optax's Muon."""
    found = layouts(model)

    def entry(path: Any, leaf: Any) -> Any:
        layout = found.get(jax.tree_util.keystr(path, simple=True, separator="/"))
        return layout and optax.contrib.MuonDimensionNumbers(layout.in_axes, layout.out_axes)

    named = haliax.NamedArray
    return jax.tree_util.tree_map_with_path(entry, model, is_leaf=lambda x: isinstance(x, named))


@OptimizerConfig.register_subclass("manifold_muon")
@dataclasses.dataclass(frozen=True)
class ManifoldMuonConfig(OptimizerConfig):
    """An optimizer of `runs.py` for the matrices of linear layers, AdamW for the rest."""

    name: str = "stiefel"
    adam_lr: float = 6e-4

    def build(self, num_train_steps: int) -> optax.GradientTransformation:
        """Return the optimizer; Levanter logs both rates from its state."""

        def build(learning_rate: Any, adam_lr: Any) -> optax.GradientTransformation:
            def of(params: Any) -> Any:
                return optimizer(
                    self.name,
                    learning_rate,
                    lambda matrix: geometry(params, matrix),
                    optax.adamw(adam_lr, weight_decay=self.weight_decay),
                    muon_weight_dimension_numbers=dimension_numbers,  # Optax would call a model
                )

            return optax.GradientTransformation(
                lambda params: of(params).init(params),
                lambda updates, state, params=None: of(params).update(updates, state, params),
            )

        return optax.inject_hyperparams(build)(
            learning_rate=self.lr_scheduler(num_train_steps),
            adam_lr=self.lr_scheduler(num_train_steps, override_lr=self.adam_lr),
        )


@dataclasses.dataclass
class Reporter(TrackerConfig):
    """A tracker that reports the losses."""

    run: Run

    def init(self, run_id: str | None) -> NoopTracker:
        """Return the tracker."""
        report = self.run.report

        class Tracker(NoopTracker):
            def log(self, metrics, *, step, commit=None):
                if "train/loss" in metrics:
                    report(step, metrics["train/loss"])

        return Tracker()


def train(run: Run) -> None:
    """Train a Llama of two layers on a text, a byte a token."""
    from levanter.checkpoint import CheckpointerConfig, latest_checkpoint_path, load_checkpoint
    from levanter.data.text.datasets import DatasetComponent, LmDataConfig, UrlDatasetSourceConfig
    from levanter.data.text.formats import PrebuiltLmDatasetFormat
    from levanter.main import train_lm
    from levanter.models.llama import LlamaConfig
    from levanter.trainer import TrainerConfig

    source = run.folder / "text.jsonl"
    rows = [json.dumps({"input_ids": tokens.tolist()}) for tokens in text(64)]
    source.write_text("\n".join(rows) + "\n", encoding="utf-8")
    urls = UrlDatasetSourceConfig(train_urls=[str(source)])
    data = LmDataConfig(
        tokenizer="passthrough",
        vocab_size=128,
        cache_dir=str(run.folder / "cache"),
        components={"text": DatasetComponent(urls, format=PrebuiltLmDatasetFormat())},
    )
    trainer = TrainerConfig(
        id="run",
        tracker=Reporter(run),
        log_dir=run.folder,
        num_train_steps=run.steps,
        train_batch_size=8,
        require_accelerator=False,
        checkpointer=CheckpointerConfig(
            base_path=str(run.folder / "checkpoints"), keep=[{"every": run.save_every}]
        ),
    )
    model = LlamaConfig(
        max_seq_len=64, hidden_dim=64, intermediate_dim=128, num_layers=2, num_heads=4,
        num_kv_heads=2, gradient_checkpointing=False,
        tokenizer=data.the_tokenizer,  # otherwise `train_lm` loads one from a hub
    )  # fmt: skip
    config = ManifoldMuonConfig(learning_rate=run.rate, name=run.name, adam_lr=run.rate / 10)
    train_lm.main(train_lm.TrainLmConfig(data, trainer, model, optimizer=config))
    saved = latest_checkpoint_path(str(run.folder / "checkpoints" / "run"))
    words = haliax.Axis("vocab", 128)
    shapes = equinox.filter_eval_shape(model.build, words, key=jax.random.key(0))
    with trainer.use_device_mesh():
        params = equinox.filter(load_checkpoint(shapes, saved, subpath="model"), equinox.is_array)
        run.report_distance(lambda matrix: geometry(params, matrix), params)


if __name__ == "__main__":
    sys.exit(main(train))
