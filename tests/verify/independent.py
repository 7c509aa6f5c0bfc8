"""Independent second derivation of certified radii, by other methods than the verifier's.

Uses extended precision for values and LAPACK for singular values. Rounding is not bounded, so
claims may exceed the result by a relative 1e-9.
"""

from __future__ import annotations

import functools
import json
import math
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from tests.verify.forge import numbers, unpack

_SLACK = 1e-9


def claimed_too_much(folder: Path) -> str:
    """Return the first claim of a certificate that does not hold; an empty string if all hold."""
    told = json.loads((folder / "certificate.json").read_text(), parse_float=Decimal)
    claims, source = told["claims"], told["input"]
    radii = [Fraction(radius) for radius in claims["radii"]]
    counts = [claims["correct"], *(entry["images"] for entry in claims["certified"])]
    if not any(radii) and not any(counts):
        return ""
    images, arrays = (read(folder / told[part]["file"]) for part in ("images", "weights"))
    pixels, labels = images["images"], images["labels"].tolist()
    low, high = (float(end) for end in source["pixels"])
    if not (low <= np.min(pixels) and np.max(pixels) <= high):
        return f"pixels within [{low}, {high}]"
    shift, scale = (np.asarray(source[key], np.float64) for key in ("shift", "scale"))
    seen = (np.asarray(pixels, np.longdouble) - shift) / scale
    logits, predictions = apply(told["network"], seen, arrays), claims["predictions"]
    gains = functools.cache(lambda prediction: pairs(told["network"], seen[:1], arrays, prediction))
    right = []
    for row, radius, prediction, label in zip(logits, radii, predictions, labels, strict=True):
        margins = np.delete(row[prediction] - row, prediction)
        right.append(prediction == label and bool(np.min(margins) > 0))
        if radius:
            constants = np.delete(gains(prediction), prediction) / np.min(scale)
            with np.errstate(divide="ignore"):
                bound = float(np.min(margins / constants))
            if not (bound > 0 and bound * (1 + _SLACK) >= float(radius)):
                image = len(right) - 1
                return f"radius {float(radius)!r} of image {image}, and {bound!r} by this route"
    if claims["correct"] > sum(right):
        return f"{claims['correct']} correct images, and {sum(right)} by this route"
    for entry in claims["certified"]:
        least = Fraction(entry["radius"])
        found = sum(held and radius >= least for held, radius in zip(right, radii, strict=True))
        if entry["images"] > found:
            return f"{entry['images']} images certified at {entry['radius']}, and {found} are"
    return ""


def exactly(array: Any) -> np.ndarray:
    """Return an array of fractions."""
    return np.vectorize(Fraction, otypes=[object])(np.asarray(array, np.float64))


