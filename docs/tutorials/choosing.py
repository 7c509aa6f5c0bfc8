# %% [markdown]
# # Choosing set, solver and retraction
#
# A constrained matrix has three choices: the *set* that it lives on, the *solver* that finds the
# steepest direction there, and the *retraction* that brings a step back. Each has a default. Here
# is what each changes, on one matrix of 64 x 32. You need `pip install '.[studies]'`, which brings
# the pictures.

# %%
import jax
import matplotlib.pyplot as plt
import numpy as np

from manifoldmuon.lab import random_walk, retraction_order
from manifoldmuon.manifolds import Euclidean, Hypersphere, Stiefel
from manifoldmuon.manifolds.retractions import QR, Cayley, Exponential, Polar
from manifoldmuon.manifolds.solvers import ClosedForm, DualAscent, ProjectedPolar
from manifoldmuon.norms import RMSToRMS

shape = (64, 32)

# %% [markdown]
# ## The set
#
# The set decides what training cannot change. We walk a hundred steps along random gradients,
# always in the steepest direction of the set's own norm, and look at the singular values.

# %% alt="Singular values after one step and a hundred: flat space, sphere, Stiefel."
sets = {
    "flat space": (Euclidean(RMSToRMS()), "#767676"),
    "sphere": (Hypersphere(32**0.5, ndim=2), "#C58000"),
    "Stiefel": (Stiefel(), "#0072B2"),
}
figure, panel = plt.subplots(figsize=(4, 2.6), layout="constrained")
for name, (manifold, colour) in sets.items():
    walk = random_walk(manifold, shape, rates=(0.1,), steps=100, key=jax.random.key(0))
    spectra = [np.linalg.svd(points[0], compute_uv=False) for points in walk.points]
    panel.plot(spectra[walk.at.index(1)], ":", color=colour)
    panel.plot(spectra[-1], color=colour, linewidth=3, label=name)
panel.set(xlabel="singular value, by size", ylim=(0, None))
panel.legend(frameon=False)

# %% [markdown]
# In flat space nothing stays the same from the first step (dotted) to the hundredth. On the sphere
# the sum of squares stays, on Stiefel every singular value. Take Stiefel where the network should
# have a Lipschitz constant that you choose, the sphere where a fixed size is enough, flat space
# for biases and gains.
#
# ## The solver
#
# On the Stiefel manifold the steepest direction takes an algorithm. Each reports a *gap*: how
# much of the best slope its direction may have missed. No other solver is needed to know it; the
# first column compares with the optimum, half the nuclear norm of $GW^\top - WG^\top$.
# The gradient has singular values from 1 down to a ten-thousandth, which is where solvers differ.

# %%
rng = np.random.default_rng(0)
point, left, right = (np.linalg.qr(rng.standard_normal((m, 32)))[0] for m in (64, 64, 32))
grad = left * np.logspace(0, -4, 32) @ right
best = np.linalg.norm(grad @ point.T - point @ grad.T, "nuc") / 2
print("solver              missed   reported at most   off the tangent space")
for solver in (ProjectedPolar(), ClosedForm(), DualAscent()):
    manifold = Stiefel(solver=solver)
    given = np.float32(point), np.float32(grad)
    found = jax.jit(manifold.steepest)(*given, manifold.init_dual(shape))
    direction = np.float64(jax.jit(manifold.project_tangent)(given[0], found.direction))
    missed = 1 - np.vdot(grad, direction) / max(1, np.linalg.norm(direction, 2)) / best
    print(f"{solver!r:16} {missed:9.0e} {found.gap:18.0e} {found.residual:23.0e}")

# %% [markdown]
# `ClosedForm()` is the default. `ProjectedPolar()` is a single projection; in training we have
# measured no difference in accuracy between the two. The iterations, a hundred steps here, are
# for study.
#
# ## The retraction
#
# A step along the tangent space leaves the set; the retraction brings it back. The table compares
# each retraction with the geodesic: the largest distance from it, and the power of the step's
# length with which that distance falls.

# %%
exact = Stiefel(retraction=Exponential())
for retraction in (QR(), Cayley(), Polar()):
    found = retraction_order(Stiefel(retraction=retraction), exact, shape, jax.random.key(2))
    print(f"{retraction!r:8} {max(found.errors):.0e}, falls like the power {found.slope:.1f}")

# %% [markdown]
# `Polar()`, the default, is of second order, and it removes the rounding errors of earlier steps,
# which `Cayley()` and `Exponential()` keep. Keep it unless you have a reason.
#
# ## From here
#
# * [What each choice costs](../benchmarks/index.md) has the times and gaps of all solvers at
#   the sizes of real layers.
# * [The study of retractions](../lab/index.md#retractions) follows them into training.
