"""A valid certificate, and edits that forge it."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manifoldmuon.manifolds import Orthogonal, Stiefel
from manifoldmuon.modules import Bias, GroupSort, Linear, residual
from manifoldmuon.robustness import certify, export
from manifoldmuon_verify import Refused, verify

IMAGES, SHIFT, SCALE = 40, 0.25, 0.5
FILES = ("certificate.json", "weights.safetensors", "images.safetensors")
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I32": "<i4", "I64": "<i8", "U8": "|u1"}


def network():
    """Linear layers and biases, MaxMin, and a stack of residual blocks."""
    square = Linear(8, 8, Orthogonal())
    block = GroupSort(2) @ Bias(8) @ square
    first = square @ Bias(8) @ Linear(8, 12, Stiefel())
    return Bias(3) @ Linear(3, 8, Stiefel()) @ residual(block, 2) @ block @ first


def case():
    """Return a network that predicts two classes, nonzero biases, images, partly wrong labels."""
    net, rng = network(), np.random.default_rng(8)
    params = jax.tree.map(
        lambda w, spec: w + 0.2 * rng.normal(size=w.shape).astype(np.float32) * (spec.ndim == 1),
        net.init(jax.random.key(3)),
        net.weights(),
    )
    images = rng.uniform(size=(IMAGES, 12)).astype(np.float32)
    logits = net.apply(params, jnp.asarray((images - SHIFT) / SCALE))
    labels = np.where(rng.uniform(size=IMAGES) < 0.7, np.argmax(logits, axis=-1), 0)
    return net, params, images, labels


def export_radii(place, net, params, images, labels, radii, *, shift=0.0, scale=1.0, **options):
    """Export these radii or the proved ones, for weights at any distance from their manifolds."""
    found = certify(net, params, images, labels, shift=shift, scale=scale, tolerance=np.inf)
    found = dataclasses.replace(found, radii=np.asarray(radii, np.float64))
    return export(place, found, **options)


def refusal(*files, **options) -> str:
    """Verify a certificate that must be refused; return the reason."""
    with pytest.raises(Refused) as caught:
        verify(*files, **options)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 400
    return text


class Forgery:
    """Certificate's three files, parsed.

    Attributes:
      told: contents of `certificate.json`.
      weights: weight arrays by name, as `(dtype, shape, bytes)`.
      images: arrays of images and labels, in the same form.
    """

    def __init__(self, folder: Path, *edits: Callable[["Forgery"], Any]):
        self.told = json.loads((folder / "certificate.json").read_text())
        self.weights = unpack((folder / "weights.safetensors").read_bytes())
        self.images = unpack((folder / "images.safetensors").read_bytes())
        for edit in edits:
            edit(self)

    def change(self, name: str, function: Callable[[Any], Any], part: str = "weights") -> None:
        """Apply a function to the numbers of an array."""
        arrays = getattr(self, part)
        values = numbers(arrays[name]).copy()
        arrays[name] = stored(np.asarray(function(values)).astype(values.dtype))

    def write(self, folder: Path, digests: bool = True) -> Path:
        """Write all files; `digests` recomputes the digests, otherwise the old ones stay.

        A string `@@TEXT@@` in the certificate is written as bare TEXT.
        """
        folder.mkdir()
        for part in ("weights", "images"):
            data = pack(getattr(self, part))
            (folder / f"{part}.safetensors").write_bytes(data)
            if digests and isinstance(self.told.get(part), dict):
                self.told[part]["sha256"] = sha256(data)
                self.told[part]["arrays"] = declared(getattr(self, part))
        (folder / "certificate.json").write_text(bare(json.dumps(self.told)))
        return folder

    def replace(self, folder: Path, part: str, data: bytes | bytearray) -> None:
        """Replace a file of arrays in a written certificate, with its digest."""
        (folder / f"{part}.safetensors").write_bytes(data)
        self.told[part]["sha256"] = sha256(data)
        (folder / "certificate.json").write_text(json.dumps(self.told))


def bare(text: str) -> str:
    """Replace each JSON string `@@TEXT@@` by bare TEXT."""
    return re.sub('"@@(.*?)@@"', lambda found: json.loads(f'"{found[1]}"'), text)


def sha256(data: bytes | bytearray) -> str:
    return hashlib.sha256(data).hexdigest()


def declared(arrays: dict[str, Any]) -> dict[str, Any]:
    """Return the declarations of arrays, with their digests."""
    return {
        name: {"dtype": dtype, "shape": shape, "sha256": sha256(raw)}
        for name, (dtype, shape, raw) in arrays.items()
    }


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return header and body of a safetensors file."""
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def unpack(data: bytes) -> dict[str, Any]:
    """Return the arrays of a safetensors file as `(dtype, shape, bytes)`."""
    header, body = split(data)
    return {
        name: (entry["dtype"], entry["shape"], body[slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }


def pack(arrays: dict[str, Any]) -> bytes:
    """Return a safetensors file."""
    header, end = {}, 0
    for name, (dtype, shape, raw) in arrays.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(raw)]}
        end += len(raw)
    return with_header(header, b"".join(raw for _, _, raw in arrays.values()))


def with_header(header: Any, body: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def numbers(entry: tuple[str, list[int], bytes]) -> np.ndarray:
    """Return an entry of `unpack` as an array."""
    dtype, shape, data = entry
    return np.frombuffer(data, DTYPES[dtype]).reshape(shape)


def stored(array: Any) -> tuple[str, list[int], bytes]:
    """Return an array as an entry of `unpack`."""
    array = np.asarray(array)
    [name] = [name for name, code in DTYPES.items() if code == array.dtype.str]
    return name, list(array.shape), array.tobytes()


def deep(depth: int, inner: Any = 0) -> Any:
    """Return `inner`, nested in `depth` lists."""
    for _ in range(depth):
        inner = [inner]
    return inner


# Edits of a forgery. A path such as `claims.radii.3` names an entry of the certificate.


def _entry(f: Forgery, path: str) -> tuple[Any, Any]:
    node, *keys = f.told, *(int(key) if key.isdigit() else key for key in path.split("."))
    for key in keys[:-1]:
        node = node[key]
    return node, keys[-1]


def put(path: str, value: Any):
    """Set an entry; a function maps the old value to the new one."""

    def edit(f: Forgery) -> None:
        node, key = _entry(f, path)
        node[key] = value(node[key]) if callable(value) else value

    return edit


def drop(path: str):
    """Remove an entry."""

    def edit(f: Forgery) -> None:
        node, key = _entry(f, path)
        del node[key]

    return edit


def insert(path: str, **layer: Any):
    """Insert a layer before this place of a list."""

    def edit(f: Forgery) -> None:
        node, key = _entry(f, path)
        node.insert(key, layer)

    return edit


def swap(first: str, second: str):
    """Exchange two entries."""

    def edit(f: Forgery) -> None:
        (a, i), (b, j) = _entry(f, first), _entry(f, second)
        a[i], b[j] = b[j], a[i]

    return edit


def weights(**arrays: Any):
    """Set weight arrays: `(dtype, shape, bytes)`, or None to remove the array."""

    def edit(f: Forgery) -> None:
        f.weights |= arrays
        f.weights = {name: array for name, array in f.weights.items() if array is not None}

    return edit


def change(name: str, function: Callable[[Any], Any], part: str = "weights"):
    """Apply a function to the numbers of an array."""
    return lambda f: f.change(name, function, part)


def every(*edits):
    """Make several edits."""
    return lambda f: [edit(f) for edit in edits]
