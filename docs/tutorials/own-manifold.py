# %% [markdown]
# # Your own manifold
#
# Whoever photographs digits under changing light wants a network that does not mind brightness. A
# neuron ignores a constant that is added to all of its inputs if its weights add up to zero. Let
# them have a fixed length, too, and this is *weight standardization* (Qiao et al.,
# arXiv:1903.10520): there it is a formula in the forward pass, here it is a manifold.
#
# $$ \mathcal M = \{\, w \in \mathbb R^n : \textstyle\sum_i w_i = 0,\ \|w\|_2 = 1 \,\} $$
#
# You need `pip install '.[studies]'`, which brings the digits and the pictures.

# %%
import dataclasses

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits

import manifoldmuon as mm
from manifoldmuon.manifolds import Euclidean, Hypersphere, Manifold, Stiefel
from manifoldmuon.norms import Frobenius
from manifoldmuon.testing import check_manifold

# %% [markdown]
# ## The class
#
# The set is a sphere inside the space of vectors that add up to zero. A sphere is there already;
# all that is left is to subtract means. A gradient without its mean is tangent to that space, so
# the sphere's steepest direction is ours, too. Its mean is subtracted once more, because rounding
# is as large as the direction where a gradient is nearly normal to the set.
#
# The last axis of an array is one point, all axes before it are copies: a matrix is as many
# points as it has rows, and each neuron is standardized by itself.


# %%
def centred(x):
    return x - x.mean(-1, keepdims=True)


@dataclasses.dataclass(frozen=True)
class Standardized(Manifold):
    """Vectors of length 1 whose entries add up to zero."""

    sphere: Hypersphere = Hypersphere()

    @property
    def ndim(self):
        return 1

    @property
    def norm(self):
        return Frobenius(1)

    def check_shape(self, shape):
        if not shape or shape[-1] < 3:  # with two entries the set is two points
            raise ValueError(f"a row needs three entries or more; got the shape {shape}")

    def project(self, point):
        rest = centred(centred(point))  # the first mean may be large, and leave its rounding
        # Of a row of equal entries every point of the set is equally far: it gets one of them.
        first = centred((jnp.arange(point.shape[-1]) == 0).astype(point.dtype))
        return self.sphere.project(jnp.where((rest == 0).all(-1, keepdims=True), first, rest))

    def project_tangent(self, point, vector):
        return self.sphere.project_tangent(point, centred(vector))

    def steepest(self, point, grad, dual=()):
        found = self.sphere.steepest(point, centred(grad), dual)
        return found._replace(direction=centred(found.direction))

    def retract(self, point, vector):
        return self.sphere.retract(point, vector)

    def random_point(self, key, shape, dtype):
        return self.project(jax.random.normal(key, shape, dtype))

    def distance(self, point):
        return jnp.maximum(self.sphere.distance(point), abs(point.sum(-1)))


# %% [markdown]
# ## Does it keep the laws?
#
# `check_manifold` draws points and gradients of all sizes and tries every law of the interface:
# projections are idempotent, directions are tangent, steps return to the set to first order,
# stacks give what loops give. A law that is broken is named.

# %%
check_manifold(Standardized(), (3, 16), jax.random.key(0), thorough=False)

# %% [markdown]
# To see the check at work, leave out the means: these directions are steepest on the sphere alone.


# %%
class Careless(Standardized):
    def steepest(self, point, grad, dual=()):
        return self.sphere.steepest(point, grad, dual)


try:
    check_manifold(Careless(), (3, 16), jax.random.key(0), thorough=False)
except AssertionError as broken:
    print(str(broken).splitlines()[0])

# %% [markdown]
# ## Training with it
#
# A geometry takes it like any other manifold. Two networks learn the digits: in one the rows of
# the first layer are standardized, in the other it lives on the Stiefel manifold.

# %%
pixels, digits = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(digits))
images = jnp.asarray((pixels - pixels.mean()) / pixels.std(), jnp.float32)[order]
labels = jnp.asarray(digits)[order]
train, test = slice(0, 1440), slice(1440, None)
shapes = {"in": jnp.zeros((64, 64)), "bias": jnp.zeros(64), "out": jnp.zeros((10, 64))}


def apply(params, x):
    return 4 * jax.nn.relu(x @ params["in"].T + params["bias"]) @ params["out"].T


def loss(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(apply(params, x), y).mean()


def trained(first, steps=300):
    geometry = {"in": first, "bias": Euclidean(), "out": Stiefel()}
    tx = mm.optim.manifold_muon(optax.linear_schedule(0.1, 0.0, steps), geometry)

    def step(carry, key):
        params, state = carry
        batch = jax.random.randint(key, (128,), 0, 1440)
        grads = jax.grad(loss)(params, images[batch], labels[batch])
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    params = mm.optim.init_tree(geometry, jax.random.key(0), shapes)
    keys = jax.random.split(jax.random.key(1), steps)
    return jax.jit(lambda *carry: jax.lax.scan(step, carry, keys)[0])(params, tx.init(params))[0]


networks = {"Stiefel": trained(Stiefel()), "standardized": trained(Standardized())}
sums = networks["standardized"]["in"].sum(-1)
print(f"after 300 steps each row adds up to zero, within {abs(sums).max():.0e}")

# %% [markdown]
# Now turn the light up and down. A white pixel and a black one are 2.7 apart; every pixel of the
# test images is moved by the same amount.

# %% alt="Test accuracy over the change of brightness: flat for standardized rows, falling without."
shifts = np.linspace(-3, 3, 25)
figure, panel = plt.subplots(figsize=(4, 2.6), layout="constrained")
for (name, params), colour in zip(networks.items(), ["#C58000", "#0072B2"], strict=True):
    right = [(apply(params, images[test] + c).argmax(-1) == labels[test]).mean() for c in shifts]
    print(f"{name}: {100 * right[12]:.1f} % as it is, {100 * min(right):.1f} % at worst")
    panel.plot(shifts, 100 * np.array(right), color=colour, linewidth=3, label=name)
panel.set(xlabel="change of brightness", ylabel="right (%)", ylim=(0, 102))
panel.legend(frameon=False)

# %% [markdown]
# ## From here
#
# * The methods and their laws are in [`Manifold`](../api/manifolds.md).
# * Matrices with a norm of their own need a solver: [Steepest directions](../math/solvers.md)
#   shows how one is found, and [Contributing](../contributing.md) has the check-list for a
#   manifold that others could use.
