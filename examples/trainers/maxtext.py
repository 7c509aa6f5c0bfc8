"""MaxText: its own `pre_train` loop, with `opt_type: muon` by this package.

python -m examples.trainers.maxtext    # after pip install 'maxtext[tpu]'

MaxText computes the dimension numbers of Muon and the learning rate, and passes them to
`optax_muon`, a name in `maxtext.optimizers.optimizers`. Another function with that name is all
that is needed: call the trainer from a program that sets it.
"""

# pyright: reportMissingImports=false

import functools
import sys
from typing import Any

import jax
import optax
from flax import nnx

from examples.trainers.runs import Run, main, optimizer
from manifoldmuon.frameworks.muon import geometry


def muon(name: str, learning_rate: Any, **options: Any) -> optax.GradientTransformation:
    """Return an optimizer of `runs.py` for the arguments that MaxText gives to Optax's Muon."""
    tables = options["muon_weight_dimension_numbers"]
    rest = optax.adamw(learning_rate, options["adam_b1"], options["adam_b2"])
    return optimizer(name, learning_rate, functools.partial(geometry, tables), rest, **options)


def train(run: Run) -> None:
    """Train a Llama of two layers on MaxText's synthetic batch."""
    from maxtext.common.metric_logger import MetricLogger
    from maxtext.optimizers import optimizers
    from maxtext.trainers.pre_train import train as pre_train

    given: dict[str, Any] = {}

    def optax_muon(learning_rate, **options) -> optax.GradientTransformation:
        given.update(options)
        return muon(run.name, learning_rate, **options)

    def write(self, metrics, step, metric_type="train") -> None:
        run.report(step, metrics["scalar"]["learning/loss"])

    optimizers.optax_muon = optax_muon
    MetricLogger.write_metrics = write
    settings = {
        "run_name": "run",
        "base_output_directory": run.folder,
        "steps": run.steps,
        "checkpoint_period": run.save_every,
        "opt_type": "muon",
        "learning_rate": run.rate,
        "base_emb_dim": 64,
        "base_num_query_heads": 4,
        "base_num_kv_heads": 4,
        "head_dim": 16,
        "base_mlp_dim": 128,
        "base_num_decoder_layers": 2,
        "vocab_size": 256,
        "max_target_length": 32,
        "per_device_batch_size": 8 / jax.device_count(),
        "dataset_type": "synthetic",
        "attention": "dot_product",
        "dtype": "float32",
        "sharding_tolerance": 1.0,
        "enable_tensorboard": False,
        "enable_goodput_recording": False,
        "monitor_goodput": False,
        "log_config": False,
        "jax_cache_dir": "",
        "skip_jax_distributed_system": True,
    }
    config, recorder = pre_train.initialize(["", *[f"{k}={v}" for k, v in settings.items()]])
    state = pre_train.train_loop(config, recorder)
    spaces = functools.partial(geometry, given["muon_weight_dimension_numbers"])
    run.report_distance(spaces, nnx.filter_state(state.model, nnx.Param))


if __name__ == "__main__":
    sys.exit(main(train))
