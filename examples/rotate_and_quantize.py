"""Rotate a transformer in Flax NNX before it is quantized to 4 bits (docs/quantization.md).

python -m examples.rotate_and_quantize
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import manifoldmuon as mm
from studies.datasets import batches, load_text, windows
from studies.quantization import BLOCKS, HEAD, STEP, rounded, start_of
from studies.training import begin, train

WIDTH, CONTEXT = 64, 32


def quantized_dot(x, kernel, dims, **options):
    x, kernel = rounded(x, 15, dims[0][0], STEP), rounded(kernel, 15, dims[0][1], STEP)
    return jax.lax.dot_general(x, kernel, dims, **options)


class Block(nnx.Module):
    def __init__(self, rngs, dot):
        options = {"use_bias": False, "decode": False, "rngs": rngs}
        options |= {"qkv_dot_general": dot, "out_dot_general": dot}
        self.norm1, self.norm2 = (nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(WIDTH // HEAD, WIDTH, **options)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, use_bias=False, dot_general=dot, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, use_bias=False, dot_general=dot, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


def gpt(words, dot=jax.lax.dot_general):
    rngs = nnx.Rngs(0)
    layers = [nnx.Embed(words, WIDTH, rngs=rngs), *(Block(rngs, dot) for _ in range(BLOCKS))]
    layers += [nnx.RMSNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, words, use_bias=False, rngs=rngs)]
    layers[0].embedding[...] += 4.0 * (jnp.arange(WIDTH) < 4)  # outliers, as in large models
    return nnx.Sequential(*layers)


def fold(model, rotations):
    """Return an equal model with gains and rotations in its weights."""
    r1, (embed, *blocks, norm, head) = rotations["R1"], (model := nnx.clone(model)).layers
    readers = [(norm, head), *((block.norm2, block.up) for block in blocks)]
    embed.embedding[...] @= r1
    for block, r2 in zip(blocks, rotations["R2"], strict=True):
        x = block.attention
        readers += [(block.norm1, reader) for reader in (x.query, x.key, x.value)]
        x.value.kernel[...] = jnp.einsum("dhk,hkl->dhl", x.value.kernel[...], r2)
        x.out.kernel[...] = jnp.einsum("hkl,hkd->hld", r2, x.out.kernel[...] @ r1)
        block.down.kernel[...] @= r1
    for norm, reader in readers:  # kernels are (in, ...)
        reader.kernel[...] = jnp.tensordot(r1.T * norm.scale[...], reader.kernel[...], 1)
    for norm, _ in readers:
        norm.scale[...] = jnp.ones(WIDTH)
    return model


def learn(tx, start, loss, tokens, steps):
    pairs = windows(tokens, batches(0, len(tokens) - CONTEXT, steps, 16), CONTEXT)
    return jax.jit(lambda start: train(tx, loss, begin(tx, start), pairs))(start)[0][0]


def main(steps: int = 1000, learning_steps: int = 100) -> dict[str, float]:
    """Train, learn rotations, fold, quantize; print and return losses and the fold's error."""
    text = load_text("pydoc", None)
    graph, params = nnx.split(gpt(len(text.characters)))
    graph4 = nnx.graphdef(gpt(len(text.characters), quantized_dot))

    def loss(params, pair, graph=graph):
        logits = nnx.merge(graph, params)(pair[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, pair[1]).mean()

    def quantized(rotations, pair):
        return loss(nnx.state(fold(model, rotations)), pair, graph4)

    model = nnx.merge(graph, learn(optax.adam(3e-3), params, loss, text.train, steps))
    none, start = (start_of(name, jax.random.key(1), WIDTH) for name in ("none", "Hadamard"))
    geometry = {"R1": mm.manifolds.Orthogonal(), "R2": mm.manifolds.Orthogonal().stacked(2)}
    tx = mm.optim.riemannian_sgd(optax.linear_schedule(0.5, 0.0, learning_steps), geometry, 0.9)
    learned = learn(tx, start, quantized, text.train, learning_steps)
    held = windows(text.validation, jnp.arange(256) * CONTEXT, CONTEXT)
    before, after = model(held[0]), fold(model, learned)(held[0])
    error = jnp.abs(after - before).max() / jnp.abs(before).max()
    assert error < 1e-5, f"the fold has changed the network by {error:.0e}"
    found = {"error of the fold": error, "full precision": loss(nnx.state(model), held)}
    for name, rotations in {"4 bits": none, "Hadamard": start, "learned": learned}.items():
        found[name] = quantized(rotations, held)
    print(*(f"{name}: {value:.4g}" for name, value in found.items()), sep="\n")
    return {name: float(value) for name, value in found.items()}


if __name__ == "__main__":
    main()
