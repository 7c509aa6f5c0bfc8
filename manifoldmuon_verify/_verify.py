"""Read a certificate and its arrays, and recompute its claims."""

from __future__ import annotations

import dataclasses
import decimal
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from manifoldmuon_verify._files import (
    FLOATS,
    Stored,
    are_counts,
    digest,
    parse_arrays,
    parse_json,
    read_bytes,
)
from manifoldmuon_verify._layers import Shape, normalisation
from manifoldmuon_verify._limits import MOST_AXES, MOST_JSON_BYTES
from manifoldmuon_verify._network import (
    Builder,
    Nodes,
    PairConstants,
    State,
    check_size,
    evaluate,
    lipschitz,
    lower_margins,
    used_matrices,
)
from manifoldmuon_verify._refusal import Refused, short
from manifoldmuon_verify._rounding import check_arithmetic, down, up

FORMAT = "manifoldmuon-certificate"
VERSION = 2
_PARTS = "format version norm arithmetic weights images input network claims"


@dataclasses.dataclass(frozen=True, eq=False)
class Report:
    """Result of a verification.

    Attributes:
      arithmetic: arithmetic of the certified network, `real` or `float32`.
      files: SHA-256 of weights and images.
      matrices: number of matrices with enclosed singular values.
      least_singular: lower bound on all their singular values; 0 without matrices.
      most_singular: upper bound on all their singular values; 0 without matrices.
      lipschitz: bound on the network's Lipschitz constant from pixels to logits, Euclidean norms.
      radii: proved radius of each image, in units of the pixels; 0 if the predicted class is not
        proved. In float32 at most the claimed radius: rounding is bounded only up to there.
      pixels: claimed range of the pixels, and their actual range.
      input: the network's input as a formula in the pixel.
      correct: number of images with a proved prediction that equals the label.
      certified: each claimed radius with the number of correct images claimed and proved up to it.
    """

    arithmetic: str
    files: dict[str, str]
    matrices: int
    least_singular: float
    most_singular: float
    lipschitz: float
    radii: np.ndarray
    pixels: tuple[tuple[float, float], tuple[float, float]]
    input: str
    correct: int
    certified: tuple[tuple[float, int], ...]

    def __str__(self) -> str:
        count = len(self.radii)
        (low, high), (least, most) = self.pixels
        lines = [
            f"verified, in {self.arithmetic} arithmetic: {count} images",
            *(f"{name} {digest}" for name, digest in self.files.items()),
            f"{self.matrices} matrices, singular values within "
            f"[{_digits(self.least_singular, decimal.ROUND_FLOOR)}, "
            f"{_digits(self.most_singular, decimal.ROUND_CEILING)}]",
            "Lipschitz constant from pixels to logits at most "
            f"{_digits(self.lipschitz, decimal.ROUND_CEILING)}",
            f"pixels claimed within [{low!r}, {high!r}], found within "
            f"[{_digits(least, decimal.ROUND_FLOOR)}, {_digits(most, decimal.ROUND_CEILING)}]; "
            f"the network sees {self.input}",
            f"clean accuracy {_percent(self.correct, count)}",
        ]
        # `repr` prints the claimed decimal exactly: other decimals were refused.
        lines += [
            f"certified at {radius!r}, as a Euclidean length in the unit of pixels within "
            f"[{low!r}, {high!r}]: {_percent(images, count)}"
            for radius, images in self.certified
        ]
        return "\n".join(lines)


def _percent(part: int, count: int) -> str:
    """Format a percentage with two decimals, rounded down."""
    return f"{10_000 * part // count / 100:.2f}% ({part} of {count})"


def _digits(value: float, rounding: str) -> str:
    """Format with ten digits, rounded up or down, so that a printed bound is still a bound."""
    context = decimal.Context(prec=10, rounding=rounding)
    plain = not value or 1e-6 < abs(value) < 1e15
    return f"{context.create_decimal_from_float(value):{'f' if plain else ''}}"


@dataclasses.dataclass(frozen=True)
class _Claims:
    predictions: np.ndarray
    radii: np.ndarray
    correct: int
    certified: tuple[tuple[float, int], ...]


def verify(
    certificate: str | Path, weights: str | Path | None = None, images: str | Path | None = None
) -> Report:
    """Check a certificate against its weights and images.

    Certificates with files or arrays above fixed limits are refused before the work starts.

    Args:
      certificate: JSON file, or a directory with `certificate.json`.
      weights: file of the weights; by default the file named in the certificate, in its directory.
      images: file of images and labels; default as for `weights`.

    Raises:
      Refused: the certificate is not accepted; a one-line message gives the reason, and `radii`
        has what is proved, if only the claims are refused.
    """
    try:
        check_arithmetic()
        with np.errstate(all="ignore"):
            return _verified(Path(certificate), weights, images)
    except ArithmeticError as error:
        raise Refused("this computer", str(error)) from error
    except MemoryError as error:
        raise Refused("this computer", "has too little memory for this certificate") from error


