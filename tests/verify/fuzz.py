"""Fuzz test: change certificates at random, and verify each in a process of limited memory.

    python -m tests.verify.fuzz --count 3000    # some minutes

Digests are repaired, and claims of accepted certificates are checked by an independent derivation
(`tests/verify/independent.py`). The tests run a fixed sample.
"""

import argparse
import copy
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import jax
import numpy as np
from tqdm import tqdm

from manifoldmuon import contrib, modules
from manifoldmuon.manifolds import Orthogonal, Stiefel
from manifoldmuon.modules import Bias, GroupSort, Linear, Module
from manifoldmuon.robustness import certify, export
from tests.verify.forge import FILES, Forgery, bare, deep, split, stored
from tests.verify.independent import claimed_too_much

Rng = np.random.Generator

SECONDS, MEBIBYTES = 30.0, 1024.0
"""Limits per certificate: seconds of one core, and memory."""

# Values that a reader does not expect.
JUNK: list[Any] = [
    None, True, False, 0, -1, 1, 2, 3, 2**31, 2**47, 2**48, 2**63, 10**300, 0.5, -0.0, 1e308,
    "@@1e-400@@", "@@0.1000000000000000055511@@", "@@1e999@@", "@@NaN@@", "@@-Infinity@@",
    "@@1E400@@", "@@" + "9" * 5000 + "@@", "", "x", "a" * 10_000, "\ud800", "\0", "\n", "0.linear",
    "../weights.safetensors", [], {}, [[]], [0], [0, 0], [2**47, 2**47, 0], [1] * 100, [1] * 5000,
    list(range(1000)), {"kind": "identity"}, {"kind": []}, {"": {}}, deep(40), deep(200),
    "@@" + "[" * 900 + "]" * 900 + "@@", "@@" + "[" * 100_000 + "@@",
    "@@{" + ",".join(f'"{i}":{i}' for i in range(20_000)) + "}@@", [{"kind": "abs"}] * 300,
]  # fmt: skip


def choice(rng: Rng, values: Any) -> Any:
    return values[rng.integers(len(values))]


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


def copied(value: Any) -> Any:
    return json.loads(json.dumps(value))


def layer(rng: Rng, forgery: Forgery) -> dict[str, Any]:
    """Draw a layer of random kind and options, with a new or an existing array."""

    def few() -> int:
        return int(rng.integers(1, 5))

    def array(*shape: int) -> str:
        if rng.random() < 0.3:
            return choice(rng, list(forgery.weights))
        name = f"new{len(forgery.weights)}"
        forgery.weights[name] = stored(rng.normal(size=shape).astype(np.float32))
        return name

    n = choice(rng, [2, 3, 4, 6, 8, 12])
    plain = choice(rng, ["identity", "abs", "relu", "mean_subtract"])
    makers: list[Callable[[], dict[str, Any]]] = [
        *[lambda: {"kind": plain}] * 5,
        lambda: {"kind": "flatten", "axes": few()},
        lambda: {"kind": "group_sort", "size": few()},
        lambda: {"kind": "scale", "factor": choice(rng, [-1, 0, 0.5, 0.999, 1.001, 2, 1e9])},
        lambda: {"kind": "space_to_depth", "side": few()},
        lambda: {"kind": "average_pool", "rows": few(), "columns": few()},
        lambda: {"kind": "shift", "pixels": int(rng.integers(-3, 4))},
        lambda: {"kind": "bias", "weight": array(n)},
        lambda: {"kind": "linear", "weight": array(n, n)},
        lambda: {"kind": "two_tap", "weight": array(n, few()), "axis": -2, "offset": few()},
        lambda: {"kind": "locally_connected", "weight": array(2, n, n), "axes": 1},
    ]
    return choice(rng, makers)()


# Families of changes: functions that edit a forgery and write it.


def tree(rng: Rng, base: Forgery, folder: Path) -> None:
    """Replace, remove, duplicate or exchange values of the certificate."""
    for _ in range(rng.integers(1, 4)):
        node, key = choice(rng, places(base.told))
        what = rng.integers(5)
        if what <= 1:
            node[key] = copied(choice(rng, JUNK))
        elif what == 2:
            del node[key]
        elif what == 3 and isinstance(node, list):
            node.insert(key, copied(node[key]))
        else:
            other, place = choice(rng, places(base.told))
            node[key] = copied(other[place])
    base.write(folder, digests=bool(rng.integers(2)))


