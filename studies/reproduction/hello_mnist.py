"""Hello, MNIST: a small MLP on handwritten digits, with an untuned learning rate.

    python -m studies.reproduction.hello_mnist --data-dir path/to/mnist

The published sampler (documentation of the Modula package) draws only from the first 784 images,
since it confuses the number of pixels with the number of images; the corrected sampler draws from
all images. Nothing else differs.
"""

import functools
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from tqdm import tqdm

import manifoldmuon as mm
from studies.datasets import Dataset, load_mnist
from studies.estimates import Mean
from studies.program import command, interrupted, load, parse, progress, save
from studies.reproduction import modula

STEPS, CHUNK, BATCH = 1000, 20, 128
SAMPLED = {"published": 784, "corrected": None}
"""Number of images from which batches are drawn; None for all."""

METHOD = modula.TEN_QUINTICS
NETWORK = modula.mlp(784, 256, 10, METHOD)
OPTIMIZER = mm.optim.modular(0.1, NETWORK, momentum=None)


class Images(NamedTuple):
    """Flattened images with values in [0, 1]."""

    train_x: jax.Array
    train_y: jax.Array
    test_x: jax.Array
    test_y: jax.Array


def images(dataset: Dataset) -> Images:
    """Flatten the images."""
    train, test = (x.reshape(len(x), -1) for x in (dataset.train_x, dataset.test_x))
    return Images(*map(jnp.asarray, (train, dataset.train_y, test, dataset.test_y)))


@functools.partial(jax.jit, static_argnums=3)
def chunk(carry: Any, train_x: jax.Array, train_y: jax.Array, sampled: int) -> tuple[Any, Any]:
    """Take `CHUNK` steps on batches drawn with replacement; also return the losses."""

    def step(carry, _):
        params, state, key = carry
        key = jax.random.split(key)[0]
        batch = jax.random.choice(key, sampled, (BATCH,))

        def loss(params):
            errors = NETWORK.apply(params, train_x[batch]) - jax.nn.one_hot(train_y[batch], 10)
            return jnp.mean(errors**2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = OPTIMIZER.update(grads, state, params)
        return (optax.apply_updates(params, updates), state, key), value

    return jax.lax.scan(step, carry, length=CHUNK)


@jax.jit
def accuracy(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the share of images with the largest output at their class."""
    return jnp.mean(jnp.argmax(NETWORK.apply(params, x), axis=-1) == y)


def train(data: Images, sampled: int, seed: int, bar: tqdm) -> dict[str, Any]:
    """Train once; return the loss before every hundredth step and the final accuracies."""
    key = jax.random.key(seed)
    params = modula.init(NETWORK, key, METHOD)
    carry, losses = (params, OPTIMIZER.init(params), key), []
    for _ in range(0, STEPS, CHUNK):
        carry, values = chunk(carry, data.train_x, data.train_y, sampled)
        losses += values.tolist()
        bar.set_postfix_str(f"loss {losses[-1]:.5f}", refresh=False)
        bar.update(CHUNK)
    return {
        "loss": losses[::100],
        "train_accuracy": float(accuracy(carry[0], data.train_x, data.train_y)),
        "test_accuracy": float(accuracy(carry[0], data.test_x, data.test_y)),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run both protocols with four seeds; return the exit status."""
    p = command(
        "studies.reproduction.hello_mnist",
        "A small MLP on handwritten digits, by both protocols.",
        "mnist",
    )
    given = parse(p, argv)
    data = images(load(p, load_mnist, given.data_dir))
    jobs = [(protocol, seed) for protocol in SAMPLED for seed in range(4)]
    runs = []
    try:
        with progress(STEPS * len(jobs)) as bar:
            for protocol, seed in jobs:
                bar.set_description(f"{protocol}, seed {seed}")
                sampled = SAMPLED[protocol] or len(data.train_y)
                run = {"protocol": protocol, "seed": seed, "sampled": sampled}
                runs.append(run | train(data, sampled, seed, bar))
    except KeyboardInterrupt:
        return interrupted()
    save(given, {"steps": STEPS, "batch": BATCH, "runs": runs})
    for protocol in SAMPLED:
        found = [100 * run["test_accuracy"] for run in runs if run["protocol"] == protocol]
        print(f"{protocol}: {found[0]:.2f} % with seed 0, {Mean.of(found).text('.2f')} %")
    print("written:", given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
