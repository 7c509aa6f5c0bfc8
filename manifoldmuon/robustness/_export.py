"""Certificates that others can check: weights, images and claims, for `manifoldmuon_verify`."""

from __future__ import annotations

import decimal
import functools
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Array, Int, Real

from manifoldmuon.modules import (
    Abs,
    Add,
    AveragePool,
    Bias,
    Bond,
    Compose,
    Concatenate,
    ExternalModule,
    Flatten,
    GroupSort,
    Householder,
    Identity,
    Linear,
    LocallyConnected,
    MeanSubtract,
    Module,
    Mul,
    NormPool,
    ReLU,
    ScaledReLU,
    Shift,
    SpaceToDepth,
    Stack,
    SwapAxes,
    Tied,
    TwoTap,
)
from manifoldmuon.robustness._certificates import logits_of

FORMAT, VERSION = "manifoldmuon-certificate", 2
_BATCH = 500


class Arrays:
    """The arrays of a certificate, by names of their own.

    Attributes:
      values: by name.
      shared: the names of those that stand in several places.
    """

    def __init__(self):
        self.values: dict[str, np.ndarray] = {}
        self.shared: list[str] = []
        self._given: list[tuple[Any, str]] = []

    def add(self, kind: str, value: Any) -> str:
        """Adds an array, unless this very object is there already, and returns its name.

        Args:
          kind: of the layer that it belongs to; a part of the name.
          value: an array.
        """
        for given, name in self._given:
            if given is value:
                self.shared = [*self.shared, name] if name not in self.shared else self.shared
                return name
        name = f"{len(self.values)}.{kind}"
        self.values[name] = np.asarray(value)
        self._given.append((value, name))
        return name


def export(
    directory: str | os.PathLike[str],
    net: Module | ExternalModule,
    params: Any,
    images: Real[np.ndarray | Array, "n ..."],
    labels: Int[np.ndarray | Array, "..."],
    radii: Real[np.ndarray | Array, "..."],
    *,
    shift: float | Sequence[float] = 0.0,
    scale: float | Sequence[float] = 1.0,
    pixels: tuple[float, float] | None = None,
    at: Sequence[float] = (),
    arithmetic: str = "real",
    margin: float = 1e-5,
) -> Path:
    """Writes `certificate.json`, `weights.safetensors` and `images.safetensors`.

    `python -m manifoldmuon_verify DIRECTORY` then derives the claims anew from the weights and the
    images, or refuses them. Nothing is derived here: the claims are the network's own predictions
    and the radii that are given, less `margin`. The verifier bounds what rounding may do, which the
    float32 that radii are computed in does not. See the page on certificates.

    Args:
      directory: a new one, or one that is empty; it appears with all three files or not at all.
      net: a network of layers that the verifier knows (see `describe`); an `ExternalModule` one
        needs slots with atoms.
      params: its parameters; they are written in their own dtypes.
      images: in the unit of the pixels. The network sees `(images - shift) / scale`.
      labels: the true classes, `(n,)`.
      radii: `(n,)`: how far each image may move in the Euclidean norm, in the unit of the pixels,
        without a change of the predicted class; 0 where nothing is claimed.
      shift: a number, or one for each channel.
      scale: the same, positive.
      pixels: the least and the largest value that a pixel can have, such as `(0, 255)`: the unit
        in which radii are to be read. By default those of `images`.
      at: the radii at which the certified accuracy is claimed.
      arithmetic: `"real"` claims for the network in exact arithmetic, `"float32"` for the one that
        float32 computes, with sums in any order; the latter proves smaller radii.
      margin: every radius is claimed smaller by this part of the largest one, and rounded down to
        six digits.

    Returns:
      The path of the certificate.

    Raises:
      FileExistsError: the directory holds something.
      TypeError: a module of a kind that the verifier does not know.
      ValueError: arguments that do not fit.
    """
    net, params = net.network(params) if isinstance(net, ExternalModule) else (net, params)
    place = Path(directory)
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise FileExistsError(f"{place} holds something already; name a new directory")
    images, labels, radii = np.asarray(images), np.asarray(labels), np.asarray(radii, np.float64)
    count = len(images)
    if labels.shape != (count,) or radii.shape != (count,):
        raise ValueError(
            f"labels and radii must be one for each of {count} images; got {labels.shape} and "
            f"{radii.shape}"
        )
    if not (np.all(np.isfinite(radii)) and np.all(radii >= 0)):
        raise ValueError("radii must be finite and not negative")
    if not np.min(np.asarray(scale)) > 0:
        raise ValueError(f"scale must be positive; got {scale!r}")
    if arithmetic not in ("real", "float32"):
        raise ValueError(f"arithmetic must be 'real' or 'float32'; got {arithmetic!r}")
    low, high = (np.min(images), np.max(images)) if pixels is None else pixels
    if not (low <= np.min(images) and np.max(images) <= high):
        raise ValueError(
            f"pixels must hold all images, which are within [{np.min(images)}, {np.max(images)}]; "
            f"got {pixels!r}"
        )
    arrays = Arrays()
    network = describe(net, params, arrays)
    zero, unit = np.asarray(shift, np.float32), np.asarray(scale, np.float32)
    x = (images.astype(np.float32) - zero) / unit
    predictions = np.argmax(logits_of(net, params, x, _BATCH), axis=-1)
    claimed = np.array([_floor(r) for r in radii - margin * np.max(radii, initial=0.0)])
    right = (predictions == labels) & (claimed > 0)
    files = {
        "weights": _packed("weights.safetensors", arrays.values) | {"shared": arrays.shared},
        "images": _packed(
            "images.safetensors", {"images": images, "labels": labels.astype(np.int64)}
        ),
    }
    certificate = {
        "format": FORMAT,
        "version": VERSION,
        "norm": "l2",
        "arithmetic": arithmetic,
        **{name: {k: v for k, v in told.items() if k != "bytes"} for name, told in files.items()},
        "input": {
            "shape": list(images.shape[1:]),
            "pixels": [float(low), float(high)],
            "shift": np.asarray(shift, np.float64).tolist(),
            "scale": np.asarray(scale, np.float64).tolist(),
        },
        "network": network,
        "claims": {
            "predictions": predictions.tolist(),
            "radii": claimed.tolist(),
            "correct": int(np.sum(right)),
            "certified": [
                {"radius": float(r), "images": int(np.sum(right & (claimed >= r)))} for r in at
            ],
        },
    }
    contents = {told["file"]: told["bytes"] for told in files.values()}
    contents["certificate.json"] = _text(certificate).encode()
    _write(place, contents)
    return place / "certificate.json"


