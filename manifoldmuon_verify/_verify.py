"""Reads a certificate and the arrays that it speaks of, and derives anew what it claims."""

from __future__ import annotations

import dataclasses
import decimal
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from manifoldmuon_verify._files import (
    Stored,
    are_counts,
    digest,
    parse_arrays,
    parse_json,
    read_bytes,
)
from manifoldmuon_verify._layers import Shape, normalisation
from manifoldmuon_verify._network import (
    Builder,
    Nodes,
    State,
    evaluate,
    layers,
    lipschitz,
    lower_margins,
    pair_constants,
)
from manifoldmuon_verify._refusal import Refused, short
from manifoldmuon_verify._rounding import check_arithmetic, down, up

FORMAT = "manifoldmuon-certificate"
VERSION = 1
_PARTS = "format version norm arithmetic weights images input network claims"
# How many numbers an array of the evaluation holds at most, unless one image takes more.
_MOST_NUMBERS = 2**23
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclasses.dataclass(frozen=True, eq=False)
class Report:
    """What was proved.

    Attributes:
      arithmetic: of which network: `real` or `float32`.
      files: the SHA-256 of weights and images.
      matrices: how many were enclosed.
      least_singular: no singular value of any of them is smaller.
      most_singular: none is larger.
      lipschitz: at least the network's constant, from pixels to logits, in the Euclidean norm.
      radii: derived for each image, at most the true one, in the unit of the pixels; 0 where the
        claimed label is not proved.
      correct: images whose claimed label is proved and is the data's.
      certified: of each claimed radius, how many images are correct and hold up to it.
    """

    arithmetic: str
    files: dict[str, str]
    matrices: int
    least_singular: float
    most_singular: float
    lipschitz: float
    radii: np.ndarray
    correct: int
    certified: tuple[tuple[float, int], ...]

    def __str__(self) -> str:
        count = len(self.radii)
        lines = [
            f"verified, in {self.arithmetic} arithmetic: {count} images",
            *(f"{name} {digest}" for name, digest in self.files.items()),
            f"{self.matrices} matrices, singular values within "
            f"[{_digits(self.least_singular, decimal.ROUND_FLOOR)}, "
            f"{_digits(self.most_singular, decimal.ROUND_CEILING)}]",
            "Lipschitz constant from pixels to logits at most "
            f"{_digits(self.lipschitz, decimal.ROUND_CEILING)}",
            f"clean accuracy {self.correct / count:.2%} ({self.correct} of {count})",
        ]
        lines += [
            f"certified at {radius:g}: {images / count:.2%} ({images} of {count})"
            for radius, images in self.certified
        ]
        return "\n".join(lines)


def _digits(value: float, rounding: str) -> str:
    """Ten digits: an interval that is printed holds what it held."""
    context = decimal.Context(prec=10, rounding=rounding)
    return f"{context.create_decimal_from_float(value):f}"


@dataclasses.dataclass(frozen=True)
class _Claims:
    predictions: np.ndarray
    radii: np.ndarray
    correct: int
    certified: tuple[tuple[float, int], ...]


def verify(
    certificate: str | Path, weights: str | Path | None = None, images: str | Path | None = None
) -> Report:
    """Checks a certificate against its weights and images.

    Args:
      certificate: the JSON file, or a directory with `certificate.json`.
      weights: the file of the weights; by default that which the certificate names, beside it.
      images: the same for images and labels.

    Returns:
      What was proved.

    Raises:
      Refused: the certificate is not accepted; one line says why.
    """
    try:
        check_arithmetic()
    except ArithmeticError as error:
        raise Refused("this computer", str(error)) from error
    path = Path(certificate)
    path = path / "certificate.json" if path.is_dir() else path
    told = parse_json(read_bytes(path, "the certificate"), "the certificate")
    _check_heading(told)
    given = _arrays(told["weights"], "weights", path.parent, weights, {"shared"})
    data = _arrays(told["images"], "images", path.parent, images, set())
    _expect(set(data) == {"images", "labels"}, "images", "wanted are the arrays images and labels")
    for name, stored in given.items():
        _expect(stored.dtype in _FLOATS, f"weights, {short(name)}", f"of dtype {stored.dtype}")
    if told["arithmetic"] == "float32":
        wide = [name for name, stored in given.items() if stored.dtype == "F64"]
        _expect(not wide, "weights", f"{short(wide)} in float64: not what float32 deploys")
    shape, shift, scale = _input(told["input"])
    with np.errstate(all="ignore"):
        builder = Builder(given)
        body = builder.sequence(told["network"], shape, "network")
        _check_uses(builder.uses, told["weights"]["shared"])
        nodes = (normalisation(shape, shift, scale), *body)
        pixels, labels = data["images"], data["labels"]
        out = nodes[-1].shape
        _expect(len(out) == 1 and out[0] >= 2, "network", f"makes {out}, which are no logits")
        _check_images(pixels, labels, shape, out[0])
        claims = _claims(told["claims"], len(labels.values), out[0])
        radii = _radii(nodes, pixels.values, claims, told["arithmetic"] == "float32")
        files = {name: told[name]["sha256"] for name in ("weights", "images")}
        return _report(told["arithmetic"], files, nodes, radii, claims, labels.values)


