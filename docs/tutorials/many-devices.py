# %% [markdown]
# # Many devices
#
# On a mesh of N devices each should do an N-th of the optimizer's work. For Muon and its kin that
# is not a matter of course: their iterations multiply whole matrices, and a compiler that divides
# those makes every product wait for the network. Here whole matrices are given to devices
# instead, and all it takes is to name the mesh. Eight devices on one processor are enough to see
# it.

# %%
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import manifoldmuon as mm
from manifoldmuon.manifolds import Stiefel

mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
print(jax.device_count(), "devices of kind", jax.devices()[0].device_kind)

# %% [markdown]
# ## The weights
#
# Sixteen layers, each a matrix of 256 x 64. Their rows are divided over the devices, as in fully
# sharded training: no device holds a whole matrix.

# %%
sharding = NamedSharding(mesh, PartitionSpec("data", None))
names = [f"layer{k:02}" for k in range(16)]
shapes = {name: jnp.zeros((256, 64)) for name in names}
params = mm.optim.init_tree(Stiefel(), jax.random.key(0), shapes)
params = jax.device_put(params, sharding)
grads = {name: jnp.sin(1000 * w) for name, w in params.items()}
print("one device holds", params["layer00"].addressable_shards[0].data.shape, "of", (256, 64))

# %% [markdown]
# ## One word
#
# The step is the ordinary one. `jax.set_mesh` tells it where it runs.

# %%
tx = mm.optim.manifold_muon(0.1, Stiefel())
with jax.set_mesh(mesh):
    state = tx.init(params)
    step = jax.jit(tx.update).lower(grads, state, params).compile()
    updates, state = step(grads, state, params)
print("updates are divided like the weights:", updates["layer00"].sharding.spec)

# %% [markdown]
# The same step on one device gives the same update, to rounding:

# %%
alone = jax.device_put((grads, params), jax.devices()[0])
once = jax.jit(tx.update).lower(alone[0], tx.init(alone[1]), alone[1]).compile()
expected, _ = once(alone[0], tx.init(alone[1]), alone[1])
both = jax.device_get((updates, expected))
print(
    "largest difference:",
    max(abs(a - b).max() for a, b in zip(*map(dict.values, both), strict=True)),
)

# %% [markdown]
# ## What each device does
#
# The compiler counts the operations of one device. Without the mesh it divides the matrices as
# well as it can; the bars show both, as a share of what a single device would do.


# %% alt="Work of one of eight devices: an eighth, where the mesh is named."
def operations(compiled):
    return compiled.cost_analysis()["flops"]


unnamed = jax.jit(tx.update).lower(grads, tx.init(params), params).compile()
work = {"one device": once, "eight, mesh not named": unnamed, "eight, under set_mesh": step}
share = {name: operations(compiled) / operations(once) for name, compiled in work.items()}
figure, panel = plt.subplots(figsize=(6, 1.9), layout="constrained")
bars = panel.barh(list(share), list(share.values()), color=["#767676", "#E69F00", "#0072B2"])
panel.bar_label(bars, fmt="%.2f", padding=3)
panel.set(xlabel="operations of one device, relative", xlim=(0, 1.15))
panel.invert_yaxis()
panel.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# ## From here
#
# * [Speed and devices](../transformations.md#speed-and-devices) says what travels between
#   devices.
# * [Scale](../scale.md) has the same for models up to 64 billion parameters, compiled for slices
#   of TPUs.
