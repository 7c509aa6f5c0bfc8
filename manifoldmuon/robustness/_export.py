"""Export of certificates: weights, images and claims, for `manifoldmuon_verify`."""

from __future__ import annotations

import decimal
import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from manifoldmuon._internal.arguments import check_number
from manifoldmuon._internal.text import missing_extra
from manifoldmuon.modules import Add, Atom, Compose, Concatenate, Module, Stack, Tied
from manifoldmuon.robustness._certificates import CertificationResult
from manifoldmuon_verify import Refused, verify

FORMAT, VERSION = "manifoldmuon-certificate", 2
Description = dict[str, Any]


class Arrays:
    """The arrays of a certificate, by unique names."""

    def __init__(self):
        self.values: dict[str, np.ndarray] = {}
        self.shared: dict[str, None] = {}  # names of arrays used by several layers, in order
        self._given: list[tuple[Any, str]] = []

    def add(self, kind: str, value: Any) -> str:
        """Add an array of a layer of this kind, unless it was added before; return its name."""
        for given, name in self._given:
            if given is value:
                self.shared[name] = None
                return name
        name = f"{len(self.values)}.{kind}"
        self.values[name] = np.asarray(value)
        self._given.append((value, name))
        return name


def export(
    directory: str | os.PathLike[str],
    certified: CertificationResult,
    *,
    pixels: tuple[float, float] | None = None,
    at: Sequence[float] = (),
    arithmetic: str = "real",
) -> Path:
    """Write `certificate.json`, `weights.safetensors` and `images.safetensors`; return the first.

    `python -m manifoldmuon_verify DIRECTORY` then derives the claims from weights and images, or
    rejects them. The claims are the predictions and radii of `certify`, lowered to what the
    verifier proves: it bounds rounding errors, and `certify` computes logits in float32 without
    such a bound. Export takes as long as a verification. See the page on certificates.

    Args:
      directory: a new or an empty directory; it appears with all three files or not at all.
      certified: a result of `certify` with labels, for a network of layers that the verifier knows
        (see `describe`). To claim less, replace `radii`: a radius of 0 claims nothing.
      pixels: the smallest and largest possible value of a pixel, such as `(0, 255)`, which set the
        unit of the radii. By default the smallest and largest value in the images.
      at: the radii at which to claim the certified accuracy.
      arithmetic: `"real"` makes claims for the network in exact arithmetic, `"float32"` for its
        computation in float32, with sums in any order, which proves smaller radii. Claimed radii
        are rounded down to six digits.

    Raises:
      FileExistsError: the directory is not empty.
      ValueError: arguments do not fit, or the verifier refuses weights or images.

    Examples:
      >>> import pathlib, tempfile
      >>> folder = pathlib.Path(tempfile.mkdtemp()) / "certificate"
      >>> net = mm.modules.Linear(2, 2, mm.manifolds.Orthogonal())
      >>> found = certify(net, jnp.eye(2), jnp.eye(2), jnp.arange(2))
      >>> export(folder, found, pixels=(0.0, 1.0), at=[0.5]).name
      'certificate.json'
    """
    folder = Path(directory)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is not empty; name a new directory")
    images, labels, radii = certified.images, certified.labels, certified.radii
    if labels is None:
        raise ValueError("a certificate needs labels: write certify(..., labels)")
    if not (np.isfinite(radii) & (radii >= 0)).all():
        raise ValueError(
            "certified.radii must be finite and not negative: those of a constant network are"
            " infinite, replace them"
        )
    at = np.atleast_1d(at).tolist()
    for radius in at:
        check_number("export(at)", radius, within="[0, inf)")
    if images.dtype.kind in "iu" and images.dtype.name not in ("uint8", "int32"):
        if np.min(images) < -(2**31) or np.max(images) >= 2**31:
            raise ValueError(f"images of integers must fit into int32; got {images.dtype}")
        images = images.astype(np.int32)
    images = images.astype(images.dtype.newbyteorder("="))
    if arithmetic not in ("real", "float32"):
        raise ValueError(f"arithmetic must be 'real' or 'float32'; got {arithmetic!r}")
    ends = (np.min(images), np.max(images)) if pixels is None else tuple(pixels)
    if len(ends) != 2 or not np.isfinite(np.asarray(ends, np.float64)).all():
        raise ValueError(f"pixels must be two finite numbers, such as (0, 255); got {pixels!r}")
    low, high = ends
    if not (low <= np.min(images) and np.max(images) <= high):
        raise ValueError(
            f"pixels must include all images, which are in [{np.min(images)}, {np.max(images)}]; "
            f"got {pixels!r}"
        )
    arrays = Arrays()
    for name, array in (("shift", certified.shift), ("scale", certified.scale)):
        if array.ndim > 1 or array.size not in (1, images.shape[-1]):
            raise ValueError(f"{name} must be a number, or a number per channel; got {array.shape}")
    network = describe(certified.net, certified.params, arrays)
    weights, weight_file = _packed("weights.safetensors", arrays.values)
    pictures, image_file = _packed(
        "images.safetensors", {"images": images, "labels": labels.astype(np.int64)}
    )
    certificate = {
        "format": FORMAT,
        "version": VERSION,
        "norm": "l2",
        "arithmetic": arithmetic,
        "weights": weights | {"shared": list(arrays.shared)},
        "images": pictures,
        "input": {
            "shape": list(images.shape[1:]),
            "pixels": [float(low), float(high)],
            "shift": certified.shift.tolist(),
            "scale": certified.scale.tolist(),
        },
        "network": network,
    }

    def contents(radii: np.ndarray) -> dict[str, bytes]:
        claims = _claims(certified.predicted, labels, radii, at)
        text = _format_json(certificate | {"claims": claims}).encode()
        files = {weights["file"]: weight_file, pictures["file"]: image_file}
        return files | {"certificate.json": text}

    # Smaller claims take less room for rounding: what is proved now is proved then.
    _write(folder.resolve(), contents(np.minimum(radii, _proved(contents(radii)))))
    return folder / "certificate.json"


