"""A certificate that holds, and tools to forge it."""

import copy
import hashlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from manifoldmuon.manifolds import Orthogonal, Stiefel
from manifoldmuon.modules import Bias, Householder, Linear, MaxMin, residual
from manifoldmuon.robustness import export
from manifoldmuon_verify import verify

FEATURES, WIDTH, CLASSES, IMAGES = 12, 8, 3, 40
SHIFT, SCALE = 0.25, 0.5
AT = (0.01, 0.05, 0.1)


def network():
    """Linear layers and biases, two activations, and a stack of residual blocks."""
    block = MaxMin() @ Bias(WIDTH) @ Linear(WIDTH, WIDTH, Orthogonal())
    first = Householder(WIDTH) @ Bias(WIDTH) @ Linear(WIDTH, FEATURES, Stiefel())
    second = MaxMin() @ Bias(WIDTH) @ Linear(WIDTH, WIDTH, Orthogonal())
    return Bias(CLASSES) @ Linear(CLASSES, WIDTH, Stiefel()) @ residual(block, 2) @ second @ first


def case():
    """A network, parameters with biases that count, images, and labels, of which some are wrong."""
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


def write_tight(folder: Path) -> Path:
    """A certificate in a new folder whose radii are the largest that the verifier admits."""
    net, params, images, labels = case()
    options = {"shift": SHIFT, "scale": SCALE, "at": AT}
    export(folder / "loose", net, params, images, labels, np.zeros(IMAGES), **options)
    radii = verify(folder / "loose").radii
    export(folder / "tight", net, params, images, labels, radii, **options)
    return folder / "tight"


def sha256(data: bytes | bytearray) -> str:
    return hashlib.sha256(data).hexdigest()


class Forgery:
    """The three files of a certificate, taken apart.

    Attributes:
      told: the certificate.
      weights: the arrays by name, as `(dtype, shape, bytes)`.
      images: the same.
    """

    def __init__(self, folder: Path):
        self.told = json.loads((folder / "certificate.json").read_text())
        self.weights = unpack((folder / "weights.safetensors").read_bytes())
        self.images = unpack((folder / "images.safetensors").read_bytes())

    def copy(self) -> "Forgery":
        return copy.deepcopy(self)

    def change(self, name, function, part="weights"):
        """Applies a function to the numbers of an array."""
        arrays = getattr(self, part)
        dtype, shape, data = arrays[name]
        values = np.frombuffer(data, {"F32": "<f4", "I64": "<i8"}[dtype]).reshape(shape).copy()
        new = np.asarray(function(values), values.dtype)
        arrays[name] = (dtype, list(new.shape), new.tobytes())

    def write(self, folder: Path, digests: bool) -> Path:
        """Writes all files; with digests that fit what was changed, or with the old ones."""
        folder.mkdir()
        for part in ("weights", "images"):
            data = pack(getattr(self, part))
            (folder / f"{part}.safetensors").write_bytes(data)
            if digests:
                self.told[part]["sha256"] = sha256(data)
                self.told[part]["arrays"] = {
                    name: {"dtype": dtype, "shape": shape, "sha256": sha256(raw)}
                    for name, (dtype, shape, raw) in getattr(self, part).items()
                }
        (folder / "certificate.json").write_text(json.dumps(self.told))
        return folder


def unpack(data: bytes) -> dict:
    size = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    return {
        name: (entry["dtype"], entry["shape"], body[slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }


def pack(arrays: dict) -> bytes:
    header, end = {}, 0
    for name, (dtype, shape, raw) in arrays.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(raw)]}
        end += len(raw)
    return with_header(header, b"".join(raw for _, _, raw in arrays.values()))


def with_header(header, body: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body
