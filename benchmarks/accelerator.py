"""Time and compile time of GPTs' steps, rate of msign and accuracy of directions on a GPU or TPU.

    python -m benchmarks accelerator    # minutes; docs/benchmarks/results/accelerator.*

A GPT has twelve layers, stacked, of the width given, and GPT-2's embeddings of 50,257 tokens and
1,024 positions (width 768: 124M parameters), all in float32 or all in bfloat16; embeddings take
AdamW with every optimizer. The rate of msign is compared with the measured rate of a plain product
of the same shape and precision, timed in the same rounds; floating-point operations count matrix
products only, from the function as traced for an accelerator. The errors of directions are computed
in float64 on the host. Without an accelerator the command skips the benchmark and prints a message.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from tqdm import tqdm

from benchmarks._harness import command, save_with_table, timed
from benchmarks.first_step import transformation
from benchmarks.solvers import accuracy
from benchmarks.steps import MUON, measure, tree
from manifoldmuon.linalg import DEFAULT_MSIGN, TRAINING_MSIGN, msign
from studies.display import markdown_table
from studies.program import parse
from tests.oracles.passes import multiplications
from tests.oracles.stiefel_problems import STIEFEL_FAMILIES, stiefel_problem

METHODS = {"four steps": TRAINING_MSIGN, "converged": DEFAULT_MSIGN}
PRESETS = ("ProjectedPolar()", "ClosedForm()")
NAMES = (
    MUON,
    "optim.optax_muon",
    "optim.optax_muon, TRAINING_MSIGN",
    "muon",
    "muonh",
    *(f"manifold_muon, {name}" for name in PRESETS),
)
ADAM = "optax.adamw"
DTYPES = (jnp.float32, jnp.bfloat16)
EMBEDDINGS = 50_257 + 1024
ERRORS = ("gap", "reported gap", "residual")


def measure_gpt(width: int, dtype: Any, rounds: int) -> dict[str, Any]:
    """Measure the steps of a GPT of this width and precision, by optimizer."""

    def draw(seed: int) -> dict[str, Any]:
        embedding = 0.02 * jax.random.normal(jax.random.key(seed), (EMBEDDINGS, width))
        drawn = {"layers": tree(12, width, stacked=True, seed=seed), "embedding": embedding}
        return jax.tree.map(lambda x: x.astype(dtype), drawn)

    def on_layers(tx: optax.GradientTransformation) -> optax.GradientTransformation:
        labels = {"layers": "layers", "embedding": "embedding"}
        return optax.partition({"layers": tx, "embedding": transformation(ADAM)}, labels)

    candidates = {name: on_layers(transformation(name)) for name in (*NAMES, ADAM)}
    row = {"width": width, "dtype": jnp.dtype(dtype).name}
    return row | measure(draw(0), draw(1), candidates, rounds)


def sign_rates(shape: tuple[int, ...], rounds: int) -> list[dict]:
    """Return a row per msign method and dtype: flops per second, of msign and of a product."""
    rows = []
    for dtype in DTYPES:
        stack = jax.random.normal(jax.random.key(0), shape, dtype)
        for name, method in METHODS.items():
            functions = {
                "sign": functools.partial(msign, method=method),
                "product": functools.partial(_gram, precision=method.precision),
            }
            # Products of float32 in several passes count once.
            flops = {k: 2 * multiplications(f, stack, passes=1) for k, f in functions.items()}
            calls = {k: functools.partial(jax.jit(f), stack) for k, f in functions.items()}
            times = timed(calls, rounds)
            rate = {k: flops[k] / times["seconds"][k] for k in calls}
            row = {"method": name, "dtype": jnp.dtype(dtype).name, "shape": list(shape)}
            rows.append(row | times | {"flops_per_second": rate})
    return rows


def _gram(stack: jax.Array, precision: jax.lax.Precision) -> jax.Array:
    return jnp.matmul(stack, stack.mT, precision=precision)


def table(record: dict) -> str:
    """Return the record as Markdown."""
    others = (*NAMES[1:], ADAM)
    signs = [
        [row["method"], row["dtype"], f"{row['seconds']['sign'] * 1e3:.2f}",
         f"{row['flops_per_second']['sign'] / 1e12:.3g}",
         f"{row['flops_per_second']['sign'] / row['flops_per_second']['product']:.0%}"]
        for row in record["signs"]
    ]  # fmt: skip
    steps = []
    for title, key in (("a step", "seconds"), ("trace, compile and run", "compile_seconds")):
        lines = [
            [f"{row['width']}, {row['dtype']}", f"{row[key][MUON] * 1e3:.3g}",
             *(f"{row[key][name] / row[key][MUON]:.2f}" for name in others)]
            for row in record["steps"]
        ]  # fmt: skip
        steps.append(markdown_table([f"{title} of the GPT", f"{MUON}, ms", *others], lines))
    errors = [
        [row["solver"], row["gradient"], *(f"{row[k]:.1e}" for k in ERRORS), f"{row['norm']:.5f}"]
        for row in record["accuracy"]
    ]
    return "\n\n".join(
        (
            markdown_table(["msign", "dtype", "ms", "Tflop/s", "of the product's rate"], signs),
            *steps,
            markdown_table(["solver", "gradient", *ERRORS, "norm"], errors),
        )
    )


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    p = command("accelerator", __doc__, rounds=9)
    p.add_argument("--stack", type=int, nargs=3, default=(24, 1024, 4096), metavar="N")
    p.add_argument("--gpts", type=int, nargs="+", default=(768, 256), metavar="WIDTH",
                   help="width of each GPT")  # fmt: skip
    p.add_argument("--cpu", action="store_true", help="run on a CPU, too, to try the command")
    options = parse(p, argv, beside=(".md",))
    if jax.default_backend() == "cpu" and not options.cpu:
        print("accelerator: skipped, JAX finds a CPU only; --cpu tries the command there")
        return
    errors: list[dict] = []
    for family in STIEFEL_FAMILIES:
        point, grad = (jnp.float32(x) for x in stiefel_problem(family, 512, 128))
        errors += accuracy(family, point, grad, PRESETS)
    record: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "rounds": options.rounds,
        "signs": sign_rates(tuple(options.stack), options.rounds),
        "steps": [],
        "accuracy": errors,
    }
    for width, dtype in tqdm(list(itertools.product(options.gpts, DTYPES)), unit="GPT"):
        record["steps"].append(measure_gpt(width, dtype, options.rounds))
        save_with_table(options, record, table(record))
        options.overwrite = True  # a machine that is lent can go: keep each row


if __name__ == "__main__":
    main()