def _check_heading(told: Any) -> None:
    where = "the certificate"
    _expect(isinstance(told, dict), where, "is not an object")
    _expect(told.get("format") == FORMAT, where, f"the format is {short(told.get('format'))}")
    version = told.get("version")
    known = type(version) is int and version == VERSION
    _expect(known, where, f"of version {short(version)}; this verifier knows {VERSION}")
    _keys(told, _PARTS.split(), where)
    _expect(told["norm"] == "l2", where, f"the norm {short(told['norm'])} is unknown")
    known = told["arithmetic"] in ("real", "float32")
    _expect(known, where, f"the arithmetic {short(told['arithmetic'])} is unknown")


def _arrays(
    told: Any, where: str, folder: Path, path: str | Path | None, more: set[str]
) -> dict[str, Stored]:
    """The arrays of a file, which are those that the certificate declares, to the bit."""
    _keys(told, {"file", "sha256", "arrays"} | more, where)
    name = told["file"]
    plain = isinstance(name, str) and re.fullmatch(r"[\w-][\w.-]{0,99}", name, re.ASCII)
    _expect(plain, where, f"{short(name)} is not the name of a file beside the certificate")
    data = read_bytes(folder / name if path is None else Path(path), where)
    same = _is_digest(told["sha256"]) and told["sha256"] == digest(data)
    _expect(same, where, "the file is not the one that was certified: its SHA-256 differs")
    found = parse_arrays(data, where)
    _expect(isinstance(told["arrays"], dict), where, "the arrays are not an object")
    for array in sorted(set(told["arrays"]) ^ set(found)):
        lacking = "declared and not in the file" if array in told["arrays"] else "not declared"
        raise Refused(f"{where}, {short(array)}", lacking)
    for array, stored in found.items():
        place, entry = f"{where}, {short(array)}", told["arrays"][array]
        _keys(entry, {"dtype", "shape", "sha256"}, place)
        kind = [entry["dtype"], entry["shape"]]
        same = are_counts(entry["shape"]) and kind == [stored.dtype, list(stored.shape)]
        _expect(same, place, f"declared as {short(kind)}, and is {stored.dtype}{stored.shape}")
        same = _is_digest(entry["sha256"]) and entry["sha256"] == stored.digest
        _expect(same, place, "is not the array that was certified: its SHA-256 differs")
        _expect(stored.values.size, place, "is empty")
    return found


def _input(told: Any) -> tuple[Shape, np.ndarray, np.ndarray]:
    where = "input"
    _keys(told, {"shape", "shift", "scale"}, where)
    shape = told["shape"]
    fits = are_counts(shape) and shape and all(shape) and math.prod(shape) < 2**32
    _expect(fits, where, f"the shape {short(shape)} is not that of an image")
    shift, scale = (_per_channel(told[key], shape[-1], key) for key in ("shift", "scale"))
    fits = np.all((scale >= 2.0**-60) & (scale <= 2.0**60))
    _expect(fits, where, f"the scale {short(told['scale'])} is not positive")
    return tuple(shape), shift, scale


def _per_channel(told: Any, channels: int, key: str) -> np.ndarray:
    entries = told if isinstance(told, list) else [told]
    fits = all(map(_is_number, entries)) and len(entries) in (1, channels)
    _expect(fits, "input", f"the {key} {short(told)} is not a number, or one a channel")
    return np.asarray(entries, np.float64)


def _check_uses(uses: Mapping[str, set[str]], shared: Any) -> None:
    _expect(isinstance(shared, list), "weights", f"shared is {short(shared)}, not a list of names")
    for name, places in uses.items():
        where = f"weights, {short(name)}"
        _expect(places, where, "no layer uses it")
        if (len(places) > 1) != (name in shared):
            how = f"used in {short(sorted(places))}"
            raise Refused(where, f"{how} and {'' if name in shared else 'not '}declared as shared")
    strange = [name for name in shared if not isinstance(name, str) or name not in uses]
    _expect(not strange, "weights", f"{short(strange)} declared as shared is no array")


def _check_images(pixels: Stored, labels: Stored, shape: Shape, classes: int) -> None:
    _expect(pixels.dtype in (*_FLOATS, "U8", "I32"), "images", f"of dtype {pixels.dtype}")
    fits = pixels.shape[1:] == shape
    _expect(fits, "images", f"the images are {pixels.shape[1:]}, and the input {shape}")
    fits = labels.dtype in ("U8", "I32", "I64") and labels.shape == pixels.shape[:1]
    _expect(fits, "images", f"labels {labels.dtype}{labels.shape} for images {pixels.shape}")
    _expect(_in_classes(labels.values, classes), "images", f"a label is none of {classes} classes")


