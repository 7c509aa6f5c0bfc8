"""Accuracy of the msign methods: method x shape x condition number x dtype.

    python -m benchmarks.msign_accuracy    # a minute or two; docs/benchmarks/results

Measures two errors of the answer in the input's dtype, both in float64:

* orthogonality, `||Q^T Q - I||_F` in units of `eps sqrt(n)`, with the eps of the dtype;
* forward error, `||Q - P||_F / ||P||_F` with P the polar factor of the rounded input by an SVD.
"""

import argparse
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._command import command
from manifoldmuon.linalg import (
    CUBIC,
    DEFAULT_MSIGN,
    MODULA_SIX_STEP,
    MUON,
    POLAR_EXPRESS,
    QUINTIC,
    SVD,
    GramNewtonSchulz,
    MsignMethod,
    NewtonSchulz,
    PolarExpress,
    msign,
)
from studies.polar_methods import QDWH, GramEigh, InverseRoot
from studies.program import Parser, parse, save

METHODS: dict[str, MsignMethod] = {
    "default": DEFAULT_MSIGN,
    "default, direct form": NewtonSchulz(DEFAULT_MSIGN.schedule),
    "default, Gram form": GramNewtonSchulz(DEFAULT_MSIGN.schedule),
    "SVD": SVD(),
    "QDWH": QDWH(),
    "Gram eigenvalues": GramEigh(),
    "inverse root": InverseRoot(),
    "cubic, 42 steps": NewtonSchulz(CUBIC.with_steps(42)),
    "quintic, 30 steps": NewtonSchulz(QUINTIC.with_steps(30)),
    "Polar Express as published, 8 steps": NewtonSchulz(POLAR_EXPRESS),
    "Polar Express, bfloat16 products": NewtonSchulz(
        PolarExpress(1e-3, safety=1.01, cushion=0.05), operands=jnp.bfloat16
    ),
    "Muon, 5 steps": NewtonSchulz(MUON, frobenius=True),
    "Modula, 6 steps": NewtonSchulz(MODULA_SIX_STEP, frobenius=True),
}
DTYPES = ("float32", "bfloat16", "float16")
SHAPES = ("64x64", "256x64", "64x256", "512x128", "256x256")
CONDITIONS = (1.0, 1e3, 1e6)
SCALES = (1.0, 1e-30, 1e30)


def matrix(shape: tuple[int, int], condition: float) -> np.ndarray:
    """Draw a float64 matrix with geometrically spaced singular values from 1 to 1 / condition."""
    rng = np.random.default_rng(0)
    k = min(shape)
    left, right = (np.linalg.qr(rng.standard_normal((side, k)))[0] for side in shape)
    return left * np.geomspace(1, 1 / condition, k) @ right.T


def cases(conditions: tuple[float, ...], dtype: str) -> list[tuple[float, float]]:
    """Return (condition, scale): all conditions at scale 1, the middle condition at all scales."""
    largest = float(jnp.finfo(dtype).max)
    scales = [scale for scale in SCALES if 1 / scale < largest and scale < largest]
    middle = sorted(conditions)[len(conditions) // 2]
    plain = [(condition, 1.0) for condition in conditions]
    return plain + [(middle, scale) for scale in scales if scale != 1.0]


@functools.cache
def problems(
    shape: tuple[int, int], dtype: str, conditions: tuple[float, ...]
) -> tuple[jax.Array, np.ndarray]:
    """Return all matrices of a shape, rounded to the dtype, and their polar factors in float64."""
    stack = np.stack([scale * matrix(shape, c) for c, scale in cases(conditions, dtype)])
    x = jnp.asarray(stack, dtype)
    left, _, right = np.linalg.svd(wide(x), full_matrices=False)
    return x, left @ right


def wide(x: jax.Array) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32), np.float64)


def measure(name: str, shape: tuple[int, int], dtype: str, conditions) -> list[dict]:
    """Return a row per condition number and scale, from a single batched call."""
    x, polar = problems(shape, dtype, conditions)
    found = wide(msign(x, METHODS[name]))
    rows = []
    for (condition, scale), q, p in zip(cases(conditions, dtype), found, polar, strict=True):
        orthogonality, forward = errors(q, p, dtype)
        rows.append(
            {
                "method": name,
                "shape": list(shape),
                "dtype": dtype,
                "condition": condition,
                "scale": scale,
                "orthogonality": orthogonality,
                "forward": forward,
            }
        )
    return rows


def errors(q: np.ndarray, polar: np.ndarray, dtype: str) -> tuple[float, float]:
    """Return the orthogonality error in units of eps sqrt(n), and the relative forward error."""
    tall = q if q.shape[0] >= q.shape[1] else q.T
    n = tall.shape[1]
    unit = float(jnp.finfo(dtype).eps) * np.sqrt(n)
    orthogonality = np.linalg.norm(tall.T @ tall - np.eye(n)) / unit
    return float(orthogonality), float(np.linalg.norm(q - polar) / np.sqrt(n))


def markdown(rows: list[dict]) -> str:
    """Return a Markdown table per dtype."""
    lines = ["# Accuracy of msign", ""]
    lines += [
        "Each cell: `||Q^T Q - I||_F` in units of eps sqrt(n), then the relative forward error.",
        "Matrices have geometrically spaced singular values; the columns are condition numbers.",
    ]
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        here = [row for row in rows if row["dtype"] == dtype]
        columns = list(dict.fromkeys((row["condition"], row["scale"]) for row in here))
        lines += ["", f"## {dtype} (eps = {float(jnp.finfo(dtype).eps):.2g})", ""]
        heads = [f"{c:.0e}" + ("" if s == 1 else f", scale {s:.0e}") for c, s in columns]
        lines.append("| method | shape | " + " | ".join(heads) + " |")
        lines.append("|---|---|" + "---|" * len(columns))
        for method, m, n in dict.fromkeys((row["method"], *row["shape"]) for row in here):
            cells = [
                f"{row['orthogonality']:.2g}, {row['forward']:.0e}"
                for row in here
                if (row["method"], *row["shape"]) == (method, m, n)
            ]
            lines.append(f"| {method} | {m} x {n} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def shape_of(text: str) -> tuple[int, int]:
    sides = text.split("x")
    if len(sides) != 2 or not all(side.isdecimal() and int(side) > 0 for side in sides):
        raise argparse.ArgumentTypeError(f"{text!r} is no shape such as 256x64")
    return int(sides[0]), int(sides[1])


def condition_of(text: str) -> float:
    try:
        condition = float(text)
    except ValueError:
        condition = 0.0
    if not 1 <= condition < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no condition number: it is at least 1")
    return condition


def parser() -> Parser:
    options = command("msign_accuracy", (__doc__ or "").split("\n")[0])
    options.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    options.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    shapes = [shape_of(text) for text in SHAPES]
    options.add_argument("--shapes", nargs="+", type=shape_of, default=shapes, metavar="MxN")
    options.add_argument(
        "--conditions", nargs="+", type=condition_of, default=list(CONDITIONS), metavar="C"
    )
    return options


def main(argv: list[str] | None = None) -> None:
    options = parse(parser(), argv, beside=(".md",))
    rows: list[dict] = []
    for number, name in enumerate(options.methods, start=1):
        print(f"[{number}/{len(options.methods)}] {name}", file=sys.stderr, flush=True)
        for dtype in options.dtypes:
            for shape in options.shapes:
                rows += measure(name, shape, dtype, tuple(options.conditions))
    save(options, {"rows": rows})
    table = markdown(rows)
    options.out.with_suffix(".md").write_text(table, encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()
