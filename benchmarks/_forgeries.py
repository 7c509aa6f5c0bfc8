"""Random changes to certificates, with repaired digests."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

FILES = ("certificate.json", "weights.safetensors", "images.safetensors")
Rng = np.random.Generator


class Forgery:
    """Certificate's three files, parsed.

    Attributes:
      told: contents of `certificate.json`.
      weights: weight arrays by name, as `(dtype, shape, bytes)`.
      images: arrays of images and labels, in the same form.
    """

    def __init__(self, folder: Path):
        self.told = json.loads((folder / "certificate.json").read_text())
        self.weights = unpack((folder / "weights.safetensors").read_bytes())
        self.images = unpack((folder / "images.safetensors").read_bytes())

    def copy(self) -> Forgery:
        return copy.deepcopy(self)

    def change(self, name: str, function: Callable[[Any], Any], part: str = "weights") -> None:
        """Apply a function to the numbers of an array."""
        arrays = getattr(self, part)
        dtype, shape, data = arrays[name]
        kind = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "U8": "u1"}[dtype]
        values = np.frombuffer(data, kind).reshape(shape).copy()
        new = np.asarray(function(values)).astype(values.dtype)
        arrays[name] = (dtype, list(new.shape), new.tobytes())

    def write(self, folder: Path, digests: bool) -> Path:
        """Write all files; `digests` recomputes the digests, otherwise the old ones stay.

        A string `@@TEXT@@` in the certificate is written as bare TEXT.
        """
        folder.mkdir()
        for part in ("weights", "images"):
            data = pack(getattr(self, part))
            (folder / f"{part}.safetensors").write_bytes(data)
            if digests and isinstance(self.told.get(part), dict):
                self.told[part]["sha256"] = sha256(data)
                self.told[part]["arrays"] = {
                    name: {"dtype": dtype, "shape": shape, "sha256": sha256(raw)}
                    for name, (dtype, shape, raw) in getattr(self, part).items()
                }
        (folder / "certificate.json").write_text(bare(json.dumps(self.told)))
        return folder


def bare(text: str) -> str:
    """Replace each JSON string `@@TEXT@@` by bare TEXT."""
    return re.sub('"@@(.*?)@@"', lambda found: json.loads(f'"{found[1]}"'), text)


def sha256(data: bytes | bytearray) -> str:
    return hashlib.sha256(data).hexdigest()


def unpack(data: bytes) -> dict[str, Any]:
    size = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    return {
        name: (entry["dtype"], entry["shape"], body[slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }


def pack(arrays: dict[str, Any]) -> bytes:
    header, end = {}, 0
    for name, (dtype, shape, raw) in arrays.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(raw)]}
        end += len(raw)
    return with_header(header, b"".join(raw for _, _, raw in arrays.values()))


def with_header(header: Any, body: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def stored(array: Any) -> tuple[str, list[int], bytes]:
    """Return an array in the form that `Forgery` stores."""
    array = np.asarray(array)
    name = {"<f8": "F64", "<f4": "F32", "<f2": "F16", "<i8": "I64", "|u1": "U8"}[array.dtype.str]
    return name, list(array.shape), array.tobytes()


# ------------------------------------------------------------------ building blocks of mutations


def junk(rng: Rng) -> Any:
    """Draw a value that a reader does not expect."""
    return JUNK[rng.integers(len(JUNK))]


def deep(depth: int, inner: Any = 0) -> Any:
    """Return `inner`, nested in `depth` lists."""
    for _ in range(depth):
        inner = [inner]
    return inner


JUNK: list[Any] = [
    None, True, False, 0, -1, 1, 2, 3, 2**31, 2**47, 2**48, 2**63, 10**300, 0.5, -0.0, 1e308,
    "@@1e-400@@", "@@0.1000000000000000055511@@", "@@1e999@@", "@@NaN@@", "@@-Infinity@@",
    "@@1E400@@", "@@" + "9" * 5000 + "@@", "", "x", "a" * 10_000, "\ud800", "\0", "\n", "0.linear",
    "../weights.safetensors", [], {}, [[]], [0], [0, 0], [2**47, 2**47, 0], [1] * 100, [1] * 5000,
    list(range(1000)), {"kind": "identity"}, {"kind": []}, {"": {}}, deep(40), deep(200),
    "@@" + "[" * 900 + "]" * 900 + "@@", "@@" + "[" * 100_000 + "@@",
    "@@{" + ",".join(f'"{i}":{i}' for i in range(20_000)) + "}@@", [{"kind": "abs"}] * 300,
]  # fmt: skip


def layer(rng: Rng, forgery: Forgery) -> dict[str, Any]:
    """Draw a layer of random kind and options, with a new or an existing array."""
    few = lambda: int(rng.integers(1, 5))  # noqa: E731
    width = int(rng.choice([2, 3, 4, 6, 8, 12]))

    def array(*shape: int) -> str:
        if rng.random() < 0.3:
            return str(rng.choice(list(forgery.weights)))
        name = f"new{len(forgery.weights)}"
        forgery.weights[name] = stored(rng.normal(size=shape).astype(np.float32))
        return name

    makers: list[Callable[[], dict[str, Any]]] = [
        lambda: {"kind": "identity"},
        lambda: {"kind": "abs"},
        lambda: {"kind": "relu"},
        lambda: {"kind": "mean_subtract"},
        lambda: {"kind": "swap_axes"},
        lambda: {"kind": "flatten", "axes": few()},
        lambda: {"kind": "group_sort", "size": few()},
        lambda: {"kind": "scale", "factor": float(rng.choice([-1, 0, 0.5, 0.999, 1.001, 2, 1e9]))},
        lambda: {"kind": "space_to_depth", "side": few()},
        lambda: {"kind": "norm_pool", "side": few()},
        lambda: {"kind": "average_pool", "rows": few(), "columns": few()},
        lambda: {"kind": "shift", "pixels": int(rng.integers(-3, 4))},
        lambda: {"kind": "bias", "weight": array(width)},
        lambda: {"kind": "linear", "weight": array(width, width)},
        lambda: {"kind": "householder", "weight": array(width // 2, 2)},
        lambda: {"kind": "two_tap", "weight": array(width, few()), "axis": -2, "offset": few()},
        lambda: {"kind": "locally_connected", "weight": array(2, width, width), "axes": 1},
    ]
    return makers[rng.integers(len(makers))]()


def places(node: Any) -> list[tuple[Any, Any]]:
    """Return every node of a JSON tree, as its container and key."""
    keys = list(node) if isinstance(node, dict) else range(len(node))
    found = [(node, key) for key in keys]
    for key in keys:
        if isinstance(node[key], dict | list):
            found += places(node[key])
    return found


def lists(network: Any) -> list[Any]:
    """Return every list of layers."""
    found = [network]
    for entry in network:
        for inner in [entry.get("layers", []), *entry.get("branches", [])]:
            found += lists(inner) if inner else [inner]
    return found


# ------------------------------------------------------------------------------- the families


def tree(rng: Rng, base: Forgery, folder: Path) -> None:
    """Replace, remove, duplicate or exchange values of the certificate."""
    for _ in range(rng.integers(1, 4)):
        node, key = _choice(rng, places(base.told))
        if (isinstance(node, list) and key >= len(node)) or (
            isinstance(node, dict) and key not in node
        ):
            continue
        what = rng.integers(5)
        if what <= 1:
            node[key] = junk(rng)
        elif what == 2:
            del node[key]
        elif what == 3 and isinstance(node, list):
            node.insert(key, copy.deepcopy(node[key]))
        else:
            other, place = _choice(rng, places(base.told))
            value = copy.deepcopy(other[place])
            node[key] = value
    base.write(folder, digests=bool(rng.integers(2)))


def claims(rng: Rng, base: Forgery, folder: Path) -> None:
    """Strengthen claims, slightly or greatly; weaken some."""
    told = base.told["claims"]
    radii = told["radii"]
    for _ in range(rng.integers(1, 4)):
        i, what = int(rng.integers(len(radii))), rng.integers(8)
        if what == 0:
            radii[i] = radii[i] * float(1 + 10.0 ** -rng.integers(1, 7))
        elif what == 1:
            told["radii"] = radii = [r * float(1 + 10.0 ** -rng.uniform(1, 6)) for r in radii]
        elif what == 2:
            radii[i] = float(10.0 ** rng.uniform(-320, 5))
        elif what == 3:
            radii[i] = "@@1e-400@@"
        elif what == 4:
            told["predictions"][i] = int(rng.integers(4))
        elif what == 5:
            told["correct"] += int(rng.integers(-1, 3))
        elif what == 6 and told["certified"]:
            entry = _choice(rng, told["certified"])
            entry["images"] += int(rng.integers(-1, 3))
            entry["radius"] *= float(rng.choice([1, 0, 0.9, 1 + 1e-9, 1.1]))
        else:
            j = int(rng.integers(len(radii)))
            radii[i], radii[j] = radii[j], radii[i]
        radii = told["radii"]
        if any(isinstance(r, str) for r in radii):
            break
    base.write(folder, digests=True)


def numbers(rng: Rng, base: Forgery, folder: Path) -> None:
    """Change numbers in arrays; repair every digest."""
    for _ in range(rng.integers(1, 3)):
        name = _choice(rng, list(base.weights))
        factor = float(rng.choice([0, -1, 0.5, 1 - 1e-6, 1 + 1e-6, 1.01, 2, 1e-30, 1e20]))
        place = int(rng.integers(10**6))
        value = float(rng.choice([0, 1, -1, 1e-45, 1e-38, 1e38, np.nan, np.inf, rng.normal()]))

        def put(values: Any, place: int = place, value: float = value) -> Any:
            values.reshape(-1)[place % values.size] = value
            return values

        def permuted(values: Any) -> Any:
            return rng.permuted(values, axis=int(rng.integers(values.ndim)))

        def scaled(values: Any, factor: float = factor) -> Any:
            return values * factor

        ways = [put, permuted, scaled, np.transpose, lambda w: w[::-1]]
        with np.errstate(all="ignore"):
            base.change(name, _choice(rng, ways))
    base.write(folder, digests=True)


def pixels(rng: Rng, base: Forgery, folder: Path) -> None:
    """Scale images, shift, scale and range together, or only some of them."""
    factor, source = float(rng.choice([1e-6, 0.1, 0.9, 1.1, 50, 255, 1e6])), base.told["input"]
    claims = base.told["claims"]
    if rng.random() < 0.7:
        base.change("images", lambda x: x * factor, "images")
    for key in ("shift", "scale", "pixels"):
        if rng.random() < 0.7:
            source[key] = (np.asarray(source[key]) * factor).tolist()
    if rng.random() < 0.7:
        claims["radii"] = [r * factor * 0.999 for r in claims["radii"]]
    if rng.random() < 0.5:
        claims["certified"], claims["correct"] = [], 0
    if rng.random() < 0.2:
        base.change("labels", lambda y: rng.permutation(y), "images")
    base.write(folder, digests=True)


def network(rng: Rng, base: Forgery, folder: Path) -> None:
    """Insert, remove, exchange, duplicate, share or wrap layers."""
    for _ in range(rng.integers(1, 4)):
        entries = _choice(rng, lists(base.told["network"]))
        i, what = int(rng.integers(len(entries) + 1)), rng.integers(9)
        if what <= 2:
            entries.insert(i, layer(rng, base))
        elif not entries:
            continue
        elif what == 3:
            entries.pop(i % len(entries))
        elif what == 4:
            entries.insert(i, copy.deepcopy(entries[i % len(entries)]))
        elif what == 5:
            j = int(rng.integers(len(entries)))
            entries[i % len(entries)], entries[j] = entries[j], entries[i % len(entries)]
        elif what == 6:
            branches = [[] for _ in range(rng.integers(0, 3))]
            entries[i:] = [{"kind": "sum", "branches": [entries[i:], *branches]}]
        elif what == 7:
            copies = int(rng.choice([0, 1, 2, 3, 10**9]))
            entries[i:] = [{"kind": "stack", "copies": copies, "layers": entries[i:]}]
        else:
            entry = entries[i % len(entries)]
            entry.update(layer(rng, base))
    used: dict[str, int] = {}
    for node, key in places(base.told["network"]):
        if key == "weight" and isinstance(node[key], str):
            used[node[key]] = used.get(node[key], 0) + 1
    if rng.random() < 0.9:
        base.weights = {name: array for name, array in base.weights.items() if name in used}
        base.told["weights"]["shared"] = [name for name, count in used.items() if count > 1]
    if rng.random() < 0.5:  # leave possibly true claims, so that the numbers are checked
        told = base.told["claims"]
        told["radii"] = [0 if rng.random() < 0.8 else r for r in told["radii"]]
        told["certified"], told["correct"] = [], 0
    base.write(folder, digests=True)


def headers(rng: Rng, base: Forgery, folder: Path) -> None:
    """Change the safetensors header of the weights or the images."""
    base.write(folder, digests=True)
    part = str(rng.choice(["weights", "images"]))
    path = folder / f"{part}.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    for _ in range(rng.integers(1, 3)):
        node, key = _choice(rng, places(header))
        if key in node if isinstance(node, dict) else key < len(node):
            node[key] = junk(rng)
    text = bare(json.dumps(header)).encode()
    length = len(text) if rng.random() < 0.9 else int(rng.integers(2**62))
    data = length.to_bytes(8, "little") + text + body
    path.write_bytes(data)
    base.told[part]["sha256"] = sha256(data)
    (folder / "certificate.json").write_text(json.dumps(base.told))


def flips(rng: Rng, base: Forgery, folder: Path) -> None:
    """Change, insert, remove or cut off bytes; mostly repair the files' digests."""
    base.write(folder, digests=True)
    name = str(rng.choice(FILES))
    data = bytearray((folder / name).read_bytes())
    for _ in range(rng.integers(1, 6)):
        place, what = int(rng.integers(len(data))), rng.integers(10)
        if what < 6:
            data[place] = int(rng.choice(list(b'0123456789.-eE"{}[],: \\\0\xff\x7f')))
        elif what < 8:
            data.insert(place, int(rng.integers(256)))
        elif what == 8:
            del data[place]
        else:
            del data[max(place, 9) :]
    (folder / name).write_bytes(data)
    if name != "certificate.json" and rng.random() < 0.8:
        base.told[name.partition(".")[0]]["sha256"] = sha256(data)
        (folder / "certificate.json").write_text(json.dumps(base.told))


