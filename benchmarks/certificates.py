"""Fuzz test of certificates: change them at random and verify each in a process of limited memory.

    python -m benchmarks certificates       # docs/benchmarks/results/certificates.json

Accepted certificates are checked by an independent derivation (`benchmarks/_independent.py`).
"""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from benchmarks._command import command
from benchmarks._forgeries import FAMILIES, Forgery
from benchmarks._independent import claimed_too_much
from manifoldmuon import contrib, modules
from manifoldmuon.manifolds import Orthogonal, Stiefel
from manifoldmuon.modules import Bias, GroupSort, Linear, Module
from manifoldmuon.robustness import certify, export
from manifoldmuon_verify import verify
from studies.program import integer, parse, save

SECONDS, MEBIBYTES = 10.0, 1024.0
"""Limits per certificate: seconds of one core, and memory."""


class Outcome(NamedTuple):
    """Result of verifying a changed certificate.

    Attributes:
      family: kind of change.
      number: number of the change; together with the seed it reproduces the change.
      accepted: whether the verifier accepted the certificate.
      seconds: CPU time.
      mebibytes: memory.
      fault: single-line description of a failure; empty if nothing is wrong.
      text: the verifier's refusal, on a single line.
    """

    family: str
    number: int
    accepted: bool
    seconds: float
    mebibytes: float
    fault: str
    text: str


def networks() -> dict[str, tuple[Module, tuple[int, ...]]]:
    """Return small networks that cover the kinds of layers, and the shapes of their images."""
    block = GroupSort(2) @ Bias(8) @ Linear(8, 8, Orthogonal())
    perceptron = (
        Bias(3) @ Linear(3, 8, Stiefel()) @ modules.residual(block, 2)
        @ contrib.Householder(8) @ Bias(8) @ Linear(8, 12, Stiefel())
    )  # fmt: skip
    blocks = modules.residual(contrib.Householder(12) @ Linear(12, 12, Orthogonal()), 2)
    places = contrib.LocallyConnected((2, 2), 12, 12, Orthogonal())
    pixels = contrib.Shift() @ places @ contrib.orthogonal_conv2d(12, 2) @ Bias(12)
    tokens = contrib.SwapAxes() @ Linear(2, 2, Orthogonal()) @ contrib.SwapAxes()
    pool = modules.Flatten(3) @ (2**0.5 * modules.AveragePool(2, 1)) @ contrib.NormPool(1) @ tokens
    head = Bias(4) @ Linear(4, 24, Stiefel()) @ modules.GroupSort(3)
    image = head @ pool @ blocks @ pixels @ contrib.SpaceToDepth(2)
    return {"perceptron": (perceptron, (12,)), "image": (image, (4, 4, 3))}


def write_bases(folder: Path) -> dict[str, Path]:
    """Write valid certificates with maximal radii, in exact arithmetic and in float32."""
    found = {}
    for number, (name, (net, shape)) in enumerate(networks().items()):
        rng = np.random.default_rng(number)
        params = jax.tree.map(
            lambda w, rng=rng: w + jnp.asarray(0.05 * rng.normal(size=w.shape), jnp.float32),
            net.init(jax.random.key(number)),
        )
        images = rng.uniform(size=(20, *shape)).astype(np.float32)
        labels = rng.integers(3, size=20)
        anywhere: dict[str, Any] = {"shift": 0.25, "scale": 0.5, "tolerance": np.inf}
        certified = certify(net, params, images, labels, **anywhere)
        for arithmetic in ("real", "float32"):
            place = folder / f"{name}-{arithmetic}"
            none = dataclasses.replace(certified, radii=np.zeros(20))
            loose = export(f"{place}-loose", none, arithmetic=arithmetic)
            tight = dataclasses.replace(certified, radii=verify(loose.parent).radii)
            margin = 1e-7 if arithmetic == "real" else 1e-4
            options: dict[str, Any] = {"arithmetic": arithmetic, "margin": margin}
            options |= {"at": [0.01, 0.05], "pixels": (0.0, 1.0)}
            found[place.name] = export(place, tight, **options).parent
    return found


