"""Error of every msign method, by shape, condition number, scale and dtype.

    python -m benchmarks msign_accuracy    # a minute or two; docs/benchmarks/results

Measures two errors of the answer in the input's dtype, both in float64:

* orthogonality, `||Q^T Q - I||_F` in units of `eps sqrt(n)`, with the eps of the dtype;
* forward error, `||Q - P||_F / ||P||_F` with P the polar factor of the rounded input by an SVD.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from benchmarks._harness import command, save_with_table
from benchmarks._polar_methods import QDWH, GramEigh, InverseRoot
from manifoldmuon import linalg
from studies.display import markdown_table
from studies.program import parse

METHODS: dict[str, linalg.MsignMethod] = {
    "default": linalg.DEFAULT_MSIGN,
    "default, direct form": linalg.NewtonSchulz(linalg.DEFAULT_MSIGN.schedule),
    "default, Gram form": linalg.GramNewtonSchulz(linalg.DEFAULT_MSIGN.schedule),
    "SVD": linalg.SVD(),
    "QDWH": QDWH(),
    "Gram eigenvalues": GramEigh(),
    "inverse root": InverseRoot(),
    "cubic, 42 steps": linalg.NewtonSchulz(linalg.CUBIC.with_steps(42)),
    "quintic, 30 steps": linalg.NewtonSchulz(linalg.QUINTIC.with_steps(30)),
    "Polar Express as published, 8 steps": linalg.NewtonSchulz(linalg.POLAR_EXPRESS),
    "Polar Express, bfloat16 products": linalg.NewtonSchulz(
        linalg.PolarExpress(1e-3, safety=1.01, cushion=0.05), operands=jnp.bfloat16
    ),
    "Muon, 5 steps": linalg.NewtonSchulz(linalg.MUON, frobenius=True),
    "Modula, 6 steps": linalg.NewtonSchulz(linalg.MODULA_SIX_STEP, frobenius=True),
}
DTYPES = ("float32", "bfloat16", "float16")
SHAPES = ((64, 64), (256, 64), (64, 256), (512, 128), (256, 256))
# Condition number and scale.
CASES = ((1.0, 1.0), (1e3, 1.0), (1e6, 1.0), (1e3, 1e-30), (1e3, 1e30))


def matrix(shape: tuple[int, int], condition: float) -> np.ndarray:
    """Draw a float64 matrix with geometrically spaced singular values from 1 to 1 / condition."""
    rng = np.random.default_rng(0)
    k = min(shape)
    left, right = (np.linalg.qr(rng.standard_normal((side, k)))[0] for side in shape)
    return left * np.geomspace(1, 1 / condition, k) @ right.T


def cases(dtype: str) -> list[tuple[float, float]]:
    """Return the condition numbers and scales that the dtype represents."""
    largest = float(jnp.finfo(dtype).max)
    return [case for case in CASES if max(case[1], 1 / case[1]) < largest]


@functools.cache
def problems(shape: tuple[int, int], dtype: str) -> tuple[jax.Array, np.ndarray]:
    """Return all matrices of a shape, rounded to the dtype, and their polar factors in float64."""
    stack = np.stack([scale * matrix(shape, condition) for condition, scale in cases(dtype)])
    x = jnp.asarray(stack, dtype)
    left, _, right = np.linalg.svd(wide(x), full_matrices=False)
    return x, left @ right


def wide(x: jax.Array) -> np.ndarray:
    """Convert to float64 in NumPy."""
    return np.asarray(x.astype(jnp.float32), np.float64)


def measure(name: str, shape: tuple[int, int], dtype: str) -> list[dict]:
    """Return a row per condition number and scale, from a single batched call."""
    x, polar = problems(shape, dtype)
    n, rows = min(shape), []
    found = wide(linalg.msign(x, METHODS[name]))
    for (condition, scale), q, p in zip(cases(dtype), found, polar, strict=True):
        gram = q.T @ q if shape[0] >= shape[1] else q @ q.T
        unit = float(jnp.finfo(dtype).eps) * np.sqrt(n)
        row = {"method": name, "shape": list(shape), "dtype": dtype}
        row |= {"condition": condition, "scale": scale}
        row |= {"orthogonality": float(np.linalg.norm(gram - np.eye(n)) / unit)}
        rows.append(row | {"forward": float(np.linalg.norm(q - p) / np.sqrt(n))})
    return rows


def markdown(rows: list[dict]) -> str:
    """Return a Markdown table per dtype."""
    parts = [
        "# Accuracy of msign",
        "Each cell: `||Q^T Q - I||_F` in units of eps sqrt(n), then the relative forward error.\n"
        "Matrices have geometrically spaced singular values; the columns are condition numbers.",
    ]
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        lines: dict[tuple, list[str]] = {}
        for row in (row for row in rows if row["dtype"] == dtype):
            m, n = row["shape"]
            line = lines.setdefault((row["method"], m, n), [row["method"], f"{m} x {n}"])
            line.append(f"{row['orthogonality']:.2g}, {row['forward']:.0e}")
        heads = [f"{c:.0e}" + ("" if s == 1 else f", scale {s:.0e}") for c, s in cases(dtype)]
        parts.append(f"## {dtype} (eps = {float(jnp.finfo(dtype).eps):.2g})")
        parts.append(markdown_table(["method", "shape", *heads], list(lines.values())))
    return "\n\n".join(parts)


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    p = command("msign_accuracy", __doc__)
    p.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    options = parse(p, argv, beside=(".md",))
    rows = [
        row
        for name in tqdm(options.methods, unit="method")
        for dtype in DTYPES
        for shape in SHAPES
        for row in measure(name, shape, dtype)
    ]
    save_with_table(options, {"rows": rows}, markdown(rows))


if __name__ == "__main__":
    main()