def _claims(
    predicted: np.ndarray, labels: np.ndarray, radii: np.ndarray, at: Sequence[float]
) -> Description:
    claimed = np.array([_floor(radius) for radius in radii])
    right = (predicted == labels) & (claimed > 0)
    return {
        "predictions": predicted.tolist(),
        "radii": claimed.tolist(),
        "correct": int(np.sum(right)),
        "certified": [
            {"radius": float(r), "images": int(np.sum(right & (claimed >= r)))} for r in at
        ],
    }


def _proved(contents: dict[str, bytes]) -> np.ndarray:
    """Return radii that the verifier proves, whatever the certificate claims."""
    with tempfile.TemporaryDirectory() as folder:
        _write(Path(folder, "certificate"), contents)
        try:
            radii = verify(Path(folder, "certificate")).radii
        except Refused as refusal:
            if refusal.radii is None:
                what = f"the verifier refuses these weights or images: {refusal}"
                raise ValueError(what) from None
            radii = refusal.radii
    return np.nextafter(radii, 0)


@functools.singledispatch
def describe(module: Module, params: Any, arrays: Arrays) -> list[Description]:
    """Return a module's entries of a certificate, as in the table on the page on certificates.

    The default entry has the kind and the fields named by the module's `entry`, and the weight of
    an atom. To export your own module, decorate a function of these arguments with
    `describe.register`.

    Args:
      module: a module of the network.
      params: its parameters, with the axes of stacks in front.
      arrays: gets the arrays named in the entries.

    Examples:
      >>> class Center(mm.modules.Bond):
      ...     def forward(self, x):
      ...         return x - x.mean(axis=-1, keepdims=True)
      >>> @describe.register
      ... def describe_center(layer: Center, params, arrays):
      ...     return [{"kind": "mean_subtract"}]
    """
    if not module.entry:
        raise TypeError(
            f"{module.describe()} cannot be exported: the verifier reads Linear, Bias, GroupSort "
            "and the layers on the page 'Certificates'"
        )
    kind, *fields = module.entry
    weight = {"weight": arrays.add(kind, params)} if isinstance(module, Atom) else {}
    values = {name: getattr(module, name) for name in fields}
    numbers = {k: x.item() if isinstance(x, np.generic) else x for k, x in values.items()}
    return [{"kind": kind, **weight, **numbers}]


@describe.register
def describe_compose(module: Compose, params: Any, arrays: Arrays) -> list[Description]:
    entries = []
    layers = list(zip(module.modules, params, strict=True))
    for i, (layer, weights) in enumerate(layers):
        if isinstance(layer, Concatenate):
            if i + 1 == len(layers) or not isinstance(layers[i + 1][0], Add):
                raise TypeError("parallel modules can be exported only if Add follows them")
            branches = [
                describe(branch, inner, arrays)
                for branch, inner in zip(layer.modules, weights, strict=True)
            ]
            entries.append({"kind": "sum", "branches": branches})
        elif not isinstance(layer, Add):
            entries += describe(layer, weights, arrays)
        elif not i or not isinstance(layers[i - 1][0], Concatenate):
            raise TypeError("Add can be exported only after parallel modules")
    return entries


@describe.register
def describe_stack(module: Stack, params: Any, arrays: Arrays) -> list[Description]:
    inner = describe(module.module, params, arrays)
    return [{"kind": "stack", "copies": module.copies, "layers": inner}]


@describe.register
def describe_tied(module: Tied, params: Any, arrays: Arrays) -> list[Description]:
    return describe(module.module, module.untied(params), arrays)


def _floor(value: float) -> float:
    """Round down to six significant digits; negative values give 0."""
    digits = decimal.Context(prec=6, rounding=decimal.ROUND_FLOOR)
    return max(0.0, float(digits.create_decimal_from_float(float(value))))


def _packed(file: str, arrays: dict[str, np.ndarray]) -> tuple[Description, bytes]:
    """Return a certificate's entry for a file, and the file itself."""
    try:
        from safetensors.numpy import save
    except ImportError as error:
        raise missing_extra("robustness.export", "safetensors", "certificates") from error
    data = save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
    # Name dtypes as in the file's header.
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    entries = {
        name: {
            "dtype": header[name]["dtype"],
            "shape": list(array.shape),
            "sha256": _sha256_of_bytes(array.tobytes()),
        }
        for name, array in arrays.items()
    }
    return {"file": file, "sha256": _sha256_of_bytes(data), "arrays": entries}, data


def _sha256_of_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _format_json(certificate: Description) -> str:
    """Format as JSON with a line per entry."""
    lines = (f"{json.dumps(k)}: {json.dumps(v, allow_nan=False)}" for k, v in certificate.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _write(folder: Path, contents: dict[str, bytes]) -> None:
    """Write a directory of files atomically: all files or none."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    begun = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        for name, data in contents.items():
            (begun / name).write_bytes(data)
        begun.chmod(0o755)  # temporary directories are private to their owner
        # Fails if the directory has been filled in the meantime: only an empty one is replaced.
        begun.rename(folder)
    except OSError:
        shutil.rmtree(begun, ignore_errors=True)
        raise
