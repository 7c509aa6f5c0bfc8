"""How evenly the matrices of real models divide over devices, counted from their shapes.

    python -m benchmarks balance    # seconds; docs/benchmarks/results/balance.*

Each device solves the same number of matrices of every kind, so that the number of a kind is filled
up to a multiple of the devices. Beside that stands what would remain if the matrices that are left
over of all kinds went one by one, the longest first, to the device with the least work.
"""

import heapq
import math

from benchmarks._command import command, save_with_table
from studies.display import markdown_table
from studies.program import parse

# Number, rows and columns of each kind. Embeddings, gains and biases have no polar factors.
MODELS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "GPT-2, 124 M": ((12, 2304, 768), (12, 768, 768), (12, 3072, 768), (12, 768, 3072)),
    "Llama, 8 B": ((64, 4096, 4096), (64, 1024, 4096), (64, 14336, 4096), (32, 4096, 14336)),
    "Qwen3, 30 B-A3B": (
        (48, 4096, 2048), (96, 512, 2048), (48, 2048, 4096), (48, 128, 2048),
        (48 * 256, 768, 2048), (48 * 128, 2048, 768),
    ),
}  # fmt: skip
DEVICES = (8, 16, 32, 64, 256)


def cost(m: int, n: int) -> float:
    """Multiplications of `muon`: a Gram matrix, four quintic steps of its size, a product."""
    m, n = max(m, n), min(m, n)
    return 2.0 * m * n**2 + 12.0 * n**3


def padded(kinds: tuple[tuple[int, int, int], ...], devices: int) -> float:
    """The work of every device over the mean of what is needed."""
    busy = sum(math.ceil(count / devices) * cost(m, n) for count, m, n in kinds)
    return busy / mean(kinds, devices)


def longest_first(kinds: tuple[tuple[int, int, int], ...], devices: int) -> float:
    """The work of the slowest device over the mean, with what is left over placed one by one."""
    whole = sum(count // devices * cost(m, n) for count, m, n in kinds)
    left = sorted((cost(m, n) for count, m, n in kinds for _ in range(count % devices)))
    loads = [whole] * devices
    for work in reversed(left):
        heapq.heapreplace(loads, loads[0] + work)
    return max(loads) / mean(kinds, devices)


def mean(kinds: tuple[tuple[int, int, int], ...], devices: int) -> float:
    """The work of a device if it could be divided at will."""
    return sum(count * cost(m, n) for count, m, n in kinds) / devices


def table(rows: list[dict]) -> str:
    """A line for each model, a pair of figures for each number of devices."""
    lines = []
    for model in MODELS:
        found = [row for row in rows if row["model"] == model]
        lines.append([model, *(f"{r['padded']:.2f}, {r['longest_first']:.2f}" for r in found)])
    return markdown_table(["model", *(f"{n} devices" for n in DEVICES)], lines)


def main(argv: list[str] | None = None) -> None:
    """Runs the benchmark."""
    options = parse(command("balance", "How evenly matrices divide over devices."), argv,
                    beside=(".md",))  # fmt: skip
    rows = [
        {"model": model, "devices": n, "padded": padded(kinds, n),
         "longest_first": longest_first(kinds, n)}
        for model, kinds in MODELS.items() for n in DEVICES
    ]  # fmt: skip
    save_with_table(options, {"rows": rows}, table(rows))


if __name__ == "__main__":
    main()
