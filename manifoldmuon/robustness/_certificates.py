"""Certified radii: lengths of input movements that cannot change the label."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, Real

from manifoldmuon._internal.arguments import check_number, finite_array, one_of
from manifoldmuon._internal.text import Printed
from manifoldmuon.bounds import L2, NetworkBounds, NormBound, bound
from manifoldmuon.manifolds import Manifold
from manifoldmuon.modules import Bias, Compose, ExternalModule, Identity, Linear, Module, Mul

# Upper bound on the relative error of norms in float64.
_ROUNDING = 1e-10
# Largest difference from the model's own logits, relative to the largest logit; float32 sums in
# another order differ by about 1e-6.
_AGREEMENT = 1e-4


@dataclasses.dataclass(frozen=True, eq=False)
class CertificationResult(Printed):
    """Certified radii with their network and images; made by `certify`, written by `export`.

    Attributes:
      net: the classifier.
      params: its weights.
      images: `(n, ...)`, as given to `certify`. The network reads `(images - shift) / scale`.
      labels: `(n,)`, the true labels; None if not given.
      shift: subtracted from the images.
      scale: divisor of the shifted images.
      predicted: `(n,)`, the certified labels.
      radii: `(n,)` in float64: no shorter movement of the image, in Euclidean length and in units
        of the image, changes the predicted label.
      bounds: bounds of the network up to its last linear layer, at its weights. Its
        `lipschitz_inputs` is in units of the network's input.
    """

    net: Module
    params: Any
    images: Real[np.ndarray, "n ..."]
    labels: Int[np.ndarray, " n"] | None
    shift: np.ndarray
    scale: np.ndarray
    predicted: Int[np.ndarray, " n"]
    radii: Float[np.ndarray, " n"]
    bounds: NetworkBounds

    def __str__(self) -> str:
        """Return the number of images, their accuracy, and two quantiles of the radii."""
        quarter, half = np.quantile(self.radii, (0.25, 0.5)) if len(self.radii) else (0.0, 0.0)
        right = "" if self.labels is None else f", {self.accuracy():.1%} right"
        return (
            f"{len(self.radii)} images{right}: half of the radii are at least {half:.3g},"
            f" three quarters at least {quarter:.3g}"
        )

    def accuracy(self, radius: float = 0.0) -> float:
        """Return the share of images with a right label that is certified within this radius.

        The radius is a length in units of the image; 0 gives the clean accuracy. Needs labels.
        """
        check_number("accuracy(radius)", radius, within="[0, inf)")
        if self.labels is None:
            raise ValueError("an accuracy needs labels: write certify(..., labels)")
        return float(np.mean((self.predicted == self.labels) & (self.radii >= radius)))

    def first(self, count: int) -> "CertificationResult":
        """Return the result for the first `count` images."""
        rows = {
            name: None if (array := getattr(self, name)) is None else array[:count]
            for name in ("images", "labels", "predicted", "radii")
        }
        return dataclasses.replace(self, **rows)

    def curve(self, radii: ArrayLike) -> Float[np.ndarray, " k"]:
        """Return the accuracy at each of several radii."""
        return np.array([self.accuracy(float(radius)) for radius in np.ravel(np.asarray(radii))])


def certify(
    net: Module | ExternalModule,
    params: Any,
    images: ArrayLike,
    labels: ArrayLike | None = None,
    *,
    model: Callable[[Any], Any] | None = None,
    shift: ArrayLike | Sequence[float] = 0.0,
    scale: ArrayLike | Sequence[float] = 1.0,
    tolerance: float = 1e-3,
    batch: int = 1000,
) -> CertificationResult:
    """Certify radii within which a classifier's labels cannot change, in Euclidean length.

    Against every other class j, the label c of an image holds within
    `(z_c - z_j) / (L ||w_c - w_j||)`, with the logits z, the rows w of the last linear layer, and
    a Lipschitz constant L of all layers before it (Tsuzuku et al., arXiv:1802.04034; pair by
    pair, so that rows need not be orthonormal). If the network does not end with a linear layer
    (`Bias` and `Mul` may follow), the denominator is `sqrt(2) L`, with L for the whole network.

    L is computed from these weights, by their singular values in float64, rounded up, and the
    rules of `bounds`. It holds in exact arithmetic; for rounding, `export` a certificate and run
    the verifier.

    Args:
      net: the classifier, from an image (without axis n) to logits `(classes,)`. An
        `ExternalModule` needs parameters with atoms, and `model`.
      params: its weights.
      images: `(n, ...)`, in the unit of the radii, such as pixels from 0 to 255 or to 1. Lengths
        are taken over all axes but the first.
      labels: `(n,)` whole numbers, the true classes, from 0.
      model: the forward function of the model that an `ExternalModule` declares, with its weights
        and in evaluation mode: what the network reads, `(n, ...)` in float32, to logits
        `(n, classes)`. The logits of the declared network must agree with it on all images, to
        1e-4 of the largest logit. `model` for Flax NNX, `jax.vmap(model)` for Equinox,
        `functools.partial(model.apply, variables)` for Linen.
      shift: a number, or an array that broadcasts against an image, such as a number per channel.
        The network reads `(images - shift) / scale`, in float32.
      scale: a positive number or such an array; its smallest entry scales the radii.
      tolerance: the largest distance of a weight from its manifold, relative to the manifold's
        scale, or twice the eps of the weight's dtype if that is larger. Radii are right for any
        weights, but weights far off their manifold are probably not the trained weights, and raise
        an error.
      batch: number of images per evaluation.

    Raises:
      ValueError: a weight is off its manifold, an array does not fit, the network is not bounded
        in Euclidean length, a logit is not finite, or the declared network is not `model`.

    Examples:
      >>> net = mm.modules.Linear(2, 2, mm.manifolds.Stiefel())
      >>> found = certify(net, jnp.eye(2), np.float32([[3.0, 1.0]]), np.array([0]))
      >>> found.radii.round(6), found.accuracy(1.0)
      (array([1.414214]), 1.0)
    """
    one_of(Module, ExternalModule)("certify(net)", net)
    if isinstance(net, ExternalModule):
        if model is None:
            raise ValueError(
                "certify(model) is missing: an ExternalModule needs the forward function of its "
                "model, to compare the logits of both"
            )
        net, params = net.network(params)
    _check_on_manifolds(net, params, tolerance)
    x = np.asarray(images)
    real = jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)
    if x.ndim < 2 or not len(x) or not real:
        raise ValueError(
            "certify(images) must be numbers (n, ...), one image or more; got"
            f" {x.dtype}{list(x.shape)}"
        )
    check_number("certify(batch)", batch, within="[1, inf)", whole=True)
    zero, unit = finite_array("certify(shift)", shift), finite_array("certify(scale)", scale)
    for name, array in (("shift", zero), ("scale", unit)):
        ends = zip(array.shape[::-1], x.shape[:0:-1], strict=False)
        if array.ndim >= x.ndim or any(axis not in (1, wanted) for axis, wanted in ends):
            raise ValueError(
                f"certify({name}) must broadcast to an image {x.shape[1:]}; got {array.shape}"
            )
    check_number("certify(scale)", float(np.min(unit)), within=f"[{np.finfo(float).tiny:g}, inf)")
    truth = None if labels is None else _check_labels(labels, len(x))
    seen = (x.astype(np.float32) - zero.astype(np.float32)) / unit.astype(np.float32)
    chunks = np.array_split(seen, range(batch, len(seen), batch))
    logits = np.concatenate([np.asarray(_logits(net, params, chunk)) for chunk in chunks])
    logits = finite_array("certify: logits", logits)
    if logits.ndim != 2 or logits.shape[1] < 2:
        raise ValueError(
            f"the network must return logits (n, 2 classes or more); got {logits.shape}"
        )
    classes = logits.shape[1]
    if truth is not None and (wrong := truth[(truth < 0) | (truth >= classes)]).size:
        raise ValueError(f"certify(labels) must be 0 to {classes - 1}; got {wrong[0]}")
    if model is not None:
        _check_same_logits(logits, model, chunks)
    bounds, distances = _classes(net, params, x.ndim - 1, classes)
    radii, predicted = _radii(logits, bounds.lipschitz_inputs * distances)
    radii = radii * float(np.min(unit))
    return CertificationResult(net, params, x, truth, zero, unit, predicted, radii, bounds)


@functools.partial(jax.jit, static_argnums=0)
def _logits(net: Module, params: Any, images: Array) -> Array:
    with jax.default_matmul_precision("highest"):
        return net.apply(params, images)


def _check_same_logits(
    logits: np.ndarray, model: Callable[[Any], Any], chunks: Sequence[np.ndarray]
) -> None:
    try:
        with jax.default_matmul_precision("highest"):
            own = [np.asarray(model(jnp.asarray(chunk))).astype(np.float64) for chunk in chunks]
    except Exception as error:
        error.add_note("certify calls model with inputs (n, ...): jax.vmap it if it takes only one")
        raise
    for chunk, expected in zip(chunks, own, strict=True):
        if expected.shape != (len(chunk), logits.shape[1]):
            raise ValueError(
                f"certify(model) must map inputs {chunk.shape} to logits "
                f"{(len(chunk), logits.shape[1])}; got {expected.shape}"
            )
    apart = np.abs(np.concatenate(own) - logits)
    largest, limit = np.max(apart, initial=0.0), _AGREEMENT * np.max(np.abs(logits), initial=0.0)
    if not largest <= limit:
        image, label = np.unravel_index(np.argmax(apart), apart.shape)
        raise ValueError(
            f"the declared network is not the model: logit {label} of image {image} differs by "
            f"{largest:.3g}, more than {limit:.3g}. Compare them layer by layer: biases, "
            "activations, factors, the order of layers, the layout of kernels; the model's weights "
            "must be params, in evaluation mode and float32, and shift and scale its normalisation"
        )


def _check_labels(labels: ArrayLike, count: int) -> np.ndarray:
    array = np.asarray(labels)
    if array.shape != (count,) or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"certify(labels) must be {count} whole numbers, as there are {count} images; got "
            f"{array.dtype}{list(array.shape)}"
        )
    return array


def _check_on_manifolds(net: Module, params: Any, tolerance: float) -> None:
    if not (isinstance(tolerance, int | float | np.number) and tolerance >= 0):
        raise ValueError(f"certify(tolerance) must be a number >= 0; got {tolerance!r}")

    def check(spec: Any, value: Any) -> None:
        if not spec.manifold.constrained:
            return
        far = float(np.max(np.asarray(_distance(spec.manifold, value)), initial=0.0))
        # The nearest point in bfloat16 is off the set by rounding.
        if not far <= (allowed := max(tolerance, 2 * float(jnp.finfo(value.dtype).eps))):
            raise ValueError(
                f"a weight {value.shape} is {far:.3g} from its manifold, {spec.manifold}; the "
                f"tolerance is {allowed:g}. Pass the trained weights, or project them by "
                "optim.project_tree"
            )

    net.map_weights(check, params)


# Compile a program per kind of weight, not per operation.
@functools.partial(jax.jit, static_argnums=0)
def _distance(manifold: Manifold, point: Array) -> Array:
    return manifold.distance(point)


def _classes(net: Module, params: Any, axes: int, count: int) -> tuple[NetworkBounds, np.ndarray]:
    """Return bounds up to the last linear layer, and distances between its rows, rounded up."""
    body, weights, rows = _split_last_linear(net, params)
    bounds = bound(body, weights, input_norm=NormBound(math.inf, norm=L2(axes)))
    output = bounds.outputs
    if not math.isfinite(bounds.lipschitz_inputs):
        raise ValueError(f"the network has no Lipschitz constant: {'; '.join(bounds.reasons)}")
    if not isinstance(output, NormBound) or output.norm != L2():
        raise ValueError(
            "the network has no bound in Euclidean length: its last nonlinearity returns "
            f"{output}. Add `Flatten` (images) or a mean (tokens) before the last layer, as on "
            "the page 'A classifier with a proof'"
        )
    if rows is None:
        distances = np.full((count, count), math.sqrt(2))
    else:
        distances = np.hypot.reduce(rows[:, None] - rows[None], axis=-1, initial=0.0)
    return bounds, distances * (1 + _ROUNDING)


def _split_last_linear(net: Module, params: Any) -> tuple[Module, Any, np.ndarray | None]:
    """Split a network before its last linear layer; return body, weights and scaled matrix."""
    layers = net.parts if isinstance(net, Compose) else (net,)
    weights = params if isinstance(net, Compose) else (params,)
    factor = 1.0
    for index in reversed(range(len(layers))):
        layer = layers[index]
        if isinstance(layer, Mul):
            factor *= layer.factor
        elif isinstance(layer, Linear):
            rows = factor * np.asarray(weights[index]).astype(np.float64)
            before = Compose(layers[:index]) if index else Identity()
            return before, weights[:index], rows
        elif not isinstance(layer, Bias):
            break
    return net, params, None


def _radii(logits: np.ndarray, gains: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Minimise margin over gain among the other classes; 0 if the largest logit is not unique."""
    predicted = np.argmax(logits, axis=-1)
    margins = np.max(logits, axis=-1, keepdims=True) - logits
    gain = gains[predicted]
    with np.errstate(divide="ignore", invalid="ignore"):
        radii = np.where(margins > 0, margins / gain, 0.0)
    own = np.arange(logits.shape[-1]) == predicted[:, None]
    return np.min(np.where(own, np.inf, radii), axis=-1), predicted
