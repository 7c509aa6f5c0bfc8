# %% [markdown]
# # Train on eight devices
#
# A training loop that is data-parallel, then fully sharded (FSDP), then killed and restarted from a
# checkpoint on another layout. The eight devices here are slices of one CPU, so that it runs
# anywhere: on eight GPUs or TPUs leave out the first four lines. You need
# `pip install '.[examples]'`; it takes a minute, most of it compilation.

# %%
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import tempfile
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from sklearn.datasets import load_digits

import manifoldmuon as mm
from manifoldmuon.checkpoints import Checkpoints
from manifoldmuon.manifolds import Euclidean, Stiefel

mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
print(jax.device_count(), "devices")

# %% [markdown]
# ## A network and its data
#
# Handwritten digits, and a residual network: a stack of sixteen matrices on the Stiefel manifold,
# which `lax.scan` runs through, between two free ones. `None` gives biases to Adam.

# %%
pixels, digits = load_digits(return_X_y=True)
images, labels = jnp.float32(pixels)[:1792] / 16, jnp.asarray(digits)[:1792]
geometry = {
    "first": Euclidean(mm.norms.RMSToRMS()),
    "blocks": {"w": Stiefel().stacked(), "b": None},
    "head": Euclidean(mm.norms.RMSToRMS()),
}
shapes = {
    "first": jnp.zeros((64, 64)),
    "blocks": {"w": jnp.zeros((16, 64, 64)), "b": jnp.zeros((16, 64))},
    "head": jnp.zeros((10, 64)),
}
STEPS = 60
rate = optax.linear_schedule(0.05, 0.0, STEPS)
tx = mm.optim.manifold_muon(rate, geometry, rest=optax.adam(1e-3))


def apply(params, x):
    def block(x, layer):
        return x + jax.nn.relu(x @ layer["w"].T + layer["b"]) / 16, None

    x, _ = jax.lax.scan(block, x @ params["first"].T, params["blocks"])
    return x @ params["head"].T