def _verified(path: Path, weights: str | Path | None, images: str | Path | None) -> Report:
    path = path / "certificate.json" if os.path.isdir(path) else path
    fields = parse_json(read_bytes(path, "the certificate", MOST_JSON_BYTES), "the certificate")
    _check_heading(fields)
    given = _arrays(fields["weights"], "weights", path.parent, weights, {"shared"})
    data = _arrays(fields["images"], "images", path.parent, images, set())
    fits = set(data) == {"images", "labels"}
    _expect(fits, "images", f"expected images and labels; got {short([*data])}")
    for name, stored in given.items():
        where, dtype = f"weights, {short(name)}", stored.dtype
        _expect(dtype in FLOATS, where, f"must be floating point; got {dtype}")
    if fields["arithmetic"] == "float32":
        wide = [name for name, stored in given.items() if stored.dtype == "F64"]
        _expect(not wide, "weights", f"float64 arrays {short(wide)} in a float32 certificate")
    shape, claimed, shift, scale = _input(fields["input"])
    builder = Builder(given)
    body = builder.sequence(fields["network"], shape, "network")
    _check_uses(builder.uses, fields["weights"]["shared"])
    nodes = (normalisation(shape, shift, scale), *body)
    pixels, labels = data["images"], data["labels"]
    out = nodes[-1].shape
    fits = len(out) == 1 and out[0] >= 2
    _expect(fits, "network", f"must return logits of 2 classes or more; got {short(out)}")
    _check_images(pixels, labels, shape, out[0])
    claims = _claims(fields["claims"], len(labels.raw), out[0])
    batch = check_size(nodes, len(labels.raw), len(set(claims.predictions.tolist())))
    found = _range(pixels, claimed)
    single = fields["arithmetic"] == "float32"
    radii, better = _radii(nodes, pixels, claims, single, batch)
    right = (claims.predictions == labels.values()) & (radii > 0)
    proved = np.minimum(radii, claims.radii) if single else radii
    _check_radii(radii, better, claims, proved)
    correct, certified = _counts(right, claims, proved)
    spectra = [one for weight in used_matrices(nodes) for one in weight.spectra]
    return Report(
        arithmetic=fields["arithmetic"],
        files={name: fields[name]["sha256"] for name in ("weights", "images")},
        matrices=len(spectra),
        least_singular=min((float(one.lower[-1]) for one in spectra), default=0.0),
        most_singular=max((float(one.upper[0]) for one in spectra), default=0.0),
        lipschitz=lipschitz(nodes),
        radii=proved,
        pixels=(claimed, found),
        input=f"(pixel - {_numbers(shift)}) / {_numbers(scale)}",
        correct=correct,
        certified=certified,
    )


def _numbers(values: np.ndarray) -> str:
    return short(values.tolist() if len(values) > 1 else values.item())


def _check_heading(fields: Any) -> None:
    where = "the certificate"
    _expect(isinstance(fields, dict), where, "must be an object")
    kind, version = fields.get("format"), fields.get("version")
    _expect(kind == FORMAT, where, f"format must be {FORMAT!r}; got {short(kind)}")
    known = type(version) is int and version == VERSION
    _expect(known, where, f"version must be {VERSION}; got {short(version)}")
    _keys(fields, _PARTS.split(), where)
    _expect(fields["norm"] == "l2", where, f"norm must be 'l2'; got {short(fields['norm'])}")
    known = fields["arithmetic"] in ("real", "float32")
    _expect(known, where, f"arithmetic must be real or float32; got {short(fields['arithmetic'])}")


def _arrays(
    fields: Any, where: str, folder: Path, path: str | Path | None, more: set[str]
) -> dict[str, Stored]:
    """Read a file's arrays, and check that they are bit for bit the declared arrays."""
    _keys(fields, {"file", "sha256", "arrays"} | more, where)
    name = fields["file"]
    plain = isinstance(name, str) and re.fullmatch(r"[\w-][\w.-]{0,99}", name, re.ASCII)
    _expect(plain, where, f"file must be a name without folders; got {short(name)}")
    data = read_bytes(folder / name if path is None else Path(path), where)
    same = _is_digest(fields["sha256"]) and fields["sha256"] == digest(data)
    _expect(same, where, "the SHA-256 of the file differs from the certified SHA-256")
    found = parse_arrays(data, where)
    _expect(isinstance(fields["arrays"], dict), where, "arrays must be an object")
    for array in sorted(set(fields["arrays"]) ^ set(found)):
        lacking = "declared, but not in the file" if array in fields["arrays"] else "not declared"
        raise Refused(f"{where}, {short(array)}", lacking)
    for array, stored in found.items():
        place, entry = f"{where}, {short(array)}", fields["arrays"][array]
        _keys(entry, {"dtype", "shape", "sha256"}, place)
        kind = [entry["dtype"], entry["shape"]]
        same = are_counts(entry["shape"]) and kind == [stored.dtype, list(stored.shape)]
        _expect(same, place, f"declared as {short(kind)}, but is {stored.dtype}{stored.shape}")
        same = _is_digest(entry["sha256"]) and entry["sha256"] == stored.digest
        _expect(same, place, "its SHA-256 differs from the certified SHA-256")
    return found