def outcomes(
    bases: Sequence[Path], numbers: Sequence[int], seed: int, families: Sequence[str]
) -> Iterator[Outcome]:
    """Change certificates and verify them.

    Args:
      bases: folders of valid certificates.
      numbers: numbers of the changes.
      seed: seed shared by all changes.
      families: kinds of changes, used in turn.
    """
    whole = [Forgery(base) for base in bases]
    worker = subprocess.Popen(
        [sys.executable, "-m", "benchmarks._limited"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[1],
    )
    assert worker.stdin
    assert worker.stdout
    with worker:
        for number in numbers:
            rng, family = np.random.default_rng([seed, number]), families[number % len(families)]
            with TemporaryDirectory() as begun:
                folder = Path(begun, "it")
                FAMILIES[family](rng, whole[rng.integers(len(whole))].copy(), folder)
                print(folder, file=worker.stdin, flush=True)
                status, seconds, _, memory = json.loads(worker.stdout.readline())
                text = Path(f"{folder}.err").read_text(errors="replace")
                fault = _fault(folder, status, seconds, memory, text)
            yield Outcome(family, number, status == 0, seconds, memory, fault, text.strip()[:200])
        worker.stdin.close()


def _fault(folder: Path, status: int, seconds: float, memory: float, text: str) -> str:
    if status not in (0, 1) or (status == 1) != (text.startswith("refused: ")):
        return f"status {status}: {text.strip()[-200:]}"
    if text.count("\n") > 1 or len(text) > 1000 or "too little memory" in text:
        return f"not one line, or no reason: {text[:200]}"
    if seconds > SECONDS or memory > MEBIBYTES:
        return f"took {seconds:.3g} s and {memory:.4g} MiB"
    try:
        wrong = claimed_too_much(folder) if status == 0 else ""
    except Exception as error:  # report a crash of the independent derivation, and continue
        wrong = f"the other route ends in {error!r}"
    return f"accepted: {wrong}" if wrong else ""


def main() -> int:
    """Run the benchmark and write the record; return 1 if anything was wrong."""
    p = command("certificates", "Changes certificates at random and verifies each.")
    p.add_argument("--count", type=integer(1), default=4000, help="how many (default: %(default)s)")
    p.add_argument("--first", type=integer(0), default=0, help="number of the first")
    p.add_argument("--seed", type=integer(0), default=0)
    p.add_argument("--family", choices=FAMILIES, help="changes of this family alone")
    p.add_argument("--workers", type=integer(1), default=2, metavar="N",
                   help="certificates verified at a time (default: %(default)s)")  # fmt: skip
    given = parse(p, None)
    families = [given.family] if given.family else list(FAMILIES)
    table: dict[str, dict[str, Any]] = {
        name: {"changed": 0, "accepted": 0, "most_seconds": 0.0, "most_mebibytes": 0.0}
        for name in families
    }
    faults = []
    with (
        TemporaryDirectory() as folder,
        ThreadPoolExecutor(given.workers) as pool,
        tqdm(total=given.count) as bar,
    ):
        bases = list(write_bases(Path(folder)).values())
        numbers = range(given.first, given.first + given.count)

        def share(worker: int) -> list[Outcome]:
            found = []
            mine = numbers[worker :: given.workers]
            for one in outcomes(bases, mine, given.seed, families):
                found.append(one)
                bar.update()
                if one.fault:
                    tqdm.write(str(one))
            return found

        for one in itertools.chain.from_iterable(pool.map(share, range(given.workers))):
            row = table[one.family]
            row["changed"] += 1
            row["accepted"] += one.accepted
            row["most_seconds"] = max(row["most_seconds"], round(one.seconds, 2))
            row["most_mebibytes"] = max(row["most_mebibytes"], round(one.mebibytes))
            if one.fault:
                faults.append({"family": one.family, "number": one.number, "what": one.fault})
    record = {
        "what": "certificates changed at random: those accepted, and the most that one took",
        "limits": {"seconds": SECONDS, "mebibytes": MEBIBYTES},
        "seed": given.seed,
        "count": given.count,
        "families": table,
        "faults": faults,
    }
    for name, row in table.items():
        print(f"{name:10}", *(f"{key} {value}" for key, value in row.items()))
    save(given, record)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