def loss(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(apply(params, x), y).mean()


@jax.jit
def step(params, state, x, y):
    value, grads = jax.value_and_grad(loss)(params, x, y)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


def batch(count):
    rows = jax.random.randint(jax.random.key(count), (256,), 0, 1440)
    return images[rows], labels[rows]


def train(params, state, first, last, place):
    losses = []
    for count in range(first, last):
        params, state, value = step(params, state, *place(batch(count)))
        losses.append(float(value))
    return params, state, losses


start = mm.optim.init_tree(geometry, jax.random.key(0), shapes)
*one, alone = train(start, tx.init(start), 0, STEPS, lambda data: data)
print(f"one device: loss {alone[0]:.3f} at first, {alone[-1]:.3f} at the end")

# %% [markdown]
# ## Data-parallel
#
# Every device holds all weights and an eighth of the batch. The only other change is
# `jax.set_mesh`: inside it each device solves its own share of the matrices instead of all of
# them.


# %%
def divided(tree):
    """Divide the rows of each matrix by eight, or its columns where eight does not divide rows."""

    def spec(x):
        rows = x.ndim > 1 and x.shape[-2] % 8 == 0
        last = ("data", None) if rows else ("data",)
        return NamedSharding(mesh, PartitionSpec(*[None] * (x.ndim - len(last)), *last))

    return jax.tree.map(spec, tree)


everywhere = NamedSharding(mesh, PartitionSpec())


def place(data):
    return jax.device_put(data, NamedSharding(mesh, PartitionSpec("data")))


with jax.set_mesh(mesh):
    params = jax.device_put(start, everywhere)
    *_, parallel = train(params, tx.init(params), 0, STEPS, place)
print(f"data-parallel: {parallel[-1]:.3f} at the end")
print(f"largest difference of a loss: {np.abs(np.subtract(alone, parallel)).max():.0e}")

# %% [markdown]
# ## FSDP
#
# The matrices are divided as well: no device holds a whole one. The optimizer's state is divided
# like the parameters. We save at step 30, and stop there as if the job had been killed.

# %%
folder = Path(tempfile.mkdtemp()) / "run"
table = mm.optim.tabulate(geometry, start)
with jax.set_mesh(mesh), Checkpoints(folder, ocp.CheckpointManagerOptions()) as checkpoints:
    params = jax.device_put(start, divided(start))
    params, state, before = train(params, tx.init(params), 0, 30, place)
    checkpoints.save(30, {"params": params, "state": state}, table)
w = params["blocks"]["w"]
print("one device holds", w.addressable_shards[0].data.shape, "of", w.shape)

# %% [markdown]
# ## Restart, on another layout
#
# `restore` takes the tree with which the run would begin; its shapes and shardings say what to
# restore, and where: here on two devices in place of eight. A damaged checkpoint or another
# geometry would be refused in one line.

# %%
pair = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
with jax.set_mesh(pair), Checkpoints(folder, ocp.CheckpointManagerOptions()) as checkpoints:
    params = jax.device_put(start, NamedSharding(pair, PartitionSpec()))
    found = checkpoints.restore({"params": params, "state": tx.init(params)}, table)
    assert found is not None  # the folder holds a step
    sharding = NamedSharding(pair, PartitionSpec("data"))
    params, state, after = train(
        found.tree["params"],
        found.tree["state"],
        found.step,
        STEPS,
        lambda data: jax.device_put(data, sharding),
    )
restarted = before + after
print(f"restarted from step {found.step}: {restarted[-1]:.3f} at the end")
print(f"largest difference of a loss: {np.abs(np.subtract(alone, restarted)).max():.0e}")
right = (apply(params, images[1440:]).argmax(-1) == labels[1440:]).mean()
distances = mm.optim.monitor_distance(geometry, params)
print(f"test accuracy {right:.1%}, distance from the manifold {max(distances.values()):.0e}")

# %% alt="Loss over 60 steps: one device, eight data-parallel, FSDP and a restart lie on one line."
figure, panel = plt.subplots(figsize=(6, 3), layout="constrained")
panel.plot(alone, color="#767676", linewidth=6, alpha=0.4, label="one device")
panel.plot(parallel, color="#C58000", linewidth=3, label="eight, data-parallel")
panel.plot(restarted, "--", color="#0072B2", linewidth=1.5, label="FSDP, restarted on two")
panel.axvline(30, color="#767676", linewidth=0.8)
panel.set(xlabel="step", ylabel="training loss")
panel.legend(frameon=False)

# %% [markdown]
# ## What each device does
#
# The compiler counts the operations of one device, here for the optimizer alone on larger matrices:
# sixteen of 256 x 64 with divided rows. Without `set_mesh` it divides every product as well as it
# can.


# %% alt="Work of one of eight devices: an eighth, where the mesh is named."
large = {f"layer{k:02}": jnp.zeros((256, 64)) for k in range(16)}
large = mm.optim.init_tree(Stiefel(), jax.random.key(0), large)
solo = mm.optim.manifold_muon(0.1, Stiefel())


def operations(tree):
    compiled = jax.jit(solo.update).lower(jax.tree.map(jnp.sin, tree), solo.init(tree), tree)
    counted = compiled.compile().cost_analysis() or {}
    return counted["flops"]


rows = jax.device_put(large, NamedSharding(mesh, PartitionSpec("data", None)))
work = {"one device": operations(large)}
with warnings.catch_warnings(action="ignore"):  # `init` says that the mesh is not set
    work["eight, no mesh"] = operations(rows)
with jax.set_mesh(mesh):
    work["eight, set_mesh"] = operations(rows)
share = {name: count / work["one device"] for name, count in work.items()}
figure, panel = plt.subplots(figsize=(4, 1.9), layout="constrained")
bars = panel.barh(list(share), list(share.values()), color=["#767676", "#C58000", "#0072B2"])
panel.bar_label(bars, fmt="%.2f", padding=3)
panel.set(xlabel="work of a device", xlim=(0, 1.3))
panel.invert_yaxis()

# %% [markdown]
# ## In your framework
#
# | | what to divide |
# |---|---|
# | Flax NNX | `nnx.get_partition_spec(nnx.state(model))`, then `jax.device_put` of the state |
# | Flax Linen | `nn.with_partitioning` boxes pass through; `nn.get_partition_spec` |
# | Equinox | `eqx.filter_shard(model, sharding)` |
#
# The optimizer needs no change: its state follows the parameters.
#
# * [Speed and devices](../transformations.md#speed-and-devices): what travels between devices.
# * [Several processes](../several-processes.md): the same over several hosts.
# * [Checkpoints](../checkpoints.md): what is saved, and what is refused.
# * [Scale](../scale.md): the same up to 64 billion parameters, compiled for slices of TPUs.
# * [Known limits](../known-limits.md): a deadlock of some jaxlib versions on CPUs.