@functools.singledispatch
def describe(module: Module, params: Any, arrays: Arrays) -> list[dict[str, Any]]:
    """The entries of a certificate that stand for a module; the arrays that they name are added.

    For a module of one's own, register what it is in terms of the kinds that the verifier knows:
    `@describe.register`.

    Args:
      module: of a network.
      params: its parameters, with the axes of stacks in front.
      arrays: takes those that entries name.

    Raises:
      TypeError: no entry is known for this module.
    """
    raise TypeError(
        f"the verifier knows nothing like {module.describe()}: a certificate can be exported for "
        "networks of Linear, Bias, GroupSort and the other layers on the page on certificates"
    )


@describe.register
def _(module: Compose, params: Any, arrays: Arrays) -> list[dict[str, Any]]:
    entries = []
    parts = list(zip(module.modules, params, strict=True))
    for i, (part, weights) in enumerate(parts):
        if isinstance(part, Concatenate):
            if i + 1 == len(parts) or not isinstance(parts[i + 1][0], Add):
                raise TypeError("modules side by side can be exported only with Add behind them")
            branches = [
                describe(branch, inner, arrays)
                for branch, inner in zip(part.modules, weights, strict=True)
            ]
            entries.append({"kind": "sum", "branches": branches})
        elif not isinstance(part, Add):
            entries += describe(part, weights, arrays)
        elif not i or not isinstance(parts[i - 1][0], Concatenate):
            raise TypeError("Add can be exported only behind modules side by side")
    return entries


@describe.register
def _(module: Stack, params: Any, arrays: Arrays) -> list[dict[str, Any]]:
    inner = describe(module.module, params, arrays)
    return [{"kind": "stack", "copies": module.copies, "layers": inner}]


@describe.register
def _(module: Tied, params: Any, arrays: Arrays) -> list[dict[str, Any]]:
    return describe(module.module, module.untied(params), arrays)


