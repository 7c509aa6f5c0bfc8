"""A character GPT with every matrix on a Stiefel manifold; prints generated text.

python -m examples.gpt    # two minutes; python -m studies gpt has seeds, records, Shakespeare
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import manifoldmuon as mm
from studies.datasets import batches, load_pydoc_topics, split_text, windows
from studies.gpt.network import bounded_gpt
from studies.gpt.sampling import sample

CONTEXT, BATCH = 64, 16


def main(steps: int = 600, width: int = 64) -> jax.Array:
    """Train on Python's help topics, print losses and a sample; return the losses."""
    text = split_text("help topics", load_pydoc_topics())
    net = bounded_gpt(
        len(text.characters), width, 4, 2, attention_scale=16.0, final_scale=8.0, part=0.25
    ).constrained()
    tx = mm.optim.manifold_muon(optax.linear_schedule(0.03, 0.0, steps), net.geometry())
    train = jnp.asarray(text.train)

    def loss(params, starts):
        inputs, targets = windows(train, starts, CONTEXT)
        logits = net.apply(params, inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    def step(carry, starts):
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params, starts)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    params = net.init(jax.random.key(0))
    order = jnp.asarray(batches(0, len(train) - CONTEXT, steps, BATCH))
    run = jax.jit(lambda params: jax.lax.scan(step, (params, tx.init(params)), order))
    (params, _), losses = run(params)
    print(f"cross-entropy: {losses[0]:.3f} at first, {losses[-20:].mean():.3f} at the end")
    prompt = jnp.asarray(text.validation[:CONTEXT])
    drawn = sample(net, params, jax.random.key(1), prompt, CONTEXT, 300, 0.8)
    print(text.decode(np.asarray(drawn)))
    return losses


if __name__ == "__main__":
    main()
