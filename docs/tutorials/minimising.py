# %% [markdown]
# # Minimising on a manifold
#
# Three instruments play at once, three microphones each record a mixture. Which turn of the
# recordings gives the instruments back? After whitening (mean zero, covariance the identity) the
# unknown is an orthogonal matrix, and the answer is the one whose outputs look least like a
# mixture: *independent component analysis*. The cost is known exactly, so we want its minimum, and
# choose neither a learning rate nor a number of steps. You need `pip install '.[studies]'`, which
# brings the pictures.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from manifoldmuon.manifolds import Orthogonal
from manifoldmuon.minimize import LBFGS, Reason, TrustRegion, minimize

jax.config.update("jax_enable_x64", True)  # gradients below 1e-4 need float64

# %% [markdown]
# ## The cost
#
# Write it in JAX, with the data as arguments. `Orthogonal()` says where the unknown lives.

# %%
time = np.linspace(0, 1, 2000)
instruments = np.stack(
    [np.sin(2 * np.pi * 7 * time), np.sign(np.sin(2 * np.pi * 3 * time)), (11 * time) % 1 - 0.5], 1
)
instruments /= instruments.std(0)
recorded = instruments @ np.array([[1.0, 0.6, 0.3], [0.4, 1.0, 0.5], [0.5, 0.2, 1.0]])
centred = recorded - recorded.mean(0)
white = np.linalg.svd(centred, full_matrices=False)[0] * np.sqrt(len(time))


def cost(q, x):
    """Flat signals have a large mean of log cosh; a mixture looks more like a bell."""
    return -jnp.mean(jnp.log(jnp.cosh(x @ q)))


start = Orthogonal().random_point(jax.random.key(0), (3, 3), jnp.float64)
found = minimize(cost, Orthogonal(), start, (white,))
print(f"{Reason(int(found.reason)).name} after {found.steps} steps: {found.gradient_norm:.0e}")

# %% [markdown]
# The result is a point of the set with a Riemannian gradient below 1e-10. Here is what it unmixes:

# %% alt="Recorded mixtures on the left; on the right the sine, the square and the saw tooth."
unmixed = white @ np.asarray(found.point)
figure, panels = plt.subplots(3, 2, figsize=(7, 3.2), layout="constrained", sharex=True)
for (left, right), before, after in zip(panels, recorded.T, unmixed.T, strict=True):
    left.plot(time, before, color="#767676", linewidth=1)
    right.plot(time, after, color="#0072B2", linewidth=1)
    for panel in (left, right):
        panel.set(yticks=[])
        panel.spines[["top", "right", "left"]].set_visible(False)
panels[0, 0].set_title("recorded", loc="left")
panels[0, 1].set_title("unmixed", loc="left")
alike = np.abs(np.corrcoef(unmixed.T, instruments.T)[:3, 3:]).max(1)
print("correlation with an instrument:", alike.round(3))

# %% [markdown]
# ## Which method?
#
# `LBFGS()` asks for a gradient a step, `TrustRegion()` for products with the Hessian, and
# converges quadratically: each of the last steps doubles the number of correct digits. A callback
# sees every step.


# %% alt="The gradient's norm over the steps: a slope for L-BFGS, a cliff for the trust region."
def curve(method):
    norms = []
    note = lambda steps, value, norm: norms.append((int(steps), float(norm)))  # noqa: E731
    minimize(cost, Orthogonal(), start, (white,), method=method, callback=note)
    jax.effects_barrier()
    return [norm for _, norm in sorted(norms)]


figure, panel = plt.subplots(figsize=(4, 2.6), layout="constrained")
for method, colour in ((LBFGS(), "#C58000"), (TrustRegion(), "#0072B2")):
    panel.semilogy(curve(method), color=colour, linewidth=3, label=type(method).__name__)
panel.set(xlabel="step", ylabel="gradient")
panel.legend(frameon=False)

# %% [markdown]
# ## From many starts
#
# Such a cost may have local minima. `jax.vmap` runs all starts as one program. Here all of them
# agree: the minimum is the same up to the order and the signs of the instruments.

# %%
starts = Orthogonal().random_point(jax.random.key(1), (20, 3, 3), jnp.float64)
many = jax.jit(jax.vmap(lambda q: minimize(cost, Orthogonal(), q, (white,))))(starts)
values, counts = np.unique(np.asarray(many.value).round(6), return_counts=True)
print("minima:", dict(zip(values.tolist(), counts.tolist(), strict=True)))

# %% [markdown]
# ## What if a microphone were louder?
#
# The minimum is a differentiable function of the data, by the implicit function theorem: one
# linear system, not a derivative through the iterations. Here the first recording gets louder,
# after the whitening, and we ask how the cost at the minimum and the matrix itself move.


# %%
def solved(gain):
    x = white * jnp.array([1.0, 0.0, 0.0]) * gain + white * jnp.array([0.0, 1.0, 1.0])
    result = minimize(cost, Orthogonal(), found.point, (x,), tolerance=1e-12)
    return result.value, result.point


h = 1e-4
_, (value, moved) = jax.jvp(solved, (1.0,), (1.0,))
differences = [(a - b) / (2 * h) for a, b in zip(solved(1 + h), solved(1 - h), strict=True)]
print(f"value: {value:.6f}, by differences {differences[0]:.6f}")
print(f"matrix: {jnp.abs(moved - differences[1]).max():.0e} from differences")

# %% [markdown]
# ## From here
#
# * [Minimise a cost](../minimize.md) has more problems with their sets, and the limits.
# * A tree of manifolds is a product of sets, leading axes are a power: the geometry is the same as
#   for the optimizers.
# * [Your own manifold](own-manifold.md) works here, too.