def _input(fields: Any) -> tuple[Shape, tuple[float, float], np.ndarray, np.ndarray]:
    where = "input"
    _keys(fields, {"shape", "pixels", "shift", "scale"}, where)
    shape, pixels = fields["shape"], fields["pixels"]
    fits = are_counts(shape) and 0 < len(shape) < MOST_AXES and all(shape)
    _expect(fits, where, f"shape must be the positive sizes of an image; got {short(shape)}")
    shift, scale = (_per_channel(fields[key], shape[-1], key) for key in ("shift", "scale"))
    fits = np.all((scale >= 2.0**-60) & (scale <= 2.0**60))
    _expect(fits, where, f"scale must be within [2**-60, 2**60]; got {short(fields['scale'])}")
    fits = isinstance(pixels, list) and len(pixels) == 2 and all(map(_is_number, pixels))
    fits = fits and pixels[0] <= pixels[1]
    _expect(fits, where, f"pixels must be [smallest, largest]; got {short(pixels)}")
    return tuple(shape), (float(pixels[0]), float(pixels[1])), shift, scale


def _per_channel(fields: Any, channels: int, key: str) -> np.ndarray:
    entries = fields if isinstance(fields, list) else [fields]
    fits = all(map(_is_number, entries)) and len(entries) in (1, channels)
    _expect(fits, "input", f"{key} must be a number or {channels} numbers; got {short(fields)}")
    return np.asarray(entries, np.float64)


def _check_uses(uses: Mapping[str, set[str]], shared: Any) -> None:
    fits = isinstance(shared, list) and all(isinstance(name, str) for name in shared)
    _expect(fits, "weights", f"shared must be a list of names; got {short(shared)}")
    shared = set(shared)
    for name, places in uses.items():
        where = f"weights, {short(name)}"
        _expect(places, where, "no layer uses it")
        if (len(places) > 1) != (name in shared):
            how = f"used in {short(sorted(places))}"
            raise Refused(where, f"{how} and {'' if name in shared else 'not '}declared as shared")
    strange = sorted(shared - set(uses))
    _expect(not strange, "weights", f"shared names unknown arrays {short(strange)}")


def _check_images(pixels: Stored, labels: Stored, shape: Shape, classes: int) -> None:
    _expect(pixels.dtype in (*FLOATS, "U8", "I32"), "images", f"unsupported dtype {pixels.dtype}")
    fits = pixels.shape[1:] == shape
    _expect(fits, "images", f"each image is {pixels.shape[1:]}; the declared input is {shape}")
    fits = labels.dtype in ("U8", "I32", "I64") and labels.shape == pixels.shape[:1]
    what = f"labels must be {pixels.shape[:1]} integers; got {labels.dtype}{labels.shape}"
    _expect(fits, "images", what)
    _expect(_in_classes(labels.values(), classes), "images", f"labels must be in [0, {classes})")


def _claims(fields: Any, count: int, classes: int) -> _Claims:
    where = "claims"
    _keys(fields, {"predictions", "radii", "correct", "certified"}, where)
    predictions, radii = fields["predictions"], fields["radii"]
    fits = are_counts(predictions) and len(predictions) == count
    _expect(fits, where, f"predictions must be {count} classes")
    fits = _in_classes(np.asarray(predictions), classes)
    _expect(fits, where, f"predictions must be in [0, {classes})")
    fits = isinstance(radii, list) and len(radii) == count
    _expect(fits, where, f"radii must be {count} numbers")
    for i, radius in enumerate(radii):
        fits = _is_number(radius) and radius >= 0
        what = f"the radius must be a finite number >= 0; got {short(radius)}"
        _expect(fits, f"claims, image {i}", what)
    fits = are_counts([fields["correct"]])
    _expect(fits, where, f"correct must be a count; got {short(fields['correct'])}")
    _expect(isinstance(fields["certified"], list), where, "certified must be a list")
    certified = []
    for i, entry in enumerate(fields["certified"]):
        place = f"claims, certified[{i}]"
        _keys(entry, {"radius", "images"}, place)
        radius, images = entry["radius"], entry["images"]
        fits = _is_number(radius) and radius >= 0 and are_counts([images])
        _expect(fits, place, f"must be a radius and a number of images; got {short(entry)}")
        certified.append((float(radius), images))
    numbers = np.asarray(predictions, np.int64), np.asarray(radii, np.float64)
    return _Claims(*numbers, fields["correct"], tuple(certified))


