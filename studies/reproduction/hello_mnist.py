"""Hello, MNIST: a small MLP on handwritten digits, with an untuned learning rate."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

import manifoldmuon as mm
from studies.datasets import load_mnist
from studies.estimates import estimate, shown
from studies.reproduction import modula
from studies.study import Cell, Record, Row, Study, option
from studies.training import begin, train

BATCH = 128
SAMPLED = {"published": 784, "corrected": None}
"""Number of images from which batches are drawn; None for all."""

METHOD = modula.TEN_QUINTICS
NETWORK = modula.mlp(784, 256, 10, METHOD)


@dataclasses.dataclass(frozen=True)
class HelloMNIST(Study):
    """Does a small MLP reach the accuracy on MNIST that the Modula package publishes?

    The published sampler draws only from the first 784 images, since it confuses the number of
    pixels with the number of images; the corrected sampler draws from all images. Nothing else
    differs.
    """

    name: ClassVar[str] = "hello-mnist"

    steps: int = option(1000, "number of updates")
    data_dir: Path | None = option(None, "folder with MNIST", recorded=False)

    def cells(self) -> Sequence[Cell]:
        return [{"protocol": name, "seed": seed} for name in SAMPLED for seed in range(4)]

    def run(self, cell: Cell) -> Mapping[str, Any]:
        train_x, train_y, test_x, test_y = _images(self.data_dir)
        sampled = SAMPLED[cell["protocol"]] or len(train_y)
        key = jax.random.key(cell["seed"])
        start = modula.init(NETWORK, key, METHOD)
        params, losses = _trained(self.steps, sampled, start, key, train_x, train_y)
        return {
            "sampled": sampled,
            "loss": losses[::100],
            "train_accuracy": _accuracy(params, train_x, train_y),
            "test_accuracy": _accuracy(params, test_x, test_y),
        }

    def summarise(self, rows: Sequence[Row]) -> Mapping[str, Any]:
        found = {
            protocol: [100 * row["test_accuracy"] for row in rows if row["protocol"] == protocol]
            for protocol in SAMPLED
        }
        return {name: {"first": own[0], **estimate(own)} for name, own in found.items()}

    def table(self, record: Record) -> str:
        return "\n".join(
            f"{protocol}: {own['first']:.2f} % with seed 0, {shown(own, '.2f', ' %')}"
            for protocol, own in record["summary"].items()
        )


@functools.lru_cache(maxsize=1)
def _images(folder: Path | None) -> tuple[jax.Array, ...]:
    data = load_mnist(folder)
    train_x, test_x = (jnp.asarray(x.reshape(len(x), -1)) for x in (data.train_x, data.test_x))
    return train_x, jnp.asarray(data.train_y), test_x, jnp.asarray(data.test_y)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _trained(
    steps: int, sampled: int, params: Any, key: Any, train_x: Any, train_y: Any
) -> tuple[Any, jax.Array]:
    """Train on batches drawn with replacement; return the weights, and the loss of each batch."""
    tx = mm.optim.modular(0.1, NETWORK, momentum=None)

    def loss(params: Any, batch: Any) -> Any:
        errors = NETWORK.apply(params, train_x[batch]) - jax.nn.one_hot(train_y[batch], 10)
        return jnp.mean(errors**2)

    def draw(key: Any, _: Any) -> Any:
        key = jax.random.split(key)[0]
        return key, jax.random.choice(key, sampled, (BATCH,))

    order = jax.lax.scan(draw, key, length=steps)[1]
    (params, _), (losses, _) = train(tx, loss, begin(tx, params), order)
    return params, losses


@jax.jit
def _accuracy(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the share of images with the largest output at their class."""
    return jnp.mean(jnp.argmax(NETWORK.apply(params, x), axis=-1) == y)
