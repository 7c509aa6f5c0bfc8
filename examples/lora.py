"""LoRA in Flax NNX with orthonormal factors: no jump at step 0, adapters merge back.

python -m examples.lora
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import manifoldmuon as mm
from manifoldmuon.frameworks.nnx import lora_geometry

WIDTH, RANK = 32, 4


class Net(nnx.Module):
    """Two linear layers with adapters."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.LoRALinear(8, WIDTH, lora_rank=RANK, rngs=rngs)
        self.down = nnx.LoRALinear(WIDTH, 8, lora_rank=RANK, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def merge(model: nnx.Module) -> None:
    """Add each adapter to its kernel, in float32, and reset the adapter to zero."""
    for _, layer in nnx.iter_graph(model):
        if isinstance(layer, nnx.LoRALinear):
            a, b = (jnp.float32(w[...]) for w in (layer.lora.lora_a, layer.lora.lora_b))
            kernel = layer.kernel[...]
            layer.kernel[...] = (jnp.float32(kernel) + a @ b).astype(kernel.dtype)
            layer.lora.lora_b[...] = jnp.zeros_like(layer.lora.lora_b[...])


def main(steps: int = 200) -> dict[str, float]:
    """Fine-tune to another function; print and return losses, distance and changes of outputs."""
    model = Net(nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (256, 8))
    target = jnp.roll(model(x), 1, axis=-1)
    before = model(x)
    geometry = lora_geometry(model)
    nnx.update(model, mm.optim.project_tree(geometry, nnx.state(model, nnx.LoRAParam)))
    found = {"jump": float(jnp.abs(model(x) - before).max())}  # zero, because B is zero

    tx = mm.optim.manifold_muon(optax.cosine_decay_schedule(0.1, steps), geometry)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)  # the base is frozen

    def loss(model):
        return jnp.mean(jnp.square(model(x) - target))

    @nnx.jit
    def step(model, optimizer):
        value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
        optimizer.update(model, grads)
        return value

    losses = [float(step(model, optimizer)) for _ in range(steps)]
    found |= {"first loss": losses[0], "last loss": losses[-1]}
    distances = mm.optim.monitor_distance(geometry, nnx.state(model, nnx.LoRAParam))
    found["distance"] = float(max(distances.values()))
    adapted = model(x)
    merge(model)
    found["merged"] = float(jnp.abs(model(x) - adapted).max())
    for name, value in found.items():
        print(f"{name:10} {value:.2e}")
    return found


if __name__ == "__main__":
    main()
