"""Flax Linen: scanned blocks with fused attention heads, and an embedding tied to the head.

The model reads the 64 pixels of a digit in order, and predicts the next of 17 intensities.

python -m examples.frameworks.linen
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import manifoldmuon as mm
from examples.frameworks.digits import Trained, cross_entropy
from manifoldmuon.frameworks.linen import geometry
from manifoldmuon.manifolds import EmbeddingRows, Euclidean, Stiefel
from manifoldmuon.manifolds.solvers import ProjectedPolar
from studies.datasets import batches, load_digits

WIDTH, HEADS, DEPTH, LEVELS, PIXELS = 32, 4, 2, 17, 64


class Block(nn.Module):
    """Attention and a feed-forward layer, with the signature that `nn.scan` needs."""

    @nn.compact
    def __call__(self, x, _):
        mask = nn.make_causal_mask(x[..., 0])
        x = x + nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x), mask=mask)
        hidden = nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH)(hidden), None


class Pixels(nn.Module):
    """Predict scores of the next intensity."""

    @nn.compact
    def __call__(self, tokens):
        table = nn.Embed(LEVELS, WIDTH, name="levels_embed")
        positions = nn.Embed(PIXELS, WIDTH, name="positions_embed")
        x = table(tokens) + positions(jnp.arange(tokens.shape[-1]))
        blocks = nn.scan(
            Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=DEPTH
        )(name="blocks")
        x, _ = blocks(x, None)
        return table.attend(nn.LayerNorm(name="last_norm")(x)) / WIDTH**0.5


def train(steps: int = 60) -> Trained:
    """Train on the digits."""
    images = load_digits().train_x.reshape(-1, PIXELS)
    tokens = jnp.asarray((images * 16).astype("int32"))
    model = Pixels()
    matrix = Stiefel(solver=ProjectedPolar())
    options: Any = {"per_head": True, "embedding": EmbeddingRows(), "rest": Euclidean()}
    spaces = {"params": geometry(model, (tokens[:1, :-1],), matrix, **options)}
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens[:1, :-1])
    table = mm.optim.tabulate(spaces, shapes)

    @jax.jit
    def init(key):
        return mm.optim.project_tree(spaces, model.init(key, tokens[:1, :-1]))

    tx = mm.optim.manifold_muon(optax.linear_schedule(0.1, 0.0, steps), spaces)

    @jax.jit
    def step(params, state, batch):
        def loss(params):
            logits: Any = model.apply(params, batch[:, :-1])
            return cross_entropy(logits, batch[:, 1:])

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = init(jax.random.key(0))
    state, losses = jax.jit(tx.init)(params), []
    for chosen in batches(0, len(tokens), steps, 32):
        params, state, loss = step(params, state, tokens[chosen])
        losses.append(float(loss))
    measure = jax.jit(lambda params: mm.optim.monitor_distance(spaces, params))
    return Trained(losses, measure(params), table)


if __name__ == "__main__":
    print(train())