def read(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a file in their own dtypes; bfloat16 as float32."""
    found = {}
    for name, entry in unpack(path.read_bytes()).items():
        if entry[0] == "BF16":
            words = np.frombuffer(entry[2], "<u2").astype(np.uint32) << 16
            found[name] = words.view(np.float32).reshape(entry[1])
        else:
            found[name] = numbers(entry)
    return found


def apply(entries: Any, x: np.ndarray, arrays: Any, index: tuple[int, ...] = ()) -> np.ndarray:
    """Return the output of a list of layers, in the precision of `x` `(n, ...)`, or exactly."""
    for entry in entries:
        kind = entry["kind"]
        w = np.asarray(arrays[entry["weight"]][index], x.dtype) if "weight" in entry else None
        if kind == "stack":
            for i in range(entry["copies"]):
                x = apply(entry["layers"], x, arrays, (*index, i))
        elif kind == "sum":
            x = sum((apply(b, x, arrays, index) for b in entry["branches"]), start=0 * x[:0].sum())
        else:
            x = _layer(kind, entry, x, w)
    return x


def _layer(kind: str, entry: Any, x: np.ndarray, w: Any) -> np.ndarray:
    n = x.shape[-1]
    if kind == "linear":
        return np.einsum("...i,oi->...o", x, w)
    if kind == "locally_connected":
        return np.einsum("...i,...oi->...o", x, w)
    if kind == "bias":
        return x + w
    if kind == "scale":
        return (Fraction if x.dtype == object else float)(entry["factor"]) * x
    if kind == "group_sort":
        groups = x.reshape(*x.shape[:-1], entry["size"], -1)
        return (-np.sort(-groups, axis=-2)).reshape(x.shape)
    if kind == "abs":
        return abs(x)
    if kind == "relu":
        return x * (x > 0)
    if kind == "identity":
        return x
    if kind == "mean_subtract":
        return x - x.sum(-1, keepdims=True) / n
    if kind == "flatten":
        return x.reshape(*x.shape[: x.ndim - entry["axes"]], -1)
    if kind in ("space_to_depth", "average_pool"):
        rows, columns = x.shape[-3:-1]
        side = entry.get("side")
        p, q = (side, side) if side else (rows // entry["rows"], columns // entry["columns"])
        parts = [x[..., i::p, j::q, :] for i in range(p) for j in range(q)]
        if kind == "space_to_depth":
            return np.concatenate(parts, axis=-1)
        return np.asarray(sum(parts)) / len(parts)
    if kind == "shift":
        by, parts = entry["pixels"], np.array_split(x, 5, axis=-1)
        turns = (0, -3), (-by, -3), (by, -3), (-by, -2), (by, -2)
        return np.concatenate([np.roll(p, *t) for p, t in zip(parts, turns, strict=True)], axis=-1)
    assert kind == "two_tap", kind
    part = np.einsum("...i,ir,jr->...j", x, w, w)
    return x - part + np.roll(part, entry["offset"], entry["axis"])


def constant(
    entries: Any, x: np.ndarray, arrays: Any, index: tuple[int, ...] = ()
) -> tuple[float, np.ndarray]:
    """Return a Lipschitz constant of the layers, as documented for certificates, and the output."""
    found = 1.0
    for entry in entries:
        kind = entry["kind"]
        w = np.asarray(arrays[entry["weight"]][index], float) if "weight" in entry else np.eye(1)
        y = apply([entry], x, arrays, index)
        if kind == "stack":
            for i in range(entry["copies"]):
                factor, x = constant(entry["layers"], x, arrays, (*index, i))
                found *= factor
        elif kind == "sum":
            found *= sum(constant(branch, x, arrays, index)[0] for branch in entry["branches"])
        elif kind in ("linear", "locally_connected"):
            found *= np.max(np.linalg.svd(w, compute_uv=False))
        elif kind == "scale":
            found *= abs(float(entry["factor"]))
        elif kind == "two_tap":
            found *= max(1.0, 2 * np.linalg.svd(w, compute_uv=False)[0] ** 2 - 1)
        elif kind == "average_pool":
            found /= math.sqrt(x.size / y.size)
        x = y
    return float(found), x


def pairs(entries: Any, x: np.ndarray, arrays: Any, prediction: int) -> np.ndarray:
    """Return documented Lipschitz constants of each logit's difference with the predicted logit."""
    last = len(entries) - 1
    while last >= 0 and entries[last]["kind"] in ("bias", "scale", "identity", "mean_subtract"):
        last -= 1
    whole, logits = constant(entries, x, arrays)
    found = np.full(logits.shape[-1], math.sqrt(2) * whole)
    if last >= 0 and entries[last]["kind"] == "linear":
        w = np.asarray(arrays[entries[last]["weight"]], float)
        before, y = constant(entries[:last], x, arrays)
        behind, _ = constant(entries[last + 1 :], apply([entries[last]], y, arrays), arrays)
        found = np.minimum(found, np.linalg.norm(w - w[prediction], axis=1) * before * behind)
    return found
