# %% [markdown]
# # A first constrained network
#
# We train a small network on handwritten digits, twice: once freely, and once with every weight
# matrix on the Stiefel manifold, where all singular values stay 1. In the end both read digits
# equally well, but for the constrained one we know before training how much its answers can
# change.
#
# You need `pip install '.[studies]'`, which brings the digits and the pictures.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits

import manifoldmuon as mm
from manifoldmuon.manifolds import Euclidean, Stiefel

pixels, digits = load_digits(return_X_y=True)  # 1,797 images of 8 x 8 pixels
order = np.random.default_rng(0).permutation(len(digits))
images = jnp.asarray((pixels - pixels.mean()) / pixels.std(), jnp.float32)[order]
labels = jnp.asarray(digits)[order]
train, test = slice(0, 1440), slice(1440, None)

# %% [markdown]
# ## The network
#
# Plain arrays in a plain dictionary. Matrices are `(fan_out, fan_in)`; kernels of Flax are
# `(fan_in, fan_out)`, and take `Stiefel().transposed()`. The output is multiplied by 4, because
# cross-entropy wants confident answers and a network with a small Lipschitz constant gives
# cautious ones.


# %%
def apply(params, x):
    x = jax.nn.relu(x @ params["in"]["w"].T + params["in"]["b"])
    x = jax.nn.relu(x @ params["hidden"]["w"].T + params["hidden"]["b"])
    return 4 * x @ params["out"]["w"].T


def loss(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(apply(params, x), y).mean()


shapes = {
    "in": {"w": jnp.zeros((64, 64)), "b": jnp.zeros(64)},
    "hidden": {"w": jnp.zeros((64, 64)), "b": jnp.zeros(64)},
    "out": {"w": jnp.zeros((10, 64))},
}

# %% [markdown]
# ## Where each weight lives
#
# The *geometry* gives each parameter a manifold, by path. Nothing is guessed from a shape: a
# parameter that no pattern matches is an error that names it. The table shows shape, manifold and
# axes of every parameter: read it before you train.

# %%
geometry = mm.optim.by_path({"*/w": Stiefel(), "*/b": Euclidean()})
start = mm.optim.init_tree(geometry, jax.random.key(0), shapes)
print(mm.optim.tabulate(geometry, start))

# %% [markdown]
# ## Training
#
# `manifold_muon` is an Optax transformation like any other. Adam starts from the same weights and
# sees the same batches. Every ten steps we look at the singular values.


# %%
def run(tx, params):
    @jax.jit
    def ten_steps(carry, key):
        def step(carry, key):
            params, state = carry
            batch = jax.random.randint(key, (128,), 0, 1440)
            grads = jax.grad(loss)(params, images[batch], labels[batch])
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, carry, jax.random.split(key, 10))[0]

    carry, spectra = (params, tx.init(params)), []
    for key in jax.random.split(jax.random.key(1), 30):
        spectra.append([np.linalg.svd(layer["w"], compute_uv=False) for layer in carry[0].values()])
        carry = ten_steps(carry, key)
    return *carry, [np.concatenate(layers) for layers in spectra]


def falling(rate):
    return optax.linear_schedule(rate, 0.0, 300)


free, _, free_spectra = run(optax.adam(falling(0.005)), start)
kept, state, kept_spectra = run(mm.optim.manifold_muon(falling(0.1), geometry), start)

for name, params in {"free": free, "kept": kept}.items():
    right = (apply(params, images[test]).argmax(-1) == labels[test]).mean()
    print(f"{name}: {100 * right:.1f} % of the test images")

# %% [markdown]
# The optimizer's state holds the gap of every direction that it took: how much steeper the
# steepest one might have been at most. The weights are on their manifold, up to rounding.

# %%
for path, gap in mm.optim.monitor(state)["gap"].items():
    print(f"{path:8} {gap:.0e}")
distances = mm.optim.monitor_distance(geometry, kept)
print(f"distance from the manifolds: {max(distances.values()):.0e} at most")

# %% [markdown]
# ## What was gained
#
# No change of an image moves the answers by more than the product of the layers' largest singular
# values, times 4. For the constrained network that product is 4, already before training. Divide
# the margin between the two largest answers by it, and by $\sqrt 2$ because two answers move
# against each other: no change smaller than this can make it read as something else.


# %%
def certified(params):
    """For each test image the length of change that it is safe from; 0 where it is misread."""
    bound = 4 * np.prod([np.linalg.norm(layer["w"], 2) for layer in params.values()])
    logits, y = np.array(apply(params, images[test])), np.array(labels[test])
    own = np.take_along_axis(logits, y[:, None], 1)[:, 0]
    np.put_along_axis(logits, y[:, None], -np.inf, 1)
    return bound, np.maximum(own - logits.max(1), 0) / (np.sqrt(2) * bound)


# %% alt="Images that stay read correctly over the size of a change: more on the manifold."
colours = {"Adam": "#C58000", "manifold Muon": "#0072B2"}
figure, panel = plt.subplots(figsize=(4, 2.6), layout="constrained")
for (name, colour), params in zip(colours.items(), (free, kept), strict=True):
    bound, radii = certified(params)
    print(f"{name}: no change is magnified more than {bound:.1f} times")
    shares = 100 * np.linspace(1, 0, len(radii))
    panel.plot(np.sort(radii), shares, color=colour, linewidth=3, label=name)
panel.set(xlabel="size of the change", ylabel="still right (%)")
figure.legend(loc="outside upper center", ncols=2, frameon=False)

# %% [markdown]
# The singular values of all weights during training:

# %% alt="The range of the singular values over the steps: it widens under Adam, and stays 1."
figure, panel = plt.subplots(figsize=(4, 2.6), layout="constrained")
for (name, colour), spectra in zip(colours.items(), (free_spectra, kept_spectra), strict=True):
    low, high = [x.min() for x in spectra], [x.max() for x in spectra]
    steps = 10 * np.arange(len(spectra))
    panel.fill_between(steps, low, high, color=colour, edgecolor=colour, linewidth=3, label=name)
panel.set(xlabel="step", ylabel="singular values", ylim=(0, None))
figure.legend(loc="outside upper center", ncols=2, frameon=False)

# %% [markdown]
# ## From here
#
# * [Choosing set, solver and retraction](choosing.md) shows what each choice changes.
# * [An architecture and its optimizer](architecture.md) builds the network from modules, which
#   know these bounds by themselves.
# * [Transformations](../transformations.md) has paths and layouts for Flax, Equinox and Haiku.
