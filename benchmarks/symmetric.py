"""Products `X X^T` that compute the lower blocks and mirror them, compiled for a TPU.

    pip install "manifoldmuon[tpu]"        # the compiler; no TPU is needed
    python -m benchmarks symmetric    # a minute; docs/benchmarks/results/symmetric.*

Nothing runs. The compiler estimates the cycles of its own product, but shows only the schedule of
a Pallas kernel; its bundles (one per cycle) are counted here. The count excludes stalls: a step
takes at least the time of its multiplications at the peak, and of its reads.
"""

import functools
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from benchmarks._command import command, save_with_table
from benchmarks.scale import CHIPS, compile_without_tpus
from studies.display import markdown_table
from studies.program import parse

SIZES = (1024, 2048, 4096, 8192)
BLOCKS = ((512, 512), (1024, 512))
CHIP, TOPOLOGY = CHIPS["v5e"], "v5e:2x2"


def gram(x: jax.Array, block: int, part: int, interpret: Any = False) -> jax.Array:
    """Return `X X^T` in float32.

    Args:
      x: `(n, k)`; `n` is a multiple of `block`, `k` of `part`.
      block: side of the result's blocks. Only blocks at and below the diagonal are computed; each
        is written to its position and, transposed, to the mirrored position, while the next block
        is computed.
      part: columns multiplied per step.
      interpret: see `pl.pallas_call`.
    """
    n, k = x.shape
    pairs = np.array([(i, j) for i in range(n // block) for j in range(i + 1)], np.int32)
    last, steps = len(pairs) - 1, k // part

    def kernel(rows, columns, left, right, out, total, lower, upper, sent):
        tile, step = pl.program_id(0), pl.program_id(1)

        def copies(tile):
            i, j = rows[tile], columns[tile]
            at = [pl.ds(index * block, block) for index in (i, j)]
            to = out.at[at[0], at[1]], out.at[at[1], at[0]]
            below = pltpu.make_async_copy(lower, to[0], sent.at[0])
            return i != j, below, pltpu.make_async_copy(upper, to[1], sent.at[1])

        def wait(tile):
            mirrored, below, above = copies(tile)
            below.wait()
            pl.when(mirrored)(above.wait)

        @pl.when(step == 0)
        def _():
            total[...] = jnp.zeros_like(total)

        across = (((1,), (1,)), ((), ()))
        total[...] += jax.lax.dot_general(
            left[...], right[...], across, preferred_element_type=jnp.float32
        )

        @pl.when(step == steps - 1)
        def _():
            pl.when(tile > 0)(lambda: wait(tile - 1))
            mirrored, below, above = copies(tile)
            lower[...] = total[...]
            below.start()

            @pl.when(mirrored)
            def _():
                upper[...] = total[...].T
                above.start()

            pl.when(tile == last)(lambda: wait(tile))

    side = functools.partial(pltpu.VMEM, (block, block), jnp.float32)
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(len(pairs), steps),
        in_specs=[
            pl.BlockSpec((block, part), lambda tile, step, rows, columns: (rows[tile], step)),
            pl.BlockSpec((block, part), lambda tile, step, rows, columns: (columns[tile], step)),
        ],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        scratch_shapes=[side(), side(), side(), pltpu.SemaphoreType.DMA((2,))],
    )
    call = pl.pallas_call(
        kernel,
        grid_spec=grid,
        out_shape=jax.ShapeDtypeStruct((n, n), jnp.float32),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=2**25),  # of 128 MiB
        interpret=interpret,
    )
    return call(jnp.asarray(pairs[:, 0]), jnp.asarray(pairs[:, 1]), x, x)


def plain(x: jax.Array) -> jax.Array:
    """Compute the product with the compiler's own kernel."""
    return jnp.matmul(x, x.T, preferred_element_type=jnp.float32)


def _compile(function: Any, size: int) -> str:
    from jax.experimental import topologies

    device = topologies.get_topology_desc(TOPOLOGY, "tpu").devices[0]
    place = jax.sharding.SingleDeviceSharding(device)
    x = jax.ShapeDtypeStruct((size, size), jnp.bfloat16, sharding=place)
    return jax.jit(function).lower(x).compile().as_text() or ""


def compile_gram(block: int, part: int) -> None:
    """Compile a kernel, so that the compiler writes the dumps requested by its flags."""
    _compile(lambda x: gram(x, block, part), 4 * block)


def own_cycles(size: int) -> int:
    """Return the compiler's cycle estimate for its own product."""
    return sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', _compile(plain, size))))


def bundles(block: int, part: int) -> tuple[int, int]:
    """Count the bundles of a step's product, and all other bundles of the kernel."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        code = f"from benchmarks import symmetric; symmetric.compile_gram({block}, {part})"
        # The compiler reads its flags once per process.
        subprocess.run([sys.executable, "-c", code], env=os.environ | {"LIBTPU_INIT_ARGS": flags},
                       check=True, stdout=subprocess.DEVNULL)  # fmt: skip
        (file,) = Path(folder).glob("*_lambda_*final_hlo-static-per-bundle-utilization.txt")
        used = [line.split() for line in file.read_text().splitlines()]
    rows = [line for line in used if len(line) == 10 and line[0].isdigit()]
    multiplying = [i for i, row in enumerate(rows) if row[0] != "0"]
    product = multiplying[-1] - multiplying[0] + 1
    return product, len(rows) - product


def least_cycles(size: int, block: int, part: int, product: int, others: int) -> float:
    """Return a lower bound for the kernel, from bundles, peak multiplication rate and reads."""
    tiles, steps = (size // block) * (size // block + 1) // 2, size // part
    multiplied = 2 * block**2 * part / (CHIP.peak / CHIP.clock)
    read = 2 * 2 * block * part / (CHIP.memory / CHIP.clock)
    written = 2 * 4 * block**2 / (CHIP.memory / CHIP.clock)
    step = max(product, multiplied, read)
    # Concurrent writes share the memory bandwidth with reads.
    return tiles * (max(steps * step, steps * read + written) + others)


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    p = command("symmetric", "Cycles of X X^T on a TPU, with mirrored blocks and without.")
    options = parse(p, argv, beside=(".md",))
    compile_without_tpus()
    scheduled = {blocks: bundles(*blocks) for blocks in BLOCKS}
    rows = []
    for size in SIZES:
        kernels = {
            f"{block} x {part}": least_cycles(size, block, part, *scheduled[block, part])
            for block, part in BLOCKS
        }
        rows.append({"size": size, "own": own_cycles(size), "kernels": kernels})
    lines = [
        [f"{row['size']}", f"{row['own']:,}",
         *(f"{cycles / row['own']:.2f}" for cycles in row["kernels"].values())]
        for row in rows
    ]  # fmt: skip
    header = ["n = k", "the compiler's product, cycles", *(f"kernel, {b} x {p}" for b, p in BLOCKS)]
    record = {
        "libtpu": importlib.metadata.version("libtpu"),
        "topology": TOPOLOGY,
        "bundles": {f"{b} x {p}": found for (b, p), found in scheduled.items()},
        "rows": rows,
    }
    save_with_table(options, record, markdown_table(header, lines))


if __name__ == "__main__":
    main()