def claims(rng: Rng, base: Forgery, folder: Path) -> None:
    """Strengthen claims, slightly or greatly; weaken some."""
    told = base.told["claims"]
    radii = told["radii"]
    for _ in range(rng.integers(1, 4)):
        i, j = rng.integers(len(radii), size=2)
        what = rng.integers(7)
        if what == 0:
            radii[i] *= float(1 + 10.0 ** -rng.integers(1, 7))
        elif what == 1:
            radii[:] = [r * float(1 + 10.0 ** -rng.uniform(1, 6)) for r in radii]
        elif what == 2:
            radii[i] = float(10.0 ** rng.uniform(-320, 5))
        elif what == 3:
            told["predictions"][i] = int(rng.integers(4))
        elif what == 4:
            told["correct"] += int(rng.integers(-1, 3))
        elif what == 5 and told["certified"]:
            entry = choice(rng, told["certified"])
            entry["images"] += int(rng.integers(-1, 3))
            entry["radius"] *= float(rng.choice([1, 0, 0.9, 1 + 1e-9, 1.1]))
        else:
            radii[i], radii[j] = radii[j], radii[i]
    if rng.random() < 0.2:
        radii[0] = "@@1e-400@@"
    base.write(folder)


def numbers(rng: Rng, base: Forgery, folder: Path) -> None:
    """Change numbers in arrays."""
    for _ in range(rng.integers(1, 3)):
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

        with np.errstate(all="ignore"):
            ways = [put, permuted, scaled, np.transpose, np.flipud]
            base.change(choice(rng, list(base.weights)), choice(rng, ways))
    base.write(folder)


def pixels(rng: Rng, base: Forgery, folder: Path) -> None:
    """Scale images, shift, scale and range together, or only some of them."""
    factor, source = float(rng.choice([1e-6, 0.1, 0.9, 1.1, 50, 255, 1e6])), base.told["input"]
    told = base.told["claims"]
    if rng.random() < 0.7:
        base.change("images", lambda x: x * factor, "images")
    for key in ("shift", "scale", "pixels"):
        if rng.random() < 0.7:
            source[key] = (np.asarray(source[key]) * factor).tolist()
    if rng.random() < 0.7:
        told["radii"] = [r * factor * 0.999 for r in told["radii"]]
    if rng.random() < 0.5:
        told["certified"], told["correct"] = [], 0
    if rng.random() < 0.2:
        base.change("labels", rng.permutation, "images")
    base.write(folder)


def network(rng: Rng, base: Forgery, folder: Path) -> None:
    """Insert, remove, exchange, duplicate, share or wrap layers."""
    for _ in range(rng.integers(1, 4)):
        entries = choice(rng, lists(base.told["network"]))
        if not entries or (what := rng.integers(9)) <= 2:
            entries.insert(int(rng.integers(len(entries) + 1)), layer(rng, base))
            continue
        i, j = rng.integers(len(entries), size=2)
        if what == 3:
            entries.pop(i)
        elif what == 4:
            entries.insert(j, copied(entries[i]))
        elif what == 5:
            entries[i], entries[j] = entries[j], entries[i]
        elif what == 6:
            branches = [[] for _ in range(rng.integers(0, 3))]
            entries[i:] = [{"kind": "sum", "branches": [entries[i:], *branches]}]
        elif what == 7:
            copies = choice(rng, [0, 1, 2, 3, 10**9])
            entries[i:] = [{"kind": "stack", "copies": copies, "layers": entries[i:]}]
        else:
            entries[i].update(layer(rng, base))
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
    base.write(folder)


def headers(rng: Rng, base: Forgery, folder: Path) -> None:
    """Change the safetensors header of the weights or the images."""
    base.write(folder)
    part = choice(rng, ["weights", "images"])
    header, body = split((folder / f"{part}.safetensors").read_bytes())
    for _ in range(rng.integers(1, 3)):
        node, key = choice(rng, places(header))
        node[key] = copied(choice(rng, JUNK))
    text = bare(json.dumps(header)).encode()
    length = len(text) if rng.random() < 0.9 else int(rng.integers(2**62))
    base.replace(folder, part, length.to_bytes(8, "little") + text + body)


def flips(rng: Rng, base: Forgery, folder: Path) -> None:
    """Change, insert, remove or cut off bytes; mostly repair the files' digests."""
    base.write(folder)
    name = choice(rng, FILES)
    data = bytearray((folder / name).read_bytes())
    for _ in range(rng.integers(1, 6)):
        place, what = int(rng.integers(len(data))), rng.integers(10)
        if what < 6:
            data[place] = choice(rng, b'0123456789.-eE"{}[],: \\\0\xff\x7f')
        elif what < 8:
            data.insert(place, int(rng.integers(256)))
        elif what == 8:
            del data[place]
        else:
            del data[max(place, 9) :]
    (folder / name).write_bytes(data)
    if name != FILES[0] and rng.random() < 0.8:
        base.replace(folder, name.partition(".")[0], data)


FAMILIES: dict[str, Callable[[Rng, Forgery, Path], None]] = {
    f.__name__: f for f in (tree, claims, numbers, pixels, network, headers, flips)
}


class Outcome(NamedTuple):
    """Result of verifying a change: CPU seconds, memory, and a line that says what is wrong.

    The number of the change and the seed reproduce it.
    """

    family: str
    number: int
    accepted: bool
    seconds: float
    mebibytes: float
    fault: str


