"""A classifier with a proof: trained on manifolds, certified, attacked, exported and verified.

python -m examples.certified    # `python -m studies certified` has MNIST, a record and a picture
"""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import Partial

import manifoldmuon as mm
from manifoldmuon.manifolds import Stiefel
from manifoldmuon.manifolds.solvers import ProjectedPolar
from manifoldmuon.modules import Bias, GroupSort, Linear
from manifoldmuon.robustness import certify, export, margin_cross_entropy
from manifoldmuon_verify import verify
from studies.attacks import pgd
from studies.datasets import load_digits

RADII = (0.1, 0.25, 0.5)


def main(steps: int = 840, width: int = 128) -> float:
    """Train, certify, attack and verify; return the certified accuracy at the first radius."""
    data = load_digits()
    train_x, test_x = (x.reshape(len(x), -1) for x in (data.train_x, data.test_x))
    x, y = jnp.asarray(train_x), jnp.asarray(data.train_y)
    frames = Stiefel(solver=ProjectedPolar())
    hidden = GroupSort(2) @ Bias(width) @ Linear(width, width, frames)
    net = (
        Linear(10, width, frames) @ hidden @ GroupSort(2) @ Bias(width) @ Linear(width, 64, frames)
    )
    tx = mm.optim.modular(optax.cosine_decay_schedule(0.3, steps), net, momentum=0.8)

    def loss(params, rows):
        return margin_cross_entropy(net.apply(params, x[rows]), y[rows], 0.7, 0.1).mean()

    def step(carry, rows):
        params, state = carry
        updates, state = tx.update(jax.grad(loss)(params, rows), state, params)
        return (optax.apply_updates(params, updates), state), None

    params = net.init(jax.random.key(0))
    order = jnp.asarray(np.random.default_rng(0).integers(len(y), size=(steps, 100)))
    params, _ = jax.jit(lambda carry: jax.lax.scan(step, carry, order)[0])(
        (params, tx.init(params))
    )

    found = certify(net, params, test_x, data.test_y)
    logits = Partial(net.apply, params)
    print(f"clean accuracy {found.accuracy():.1%}\nradius  certified  attacked")
    for radius in RADII:
        _, robust = pgd(logits, test_x, data.test_y, radius)
        print(f"{radius:6}  {found.accuracy(radius):9.1%}  {np.mean(robust):8.1%}")
    with tempfile.TemporaryDirectory() as folder:
        proof = Path(folder, "proof")
        export(proof, found, at=RADII)
        verified = verify(proof)  # NumPy alone: shares no code with the package
    print(
        f"verified: {len(verified.radii)} images, {np.mean(verified.radii > 0):.1%} with a radius"
    )
    return found.accuracy(RADII[0])


if __name__ == "__main__":
    main()