def _register_atom(kind: str, atom: type[Module], *options: str) -> None:
    def entry(module: Any, params: Any, arrays: Arrays) -> list[dict[str, Any]]:
        told = {key: getattr(module, key) for key in options}
        return [{"kind": kind, "weight": arrays.add(kind, params), **told}]

    describe.register(atom, entry)


def _register_bond(kind: str, bond: type[Bond], *options: str) -> None:
    def entry(module: Any, params: Any, arrays: Arrays) -> list[dict[str, Any]]:
        return [{"kind": kind, **{key: getattr(module, key) for key in options}}]

    describe.register(bond, entry)


_register_atom("linear", Linear)
_register_atom("bias", Bias)
_register_atom("householder", Householder)
_register_atom("two_tap", TwoTap, "axis", "offset")
_register_bond("identity", Identity)
_register_bond("scale", Mul, "factor")
_register_bond("group_sort", GroupSort, "size")
_register_bond("abs", Abs)
_register_bond("relu", ReLU)
_register_bond("flatten", Flatten, "axes")
_register_bond("average_pool", AveragePool, "rows", "columns")
_register_bond("norm_pool", NormPool, "side")
_register_bond("space_to_depth", SpaceToDepth, "side")
_register_bond("swap_axes", SwapAxes)
_register_bond("shift", Shift, "pixels")


@describe.register
def _(module: ScaledReLU, params: Any, arrays: Arrays) -> list[dict[str, Any]]:
    return [{"kind": "relu"}, {"kind": "scale", "factor": math.sqrt(2)}]


@describe.register
def _(module: LocallyConnected, params: Any, arrays: Arrays) -> list[dict[str, Any]]:
    kind = "locally_connected"
    return [{"kind": kind, "weight": arrays.add(kind, params), "axes": len(module.places)}]


@describe.register
def _(module: MeanSubtract, params: Any, arrays: Arrays) -> list[dict[str, Any]]:
    if module.axis not in (-1, (-1,)):
        raise TypeError(f"MeanSubtract can be exported over the last axis, not {module.axis}")
    return [{"kind": "mean_subtract"}]


def _floor(value: float) -> float:
    """Six significant digits, never more than the value; 0 if that is negative."""
    digits = decimal.Context(prec=6, rounding=decimal.ROUND_FLOOR)
    return max(0.0, float(digits.create_decimal_from_float(float(value))))


def _packed(file: str, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return a certificate's entry for a file, with the file itself under `bytes`."""
    try:
        from safetensors.numpy import save
    except ImportError as error:
        raise ImportError(
            "robustness.export needs safetensors: pip install 'manifoldmuon[certificates]'"
        ) from error
    data = save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
    # The words for dtypes are those of the file's own header.
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    told = {
        name: {
            "dtype": header[name]["dtype"],
            "shape": list(array.shape),
            "sha256": _digest(array.tobytes()),
        }
        for name, array in arrays.items()
    }
    return {"file": file, "sha256": _digest(data), "arrays": told, "bytes": data}


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _text(certificate: dict[str, Any]) -> str:
    """JSON to be read: a line for each entry, and one for all images."""

    def line(value: Any) -> str:
        return json.dumps(value, allow_nan=False)

    parts = []
    for key, value in certificate.items():
        if isinstance(value, dict):
            inner = ",\n".join(f"  {line(k)}: {line(v)}" for k, v in value.items())
            parts.append(f"{line(key)}: {{\n{inner}\n}}")
        elif isinstance(value, list):
            inner = ",\n".join(f"  {line(entry)}" for entry in value)
            parts.append(f"{line(key)}: [\n{inner}\n]")
        else:
            parts.append(f"{line(key)}: {line(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _write(place: Path, contents: dict[str, bytes]) -> None:
    """A directory of files, there whole or not at all."""
    place.parent.mkdir(parents=True, exist_ok=True)
    begun = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
    try:
        for name, data in contents.items():
            (begun / name).write_bytes(data)
        begun.chmod(0o755)  # a temporary directory is its owner's alone
        # Fails if something has appeared there meanwhile: only an empty directory gives way.
        begun.rename(place)
    except OSError:
        shutil.rmtree(begun, ignore_errors=True)
        raise
