"""Work of the busiest device over the mean, for the matrices of real models.

    python -m benchmarks balance    # seconds; docs/benchmarks/results/balance.*

Runs programs for up to 256 devices that count the matrices on each device without computing any.
Reports the work of the busiest device over the mean, next to two baselines computed from the
shapes: padding every kind to a multiple of the devices, and assigning single matrices, the longest
first, to the device with the least work.
"""

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Collection

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh
from tqdm import tqdm

from benchmarks._harness import command, save_with_table
from manifoldmuon.manifolds import Euclidean
from manifoldmuon.norms import RMSToRMS
from manifoldmuon.optim import map_leaves
from studies.display import markdown_table
from studies.program import parse

Kinds = tuple[tuple[int, int, int], ...]

# Number, rows and columns of each kind. Embeddings, gains and biases have no polar factors.
MODELS: dict[str, Kinds] = {
    "GPT-2, 124 M": ((12, 2304, 768), (12, 768, 768), (12, 3072, 768), (12, 768, 3072)),
    "Llama, 8 B": ((64, 4096, 4096), (64, 1024, 4096), (64, 14336, 4096), (32, 4096, 14336)),
    "Qwen3, 30 B-A3B": (
        (48, 4096, 2048), (96, 512, 2048), (48, 2048, 4096), (48, 128, 2048),
        (48 * 256, 768, 2048), (48 * 128, 2048, 768),
    ),
}  # fmt: skip
DEVICES = (8, 16, 32, 64, 256)


def cost(m: int, n: int) -> float:
    """Count `muon`'s multiplications: a Gram matrix, four quintic steps of its size, a product."""
    m, n = max(m, n), min(m, n)
    return 2.0 * m * n**2 + 12.0 * n**3


def owned(mesh: Mesh, shapes: Collection[tuple[int, ...]]) -> Counter[tuple[int, int, int]]:
    """Count the matrices that each device is given, by `(device, rows, columns)`."""
    given: Counter[tuple[int, int, int]] = Counter()

    def count(manifold, point, update):
        number, m, n = point.shape

        def tell(device):
            given[int(device), m, n] += number

        jax.debug.callback(tell, jax.lax.axis_index(mesh.axis_names))
        return None, jnp.zeros(number)

    @jax.jit
    def program():
        stacks = {f"{i}": jnp.zeros(shape) for i, shape in enumerate(shapes)}
        return map_leaves(count, Euclidean(RMSToRMS()), stacks, stacks, divide=True)[1]

    with jax.set_mesh(mesh):
        jax.block_until_ready(program())
    jax.effects_barrier()
    assert given.total() >= sum(math.prod(shape[:-2]) for shape in shapes)
    return given


def measured(kinds: Kinds, devices: int) -> float:
    """Return the busiest device's work over the mean, as a program divides it."""
    mesh = jax.make_mesh((devices,), ("x",), (AxisType.Auto,))
    return busiest(owned(mesh, kinds)) / mean(kinds, devices)


def busiest(given: Counter[tuple[int, int, int]]) -> float:
    """Return the work of the busiest device, from the counts of `owned`."""
    work: defaultdict[int, float] = defaultdict(float)
    for (device, m, n), number in given.items():
        work[device] += number * cost(m, n)
    return max(work.values())


def filled_up(kinds: Kinds, devices: int) -> float:
    """Return every device's work over the mean, with every kind padded."""
    busy = sum(math.ceil(count / devices) * cost(m, n) for count, m, n in kinds)
    return busy / mean(kinds, devices)


def longest_first(kinds: Kinds, devices: int) -> float:
    """Return the busiest device's work over the mean, with matrices assigned singly."""
    loads = [0.0] * devices
    for work in sorted((cost(m, n) for count, m, n in kinds for _ in range(count)), reverse=True):
        heapq.heapreplace(loads, loads[0] + work)
    return max(loads) / mean(kinds, devices)


def mean(kinds: Kinds, devices: int) -> float:
    """Return the work per device under perfect balance."""
    return sum(count * cost(m, n) for count, m, n in kinds) / devices


FIGURES = {"measured": measured, "filled up": filled_up, "longest first": longest_first}


def table(rows: list[dict]) -> str:
    """Return a table with a row per model and three figures per number of devices."""
    lines = []
    for model in MODELS:
        found = [row for row in rows if row["model"] == model]
        lines.append([model, *(", ".join(f"{r[name]:.2f}" for name in FIGURES) for r in found)])
    return markdown_table(["model", *(f"{n} devices" for n in DEVICES)], lines)


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    options = parse(command("balance", __doc__), argv, beside=(".md",))
    cases = [(model, n) for model in MODELS for n in DEVICES]
    rows = [
        {"model": model, "devices": n} | {k: f(MODELS[model], n) for k, f in FIGURES.items()}
        for model, n in tqdm(cases, unit="case")
    ]
    save_with_table(options, {"rows": rows}, table(rows))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", max(DEVICES))
    jax.config.update("jax_platforms", "cpu")
    main()