def _range(pixels: Stored, claimed: tuple[float, float]) -> tuple[float, float]:
    """Return the least and largest pixel; refuse pixels outside the claimed range."""
    ends = [(float(np.min(chunk)), float(np.max(chunk))) for chunk in pixels.chunks()]
    least, most = min(low for low, _ in ends), max(high for _, high in ends)
    what = f"pixels are within [{least!r}, {most!r}]; claimed is {list(claimed)}"
    _expect(claimed[0] <= least and most <= claimed[1], "images", what)
    return least, most


def _radii(
    nodes: Nodes, pixels: Stored, claims: _Claims, single: bool, batch: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return radii, and for each image a class of a certainly larger logit, or -1.

    In float32 the radii hold only up to the claimed radii.
    """
    constants = PairConstants(nodes)
    found, better = [], []
    for start in range(0, len(claims.radii), batch):
        rows = slice(start, start + batch)
        claimed, predictions = claims.radii[rows], claims.predictions[rows]
        state = State(
            values=pixels.values(rows).astype(np.float64),
            error=np.zeros(len(claimed)),
            reach=up(claimed),
            deployed=np.zeros(len(claimed)) if single else None,
        )
        state = evaluate(nodes, state)
        chosen = state.values[np.arange(len(predictions)), predictions]
        wrong = down(np.max(state.values, axis=1) - chosen) > 2 * state.error
        better.append(np.where(wrong, np.argmax(state.values, axis=1), -1))
        margins = lower_margins(state, predictions)
        radii = np.min(down(margins / constants.rows(predictions)), axis=1)
        found.append(np.maximum(radii, 0.0))
    return np.concatenate(found), np.concatenate(better)


def _check_radii(
    radii: np.ndarray, better: np.ndarray, claims: _Claims, proved: np.ndarray
) -> None:
    """Refuse claimed radii above the proved ones; a radius of 0 claims nothing."""
    # A claimed decimal exceeds its float64 by at most half a unit in the last place.
    short_of = np.flatnonzero((claims.radii > 0) & ~(up(claims.radii) <= radii))
    if not len(short_of):
        return
    i = short_of[0]
    if better[i] < 0:
        most = _digits(radii[i].item(), decimal.ROUND_FLOOR)
        what = f"the radius {claims.radii[i].item()!r} is not proved, only {most}"
    else:
        what = (
            f"class {claims.predictions[i]} is predicted, but class {better[i]} has a larger logit"
        )
    listed = [f"{j} by {claims.radii[j] - radii[j]:.3g}" for j in short_of[:5]]
    more = ", ..." if len(short_of) > 5 else ""
    what += f" ({len(short_of)} of {len(radii)} images fall short: {', '.join(listed)}{more})"
    raise Refused(f"claims, image {i}", what, proved)


def _counts(
    right: np.ndarray, claims: _Claims, proved: np.ndarray
) -> tuple[int, tuple[tuple[float, int], ...]]:
    """Count correct images and images certified at each radius; refuse counts below the claims."""
    correct = int(np.sum(right))
    if claims.correct > correct:
        what = f"{claims.correct} correct images are claimed; {correct} are proved"
        raise Refused("claims", what, proved)
    certified, ordered = [], np.sort(claims.radii[right])
    for i, (radius, images) in enumerate(claims.certified):
        found = len(ordered) - int(np.searchsorted(ordered, radius))
        if images > found:
            what = f"{images} images are claimed at radius {radius!r}; {found} are proved"
            raise Refused(f"claims, certified[{i}]", what, proved)
        certified.append((radius, found))
    return correct, tuple(certified)


def _keys(fields: Any, wanted: Any, where: str) -> None:
    _expect(isinstance(fields, dict), where, f"must be an object; got {short(fields)}")
    for key in sorted(set(fields) ^ set(wanted)):
        raise Refused(where, f"{'unknown' if key in fields else 'missing'} key {short(key)}")


def _expect(fits: object, where: str, otherwise: str) -> None:
    if not fits:
        raise Refused(where, otherwise)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < (2**53 if type(value) is int else 2**200)


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _in_classes(values: np.ndarray, classes: int) -> bool:
    return bool(np.all((values >= 0) & (values < classes)))
