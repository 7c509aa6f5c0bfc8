# %% [markdown]
# # An architecture and its optimizer
#
# A learning rate that is right for a narrow network is wrong for a wide one, unless steps are
# measured in a norm that knows the architecture. Here a network is built from modules, its norm
# and its optimizer follow, and a rate that was found at width 32 is still right at width 1024.
#
# You need `pip install '.[studies]'`, which brings the digits and the pictures.

# %%
from functools import partial

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits

import manifoldmuon as mm
from manifoldmuon.modules import Linear, ReLU

# %% [markdown]
# ## A network is a formula
#
# `@` composes, `**` repeats, `*` scales. Printing shows a tree with the sensitivity of each module
# to its input, and its share of a step.


# %%
def network(width):
    return Linear(10, width) @ ReLU() @ Linear(width, 64)


print(network(64))

# %% [markdown]
# `modular` is the optimizer that follows: momentum, the steepest direction of every layer in its
# own norm, and each layer's share of the step. Measured in the network's norm, every step has the
# length of the learning rate.

# %%
net = network(64)
params = net.init(jax.random.key(0))
tx = mm.optim.modular(0.1, net)
x = jax.random.normal(jax.random.key(1), (32, 64))
grads = jax.grad(lambda w: (net.apply(w, x) ** 2).mean())(params)
updates, _ = tx.update(grads, tx.init(params), params)
print(f"length of a step: {net.norm(updates):.4f}")

# %% [markdown]
# ## The rate stays where it is
#
# Three widths, rates a factor of two apart, a hundred steps on the digits; once with `modular`,
# once with Adam from the same weights. All rates train at once, under `jax.vmap`.

# %%
pixels, digits = load_digits(return_X_y=True)
images = jnp.asarray((pixels - pixels.mean()) / pixels.std(), jnp.float32)
labels = jnp.asarray(digits)
batches = jax.random.randint(jax.random.key(2), (100, 128), 0, len(labels))


def final_losses(net, optimizer, rates):
    def loss(params, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(net.apply(params, x), y).mean()

    def train(rate):
        tx = optimizer(lambda step: rate * (1 - step / 100))

        def step(carry, batch):
            params, state = carry
            grads = jax.grad(loss)(params, images[batch], labels[batch])
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        params = net.init(jax.random.key(0))
        params, _ = jax.lax.scan(step, (params, tx.init(params)), batches)[0]
        return loss(params, images, labels)

    return np.asarray(jax.jit(jax.vmap(train))(rates))


# %% alt="The best learning rate over three widths: it stays with modular and falls with Adam."
figure, panel = plt.subplots(figsize=(4, 2.6), layout="constrained")
ranges = {"modular": 2.0 ** np.arange(-4, 1), "Adam": 2.0 ** np.arange(-7, -2)}
widths = (32, 256, 1024)
for (name, rates), colour in zip(ranges.items(), ("#0072B2", "#767676"), strict=True):
    best = []
    for width in widths:
        net = network(width)
        optimizer = optax.adam if name == "Adam" else partial(mm.optim.modular, architecture=net)
        losses = final_losses(net, optimizer, rates)
        best.append(rates[np.nanargmin(losses)])
        print(f"{name}, width {width:4}: loss {np.nanmin(losses):.3f} at rate {best[-1]:.4g}")
    panel.loglog(widths, best, "o-", color=colour, linewidth=3, label=name)
panel.set(xlabel="width", ylabel="best rate", xticks=widths, xticklabels=widths, ylim=(4e-3, 2))
panel.minorticks_off()
panel.legend(frameon=False)

# %% [markdown]
# Adam's best rate falls by a factor of four, `modular`'s stays within one step of the grid. A
# [study](../lab/learning-rate-transfer.md) measures this over widths and depths and many seeds,
# for transformers too.
#
# ## What the architecture promises
#
# `constrained` puts every weight on a manifold. Then bounds hold for all weights that training
# could ever find: on the output, and on how fast it can change.

# %%
print(mm.bounds.bound(network(64).constrained()))

# %% [markdown]
# ## From here
#
# * [The modular norm](../math/modules.md) has the rules of the algebra and where they come from.
# * A model of Flax or Equinox gets the same by [declaring its
#   weights](../transformations.md#optimizers-from-architectures).
# * [Bounds](../math/bounds.md) has what is proved, and its assumptions.