def networks() -> dict[str, tuple[Module, tuple[int, ...]]]:
    """Return small networks that cover the kinds of layers, and the shapes of their images."""
    block = GroupSort(2) @ Bias(8) @ Linear(8, 8, Orthogonal())
    perceptron = (
        Bias(3) @ Linear(3, 8, Stiefel()) @ modules.residual(block, 2)
        @ GroupSort(4) @ Bias(8) @ Linear(8, 12, Stiefel())
    )  # fmt: skip
    blocks = modules.residual(GroupSort(2) @ Linear(12, 12, Orthogonal()), 2)
    local = contrib.LocallyConnected((2, 2), 12, 12, Orthogonal())
    first = contrib.Shift() @ local @ contrib.orthogonal_conv2d(12, 2) @ Bias(12)
    pool = modules.Flatten(3) @ (2**0.5 * modules.AveragePool(2, 1))
    head = Bias(4) @ Linear(4, 24, Stiefel()) @ modules.GroupSort(3)
    image = head @ pool @ blocks @ first @ contrib.SpaceToDepth(2)
    return {"perceptron": (perceptron, (12,)), "image": (image, (4, 4, 3))}


def write_bases(folder: Path) -> list[Path]:
    """Write valid certificates with maximal radii, in exact arithmetic and in float32."""
    found = []
    for number, (name, (net, shape)) in enumerate(networks().items()):
        rng = np.random.default_rng(number)
        params = jax.tree.map(
            lambda w, rng=rng: w + np.float32(0.05 * rng.normal(size=w.shape)),
            net.init(jax.random.key(number)),
        )
        images = rng.uniform(size=(20, *shape)).astype(np.float32)
        labels = rng.integers(3, size=20)
        certified = certify(net, params, images, labels, shift=0.25, scale=0.5, tolerance=np.inf)
        for arithmetic in ("real", "float32"):
            options: Any = {"arithmetic": arithmetic, "at": [0.01, 0.05], "pixels": (0.0, 1.0)}
            found.append(export(folder / f"{name}-{arithmetic}", certified, **options).parent)
    return found


def outcomes(
    bases: Sequence[Path], numbers: Sequence[int], seed: int, families: Sequence[str]
) -> Iterator[Outcome]:
    """Change the certificates in these folders and verify them; take the families in turn."""
    whole = [Forgery(base) for base in bases]
    worker = subprocess.Popen(
        [sys.executable, "-m", "tests.verify.limited"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
    )
    assert worker.stdin
    assert worker.stdout
    with worker:
        for number in numbers:
            rng, family = np.random.default_rng([seed, number]), families[number % len(families)]
            with TemporaryDirectory() as begun:
                folder = Path(begun, "it")
                FAMILIES[family](rng, copy.deepcopy(choice(rng, whole)), folder)
                print(folder, file=worker.stdin, flush=True)
                status, seconds, memory = json.loads(worker.stdout.readline())
                text = Path(f"{folder}.err").read_text(errors="replace")
                wrong = fault(folder, status, seconds, memory, text)
            yield Outcome(family, number, status == 0, seconds, memory, wrong)
        worker.stdin.close()


def fault(folder: Path, status: int, seconds: float, memory: float, text: str) -> str:
    """Return what is wrong with the end of a verification; an empty string if nothing is."""
    if status not in (0, 1) or (status == 1) != (text.startswith("refused: ")):
        return f"status {status}: {text.strip()[-200:]}"
    if text.count("\n") > 1 or len(text) > 1000 or "too little memory" in text:
        return f"not one line, or no reason: {text[:200]}"
    if seconds > SECONDS or memory > MEBIBYTES:
        return f"took {seconds:.3g} s and {memory:.4g} MiB"
    try:
        wrong = claimed_too_much(folder) if status == 0 else ""
    except Exception as error:  # report a crash of the independent derivation, and continue
        wrong = f"the other derivation ends in {error!r}"
    return f"accepted: {wrong}" if wrong else ""


def main() -> int:
    """Print what was accepted and the most that one took; return 1 if anything was wrong."""
    p = argparse.ArgumentParser(prog="python -m tests.verify.fuzz", description=__doc__)
    p.add_argument("--count", type=int, default=3000, help="changes (default: %(default)s)")
    p.add_argument("--first", type=int, default=0, help="number of the first change")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    given = p.parse_args()
    with TemporaryDirectory() as folder:
        numbers = range(given.first, given.first + given.count)
        drawn = outcomes(write_bases(Path(folder)), numbers, given.seed, given.families)
        found = list(tqdm(drawn, total=given.count))
    for family, group in itertools.groupby(sorted(found), lambda one: one.family):
        rows = list(group)
        print(
            f"{family:8} {len(rows)} changed, {sum(one.accepted for one in rows)} accepted,"
            f" at most {max(one.seconds for one in rows):.1f} s,"
            f" {max(one.mebibytes for one in rows):.0f} MiB"
        )
    faults = [one for one in found if one.fault]
    print(*faults, f"{len(faults)} faults", sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
