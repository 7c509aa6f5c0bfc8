"""Bytes of optimizer state per parameter.

    python -m benchmarks memory    # seconds; docs/benchmarks/results/memory.*

The parameters are the matrices q, k, v, o, up and down of twelve layers of width 768 (GPT-2 of 124
million), stacked. States are evaluated as shapes only. XLA packs two `int4` into a byte.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks._harness import command, save_with_table
from benchmarks.steps import MUON, RATE, optimizers, shapes_of
from manifoldmuon.contrib import normuon, quantized
from manifoldmuon.manifolds import Euclidean, Stiefel
from manifoldmuon.norms import RMSToRMS
from manifoldmuon.optim import manifold_muon, muon, riemannian_adam, with_master_copies
from studies.display import markdown_table
from studies.program import parse

LAYERS, WIDTH = 12, 768


def states() -> dict[str, optax.GradientTransformation]:
    """Return optimizers by name; parameters of `with_master_copies` are in bfloat16."""
    free, frames = Euclidean(RMSToRMS()).stacked(), Stiefel().stacked()
    flat, curved = muon(RATE, free), manifold_muon(RATE, frames)
    short = muon(RATE, free, accumulator_dtype="bfloat16")
    return {
        "optax.adamw": optax.adamw(RATE),
        MUON: optimizers()[MUON],
        "muon": flat,
        "muon(accumulator_dtype=bfloat16)": short,
        "quantized(muon, 8)": quantized(flat, 8),
        "quantized(muon, 4)": quantized(flat, 4),
        "normuon": normuon(RATE, free),
        "manifold_muon": curved,
        "quantized(manifold_muon, 8)": quantized(curved, 8),
        "quantized(manifold_muon, 4)": quantized(curved, 4),
        "riemannian_adam": riemannian_adam(RATE, frames),
        "with_master_copies(manifold_muon)": with_master_copies(curved),
        "with_master_copies(quantized(manifold_muon, 8))": with_master_copies(quantized(curved, 8)),
    }


def nbytes(tree: Any) -> float:
    """Return the bytes of all arrays, as XLA packs them."""

    def bits(dtype: Any) -> int:
        return (jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo)(dtype).bits

    return sum(x.size * bits(x.dtype) / 8 for x in jax.tree.leaves(tree))


def measure(name: str, tx: optax.GradientTransformation) -> dict[str, float]:
    """Return the bytes per parameter, of the parameters and of the state."""
    dtype = jnp.bfloat16 if name.startswith("with_master_copies") else jnp.float32
    shapes = {k: jax.ShapeDtypeStruct((LAYERS, *x), dtype) for k, x in shapes_of(WIDTH).items()}
    count = sum(x.size for x in shapes.values())
    state = nbytes(jax.eval_shape(tx.init, shapes)) / count
    return {"parameters": nbytes(shapes) / count, "state": state}


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    options = parse(command("memory", __doc__), argv, beside=(".md",))
    rows = {name: measure(name, tx) for name, tx in states().items()}
    header = ["optimizer", "parameters, bytes", "state, bytes"]
    lines = [[f"`{k}`", f"{x['parameters']:.0f}", f"{x['state']:.2f}"] for k, x in rows.items()]
    record = {"layers": LAYERS, "width": WIDTH, "bytes_per_parameter": rows}
    save_with_table(options, record, markdown_table(header, lines))


if __name__ == "__main__":
    main()
