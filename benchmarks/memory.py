"""Bytes of optimizer state per parameter, counted from the states.

    python -m benchmarks memory    # seconds; docs/benchmarks/results/memory.*

The parameters are the matrices q, k, v, o, up and down of twelve layers of width 768 (GPT-2 of 124
million), stacked. States are evaluated as shapes only. XLA packs two `int4` into a byte.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks._command import command, save_with_table
from benchmarks.steps import RATE, shapes_of
from manifoldmuon.contrib import normuon, quantized
from manifoldmuon.manifolds import Euclidean, Stiefel
from manifoldmuon.norms import RMSToRMS
from manifoldmuon.optim import manifold_muon, muon, riemannian_adam, with_master_copies
from studies.display import markdown_table
from studies.program import parse

LAYERS, WIDTH = 12, 768
FLAT, CURVED = Euclidean(RMSToRMS()), Stiefel()


def _matrices(params: Any) -> Any:
    return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(-2, -1), params)


# Optimizer and dtype of the parameters, by name.
OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "optax.adamw": (optax.adamw(RATE), jnp.float32),
    "optax.contrib.muon": (
        optax.contrib.muon(RATE, muon_weight_dimension_numbers=_matrices),
        jnp.float32,
    ),
    "muon": (muon(RATE, FLAT), jnp.float32),
    "muon(accumulator_dtype=bfloat16)": (
        muon(RATE, FLAT, accumulator_dtype="bfloat16"),
        jnp.float32,
    ),
    "quantized(muon, 8)": (quantized(muon(RATE, FLAT), 8), jnp.float32),
    "quantized(muon, 4)": (quantized(muon(RATE, FLAT), 4), jnp.float32),
    "normuon": (normuon(RATE, FLAT), jnp.float32),
    "manifold_muon": (manifold_muon(RATE, CURVED), jnp.float32),
    "quantized(manifold_muon, 8)": (quantized(manifold_muon(RATE, CURVED), 8), jnp.float32),
    "quantized(manifold_muon, 4)": (quantized(manifold_muon(RATE, CURVED), 4), jnp.float32),
    "riemannian_adam": (riemannian_adam(RATE, CURVED), jnp.float32),
    "with_master_copies(manifold_muon)": (
        with_master_copies(manifold_muon(RATE, CURVED)),
        jnp.bfloat16,
    ),
    "with_master_copies(quantized(manifold_muon, 8))": (
        with_master_copies(quantized(manifold_muon(RATE, CURVED), 8)),
        jnp.bfloat16,
    ),
}


def nbytes(tree: Any) -> float:
    """Return the bytes of all arrays, as XLA packs them."""
    return sum(x.size * _bits(x.dtype) / 8 for x in jax.tree.leaves(tree))


def _bits(dtype: Any) -> int:
    return (jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo)(dtype).bits


def measure(tx: optax.GradientTransformation, dtype: Any) -> dict[str, float]:
    """Return the bytes per parameter, of the parameters and of the state."""
    shapes = {
        name: jax.ShapeDtypeStruct((LAYERS, *shape), dtype)
        for name, shape in shapes_of(WIDTH).items()
    }
    count = sum(x.size for x in shapes.values())
    return {
        "parameters": nbytes(shapes) / count,
        "state": nbytes(jax.eval_shape(tx.init, shapes)) / count,
    }


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    p = command("memory", "Bytes of optimizer state for each parameter.")
    options = parse(p, argv, beside=(".md",))
    rows = {name: measure(*made) for name, made in OPTIMIZERS.items()}
    header = ["optimizer", "parameters, bytes", "state, bytes"]
    lines = [
        [f"`{name}`", f"{row['parameters']:.0f}", f"{row['state']:.2f}"]
        for name, row in rows.items()
    ]
    record = {"layers": LAYERS, "width": WIDTH, "bytes_per_parameter": rows}
    save_with_table(options, record, markdown_table(header, lines))


if __name__ == "__main__":
    main()
