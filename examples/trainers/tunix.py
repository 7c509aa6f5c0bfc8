"""Tunix: LoRA with orthonormal factors, trained by `PeftTrainer`.

python -m examples.trainers.tunix    # after pip install google-tunix
"""

# pyright: reportMissingImports=false

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import manifoldmuon as mm
from manifoldmuon.frameworks.nnx import lora_geometry

WORDS, WIDTH, RANK = 17, 32, 4


class Model(nnx.Module):
    """Predict the next token from the current token; the linear layers have adapters."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.up = nnx.LoRALinear(WIDTH, 2 * WIDTH, lora_rank=RANK, rngs=rngs)
        self.down = nnx.LoRALinear(2 * WIDTH, WORDS, lora_rank=RANK, rngs=rngs)

    def __call__(self, tokens):
        return self.down(nnx.relu(self.up(self.embed(tokens))))


def loss_fn(model: Model, input_tokens: Any, input_mask: Any) -> jax.Array:
    """Return the mean cross-entropy of the unmasked next tokens."""
    losses = optax.softmax_cross_entropy_with_integer_labels(
        model(input_tokens[:, :-1]), input_tokens[:, 1:]
    )
    return (losses * input_mask[:, 1:]).sum() / input_mask[:, 1:].sum()


def batches(steps: int):
    """Yield sequences that count upwards by three."""
    from tunix.sft import peft_trainer

    first = np.random.default_rng(0).integers(WORDS, size=(steps, 8, 1))
    for start in first:
        tokens = (start + 3 * np.arange(16)) % WORDS
        yield peft_trainer.TrainingInput(jnp.asarray(tokens), jnp.ones(tokens.shape))


def main(steps: int = 60) -> tuple[float, float, float]:
    """Fine-tune; return the loss before and after, and the largest distance from a manifold."""
    from tunix.sft import peft_trainer

    model = Model(nnx.Rngs(0))
    (judge,) = batches(1)
    before = loss_fn(model, judge.input_tokens, judge.input_mask)
    geometry = lora_geometry(model)
    # Make the first factors orthonormal; outputs stay, as the second factors are 0.
    nnx.update(model, mm.optim.project_tree(geometry, nnx.state(model, nnx.LoRAParam)))
    tx = mm.optim.manifold_muon(optax.cosine_decay_schedule(0.1, steps), geometry)
    config = peft_trainer.TrainingConfig(eval_every_n_steps=steps + 1, max_steps=steps)
    trainer = peft_trainer.PeftTrainer(model, tx, config).with_loss_fn(loss_fn)
    trainer = trainer.with_gen_model_input_fn(
        lambda x: {"input_tokens": x.input_tokens, "input_mask": x.input_mask}
    )
    trainer.train(batches(steps))
    after = loss_fn(model, judge.input_tokens, judge.input_mask)
    distances = mm.optim.monitor_distance(geometry, nnx.state(model, nnx.LoRAParam))
    far = float(max(distances.values()))
    print(f"loss {before:.3f} -> {after:.3f}; factors off their manifolds by {far:.1e} at most")
    return float(before), float(after), far


if __name__ == "__main__":
    main()
