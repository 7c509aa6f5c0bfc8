"""Gram matrices and squares of symmetric matrices from half of their blocks, against one product.

    python -m benchmarks symmetric    # two minutes; docs/benchmarks/results/symmetric.*

Both results are symmetric: of k x k blocks only those on and above the diagonal need products, 3/4
of the work for k = 2 and 5/8 for k = 4. Times on this machine and the TPU compiler's cycles (if
libtpu is installed), relative to a single product.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

from benchmarks._harness import command, compile_without_tpus, save_with_table, timed
from benchmarks._programs import read
from studies.display import markdown_table
from studies.program import parse

# Stacks of tall matrices, for Gram matrices, and of square matrices, for their squares.
SHAPES = ((12, 1024, 256), (12, 256, 256), (4, 1024, 1024))
BLOCKS = (2, 4)
TOPOLOGY = "v5e:2x2"


def product(left: jax.Array, right: jax.Array) -> jax.Array:
    """Return a product in float32."""
    return jnp.matmul(left, right, precision=jax.lax.Precision.HIGHEST)


def from_blocks(blocks: int, left: jax.Array, right: jax.Array) -> jax.Array:
    """Return the symmetric product of two matrices from the upper triangle of its blocks."""
    rows, columns = jnp.split(left, blocks, -2), jnp.split(right, blocks, -1)
    upper = {(i, j): product(rows[i], columns[j]) for i in range(blocks) for j in range(i, blocks)}
    whole = [
        [upper[i, j] if i <= j else upper[j, i].mT for j in range(blocks)] for i in range(blocks)
    ]
    return jnp.concatenate([jnp.concatenate(row, -1) for row in whole], -2)


def arguments(x: Any, symmetric: bool) -> tuple[Any, Any]:
    """Return the factors of the square of a symmetric matrix, or of a Gram matrix."""
    return (x, x) if symmetric else (x.mT, x)


def functions(symmetric: bool) -> dict[str, Any]:
    """Return one product, and the products of blocks, as functions of a stack."""
    methods = {"1": product, **{str(k): functools.partial(from_blocks, k) for k in BLOCKS}}
    return {k: jax.jit(lambda x, f=f: f(*arguments(x, symmetric))) for k, f in methods.items()}


def cycles(function: Any, shape: tuple[int, ...], topology: Any) -> float:
    """Return the TPU compiler's estimate for one chip."""
    sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    return read(function.lower(x).compile().as_text()).cycles


def row(shape: tuple[int, ...], symmetric: bool, rounds: int, topology: Any) -> dict[str, Any]:
    """Return the ratios of a stack; raise if the blocks give another product."""
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    x = jnp.asarray(x + x.swapaxes(-1, -2) if symmetric else x)
    run = functions(symmetric)
    whole = run["1"](x)
    for function in run.values():
        np.testing.assert_allclose(function(x), whole, atol=1e-3 * float(jnp.max(whole)))
    calls = {
        k: functools.partial(lambda f, x: f(x).block_until_ready(), f, x) for k, f in run.items()
    }
    seconds = timed(calls, rounds)["seconds"]
    tpu = {} if topology is None else {k: cycles(f, shape, topology) for k, f in run.items()}
    over_one = {
        where: {k: cost / costs["1"] for k, cost in costs.items() if k != "1"}
        for where, costs in (("cpu", seconds), ("tpu", tpu))
    }
    return {"shape": list(shape), "square": symmetric, **over_one}


def main(argv: list[str] | None = None) -> None:
    """Measure the stacks of SHAPES; print and write the table."""
    options = parse(command("symmetric", __doc__, rounds=15), argv)
    try:
        compile_without_tpus()
        topology = topologies.get_topology_desc(TOPOLOGY, "tpu")
    except Exception:  # without libtpu the columns stay empty
        topology = None
    rows = [row(shape, False, options.rounds, topology) for shape in SHAPES]
    rows += [row(s, True, options.rounds, topology) for s in SHAPES if s[-1] == s[-2]]
    table = [
        [
            ("square of " if r["square"] else "Gram matrix of ")
            + f"{r['shape'][0]} of {r['shape'][1]} x {r['shape'][2]}",
            *[
                f"{r[where][str(k)]:.2f}" if r[where] else ""
                for where in ("cpu", "tpu")
                for k in BLOCKS
            ],
        ]
        for r in rows
    ]
    heads = [f"{where}, {k} x {k}" for where in ("CPU", "TPU cycles") for k in BLOCKS]
    text = markdown_table(["product", *heads], table)
    save_with_table(options, {"rows": rows}, text)


if __name__ == "__main__":
    main()
