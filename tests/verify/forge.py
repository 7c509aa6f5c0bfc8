"""A valid certificate, and tools to forge it."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from manifoldmuon.contrib import Householder
from manifoldmuon.manifolds import Orthogonal, Stiefel
from manifoldmuon.modules import Bias, GroupSort, Linear, residual
from manifoldmuon.robustness import certify, export
from manifoldmuon_verify import verify

FEATURES, WIDTH, CLASSES, IMAGES = 12, 8, 3, 40
SHIFT, SCALE, PIXELS = 0.25, 0.5, (0.0, 1.5)
AT = (0.01, 0.05, 0.1)


def network():
    """Linear layers and biases, two activations, and a stack of residual blocks."""
    block = GroupSort(2) @ Bias(WIDTH) @ Linear(WIDTH, WIDTH, Orthogonal())
    first = Householder(WIDTH) @ Bias(WIDTH) @ Linear(WIDTH, FEATURES, Stiefel())
    second = GroupSort(2) @ Bias(WIDTH) @ Linear(WIDTH, WIDTH, Orthogonal())
    return Bias(CLASSES) @ Linear(CLASSES, WIDTH, Stiefel()) @ residual(block, 2) @ second @ first


def case():
    """Return a network, parameters with nonzero biases, images, and partly wrong labels."""
    net, rng = network(), np.random.default_rng(0)
    params = jax.tree.map(
        lambda w, axes: w + 0.2 * rng.normal(size=w.shape).astype(np.float32) * (axes == 1),
        net.init(jax.random.key(3)),
        jax.tree.map(lambda spec: spec.ndim, net.weights(), is_leaf=lambda x: hasattr(x, "ndim")),
    )
    angles = rng.uniform(0, 2 * np.pi, size=WIDTH // 2)
    reflections = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    params = (*params[:2], jnp.asarray(reflections, jnp.float32), *params[3:])
    images = rng.uniform(size=(IMAGES, FEATURES)).astype(np.float32)
    logits = net.apply(params, jnp.asarray((images - SHIFT) / SCALE))
    labels = np.where(rng.uniform(size=IMAGES) < 0.7, np.argmax(logits, axis=-1), 0)
    return net, params, images, labels


def export_radii(
    place: Path,
    net,
    params,
    images,
    labels,
    radii: Any,
    *,
    shift: Any = 0.0,
    scale: Any = 1.0,
    **options,
) -> Path:
    """Export claims of these radii, for weights at any distance from their manifolds."""
    given: Any = {"shift": shift, "scale": scale, "tolerance": np.inf}
    found = certify(net, params, images, labels, **given)
    found = dataclasses.replace(found, radii=np.asarray(radii, np.float64))
    return export(place, found, **options)


def write_tight(folder: Path) -> Path:
    """Write a certificate with the largest radii that the verifier accepts."""
    net, params, images, labels = case()
    options = {"shift": SHIFT, "scale": SCALE, "at": AT, "pixels": PIXELS}
    export_radii(folder / "loose", net, params, images, labels, np.zeros(IMAGES), **options)
    radii = verify(folder / "loose").radii
    export_radii(folder / "tight", net, params, images, labels, radii, **options)
    return folder / "tight"