def _claims(told: Any, count: int, classes: int) -> _Claims:
    where = "claims"
    _keys(told, {"predictions", "radii", "correct", "certified"}, where)
    predictions, radii = told["predictions"], told["radii"]
    fits = are_counts(predictions) and len(predictions) == count
    _expect(fits, where, f"predictions must be {count} classes")
    _expect(_in_classes(np.asarray(predictions), classes), where, "a prediction is no class")
    fits = isinstance(radii, list) and len(radii) == count
    _expect(fits, where, f"radii must be {count} numbers")
    for i, radius in enumerate(radii):
        fits = _is_number(radius) and radius >= 0
        _expect(fits, f"claims, image {i}", f"the radius {short(radius)} is no length")
    _expect(are_counts([told["correct"]]), where, f"correct is {short(told['correct'])}")
    _expect(isinstance(told["certified"], list), where, "certified is not a list")
    certified = []
    for i, entry in enumerate(told["certified"]):
        place = f"claims, certified[{i}]"
        _keys(entry, {"radius", "images"}, place)
        fits = (
            _is_number(entry["radius"]) and entry["radius"] >= 0 and are_counts([entry["images"]])
        )
        _expect(fits, place, f"{short(entry)} is not a radius and a number of images")
        certified.append((float(entry["radius"]), entry["images"]))
    return _Claims(
        np.asarray(predictions, np.int64),
        np.asarray(radii, np.float64),
        told["correct"],
        tuple(certified),
    )


def _radii(nodes: Nodes, pixels: np.ndarray, claims: _Claims, single: bool) -> np.ndarray:
    """Radii that hold; in float32, if the claimed ones do not exceed them."""
    constants = pair_constants(nodes)
    found = []
    largest = max(math.prod(layer.shape) for layer in layers(nodes))
    batch = max(1, _MOST_NUMBERS // largest)
    for start in range(0, len(pixels), batch):
        rows = slice(start, start + batch)
        claimed, predictions = claims.radii[rows], claims.predictions[rows]
        state = State(
            values=pixels[rows].astype(np.float64),
            error=np.zeros(len(claimed)),
            reach=up(claimed),
            deployed=np.zeros(len(claimed)) if single else None,
        )
        state = evaluate(nodes, state)
        _check_argmax(state, predictions, start)
        margins = lower_margins(state, predictions)
        radii = np.min(down(margins / constants[predictions]), axis=1)
        found.append(np.maximum(radii, 0.0))
    return np.concatenate(found)


def _check_argmax(state: State, predictions: np.ndarray, start: int) -> None:
    """Refuses predictions that are not the largest logit, unless it cannot be told."""
    chosen = state.values[np.arange(len(predictions)), predictions]
    top = np.max(state.values, axis=1)
    for i in np.flatnonzero(down(top - chosen) > 2 * state.error)[:1]:
        better = np.argmax(state.values[i])
        raise Refused(
            f"claims, image {start + i}",
            f"predicted is class {predictions[i]}, and class {better} has a larger logit",
        )


def _report(
    arithmetic: str,
    files: dict[str, str],
    nodes: Nodes,
    radii: np.ndarray,
    claims: _Claims,
    labels: np.ndarray,
) -> Report:
    # A decimal lies at most half a unit in the last place above the float64 that it is read as.
    held = (claims.radii == 0) | (up(claims.radii) <= radii)
    for i in np.flatnonzero(~held)[:1]:
        raise Refused(
            f"claims, image {i}",
            f"the radius {claims.radii[i]:.9g} is not proved, only {radii[i]:.9g}"
            f" ({np.sum(~held)} such images)",
        )
    right = claims.predictions == labels
    correct = int(np.sum(right & (radii > 0)))
    _expect(
        claims.correct <= correct,
        "claims",
        f"{claims.correct} images correct, and {correct} are proved to be",
    )
    certified = []
    for i, (radius, images) in enumerate(claims.certified):
        found = int(np.sum(right & (radii > 0) & (claims.radii >= radius)))
        what = f"{images} images certified at {radius:g}, and {found} are by their radii"
        _expect(images <= found, f"claims, certified[{i}]", what)
        certified.append((radius, found))
    spectra = [found for layer in layers(nodes) for found in layer.spectra]
    return Report(
        arithmetic,
        files,
        len(spectra),
        min((float(found.lower[-1]) for found in spectra), default=0.0),
        max((float(found.upper[0]) for found in spectra), default=0.0),
        lipschitz(nodes),
        radii,
        correct,
        tuple(certified),
    )


def _keys(told: Any, wanted: Any, where: str) -> None:
    _expect(isinstance(told, dict), where, f"{short(told)} is not an object")
    for key in sorted(set(told) ^ set(wanted)):
        raise Refused(where, f"{'unknown' if key in told else 'no'} key {short(key)}")


def _expect(fits: object, where: str, otherwise: str) -> None:
    if not fits:
        raise Refused(where, otherwise)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 2**200


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _in_classes(values: np.ndarray, classes: int) -> bool:
    return bool(np.all((values >= 0) & (values < classes)))