def files(rng: Rng, base: Forgery, folder: Path) -> None:
    """Replace a file by a pipe, device, folder, sparse file (up to 200 GiB), loop or nothing."""
    base.write(folder, digests=True)
    path = folder / str(rng.choice(FILES))
    path.unlink()
    ways: list[Callable[[], Any]] = [
        lambda: os.mkfifo(path),
        lambda: path.symlink_to("/dev/zero"),
        lambda: path.symlink_to("/dev/urandom"),
        lambda: path.symlink_to("/dev/full"),
        lambda: path.symlink_to("/proc/self/mem"),
        lambda: path.symlink_to("/proc/self/environ"),
        lambda: path.symlink_to(path.name),
        lambda: path.symlink_to("."),
        lambda: path.mkdir(),
        lambda: hole(path, 200 * 2**30),
        lambda: hole(path, 2**27),
        lambda: hole(path, 2**23),
        lambda: None,
    ]
    _choice(rng, ways)()


def hole(path: Path, size: int) -> None:
    """Create a sparse file of zeros, which takes no disk space."""
    with path.open("wb") as file:
        file.truncate(size)


# Consistent certificates without claims that need much work, or seem to.


def sizes(rng: Rng, base: Forgery, folder: Path) -> None:
    """Build a valid network with sizes over many orders of magnitude."""
    base.weights.clear()
    kind = str(rng.choice(SIZES))
    count, features, body = _sized(rng, base, kind)
    base.told["network"] = body
    shape = features if isinstance(features, list) else [features]
    count = max(1, min(count, 2**27 // math.prod(shape)))
    images = np.zeros((count, math.prod(shape)), np.uint8)
    if kind in ("sorting", "images"):
        images = rng.integers(0, 255, size=images.shape, dtype=np.uint8)
    images[:, 0] = 255 * (kind in ("sorting", "images"))  # class 0 has the largest logit or ties
    base.images = {
        "images": ("U8", [count, *shape], images.tobytes()),
        "labels": stored(np.zeros(count, np.int64)),
    }
    base.told["input"] = {"shape": shape, "pixels": [0, 255], "shift": 0, "scale": 1}
    base.told["claims"] = {
        "predictions": [0] * count, "radii": [0] * count, "correct": 0, "certified": []
    }  # fmt: skip
    if kind == "certified":
        entry = {"radius": 1, "images": 0}
        base.told["claims"]["certified"] = [entry] * _up_to(rng, 300_000)
    base.write(folder, digests=True)


SIZES = (
    "matrices", "outer", "classes", "places", "layers", "branches", "shared", "rank", "sorting",
    "pooling", "keys", "arrays", "nested", "images", "certified", "biases",
)  # fmt: skip


def _up_to(rng: Rng, most: int) -> int:
    return int(math.exp(rng.uniform(0, math.log(most))))


def _sized(rng: Rng, base: Forgery, kind: str) -> tuple[int, Any, list[Any]]:
    def add(*shape: int) -> str:
        name = f"{len(base.weights)}"
        values = rng.standard_normal(size=shape, dtype=np.float32) / math.sqrt(shape[-1])
        base.weights[name] = stored(values)
        return name

    def linear(m: int, n: int) -> dict[str, Any]:
        return {"kind": "linear", "weight": add(m, n)}

    base.told["weights"]["shared"] = []
    count = _up_to(rng, 5000)
    if kind == "matrices":
        widths = [max(2, _up_to(rng, 3000)) for _ in range(rng.integers(2, 6))]
        return count, widths[0], [linear(b, a) for a, b in itertools.pairwise(widths)]
    if kind == "outer":
        n = _up_to(rng, 2**20)
        return 1, [n, 1], [linear(_up_to(rng, 4096), 1), {"kind": "flatten", "axes": 2}]
    if kind == "classes":
        return count, 2, [linear(max(2, _up_to(rng, 2**20)), 2)]
    if kind == "places":
        p, m, n = _up_to(rng, 20_000), _up_to(rng, 16), _up_to(rng, 16)
        entry = {"kind": "locally_connected", "weight": add(p, m, n), "axes": 1}
        return min(count, 100), [p, n], [entry, {"kind": "flatten", "axes": 2}]
    if kind == "layers":
        one = _choice(rng, [{"kind": "abs"}, {"kind": "group_sort", "size": 4}, {"kind": "relu"}])
        many = _up_to(rng, 20_000)
        whole = [one] * many if rng.random() < 0.5 else [
            {"kind": "stack", "copies": many, "layers": [one]}
        ]  # fmt: skip
        return count, 4 * _up_to(rng, 1000), whole
    if kind == "branches":
        one: Any = {"kind": "sum", "branches": [[]] * _up_to(rng, 10**6)}
        return count, max(2, _up_to(rng, 1000)), [one]
    if kind == "nested":
        inner: list[Any] = [{"kind": "abs"}]
        for _ in range(rng.integers(1, 70)):
            inner = [{"kind": "sum", "branches": [inner, [{"kind": "relu"}]]}]
        return count, max(2, _up_to(rng, 10_000)), inner
    if kind == "shared":
        n = max(2, _up_to(rng, 1000))
        entry = linear(n, n)
        base.told["weights"]["shared"] = ["0"]
        return count, n, [entry] * max(2, _up_to(rng, 5000))
    if kind == "rank":
        entry = {"kind": "two_tap", "weight": add(2, _up_to(rng, 10**6)), "axis": -2, "offset": 1}
        return 1, [_up_to(rng, 10**5), 2], [entry, {"kind": "flatten", "axes": 2}]
    if kind == "sorting":
        size = max(2, _up_to(rng, 2**16))
        return count, size * _up_to(rng, 64), [{"kind": "group_sort", "size": size}]
    if kind == "pooling":
        side = _up_to(rng, 1000)
        name = str(rng.choice(["norm_pool", "space_to_depth"]))
        entry = {"kind": name, "side": side}
        return count, [side * _up_to(rng, 4), side, 3], [entry, {"kind": "flatten", "axes": 3}]
    if kind == "keys":
        base.told["network"] = []
        keys = {f"k{i}": i for i in range(_up_to(rng, 600_000))}
        return 1, 2, [{"kind": "abs", **keys}]
    if kind == "arrays":
        many = _up_to(rng, 30_000)
        entries = [{"kind": "bias", "weight": add(2)} for _ in range(many)]
        return 1, 2, entries
    if kind == "biases":
        n = _up_to(rng, 2**20)
        return 1, [n, 2], [{"kind": "bias", "weight": add(2)}, {"kind": "flatten", "axes": 2}]
    return _up_to(rng, 10**6), max(2, _up_to(rng, 10_000)), [{"kind": "relu"}]


def _choice(rng: Rng, values: Any) -> Any:
    return values[rng.integers(len(values))]


Family = Callable[[Rng, Forgery, Path], None]
FAMILIES: dict[str, Family] = {
    f.__name__: f
    for f in (tree, claims, numbers, pixels, network, headers, flips, files, sizes)
}  # fmt: skip
