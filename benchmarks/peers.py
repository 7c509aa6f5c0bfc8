"""`minimize` compared with geojax and smopt on Brockett's cost, in float64.

    pip install geojax smopt
    python -m benchmarks peers    # seven minutes; docs/benchmarks/results/peers.*

All start at the same point and stop at a Riemannian gradient of 1e-6. Times are CPU seconds of the
first call, including tracing and compilation, and of a second call. Libraries that are not
installed are omitted; geojax is stopped after `--limit` seconds.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._harness import command, save_with_table
from benchmarks.minimize import spent
from manifoldmuon.manifolds import Stiefel
from manifoldmuon.minimize import Auto, TrustRegion, minimize
from studies.display import markdown_table
from studies.program import parse

geojax: Any = None
smopt: Any = None
with contextlib.suppress(ImportError):
    geojax = importlib.import_module("geojax.optimization")
    geometry: Any = importlib.import_module("geojax.geometry")
with contextlib.suppress(ImportError):
    smopt = importlib.import_module("smopt")

TOLERANCE = 1e-6


def cost(x, a):
    return -jnp.sum(x * (a @ x) * jnp.arange(1.0, x.shape[1] + 1))


def ours(a: Any, start: Any, method: Any) -> np.ndarray:
    found = minimize(cost, Stiefel(), start, (a,), method=method, tolerance=TOLERANCE)
    return np.asarray(found.point)


def geojaxs(a: Any, start: Any, solver: str, limit: float) -> np.ndarray:
    options = {"tolgradnorm": TOLERANCE, "maxiter": 100_000, "maxtime": limit, "verbosity": 0}
    manifold = geometry.StiefelEuclidean(start.shape)
    task = geojax.Minimize(
        M=manifold, cost=lambda x: cost(x, a), x0=start, solver=getattr(geojax, solver)(**options)
    )
    return np.asarray(task.solve()[0])


def smopts(a: np.ndarray, start: np.ndarray) -> np.ndarray:
    weights = np.arange(1.0, start.shape[1] + 1)

    def value_and_gradient(x: np.ndarray) -> tuple[float, np.ndarray]:
        product = (a @ x) * weights
        return -float(np.sum(x * product)), -2 * product

    task = smopt.Stiefel(*start.shape)
    options = {"maxit": 100_000, "gtol": TOLERANCE, "verbosity": 0}
    return smopt.slpg_smooth(value_and_gradient, task, xinit=start, **options)[0]


def programs(limit: float) -> Iterator[tuple[str, Callable[..., np.ndarray]]]:
    """Yield the programs that are installed, by name."""
    yield "minimize", functools.partial(ours, method=Auto())
    yield "minimize, `TrustRegion()`", functools.partial(ours, method=TrustRegion())
    if smopt is not None:
        yield "smopt, `slpg_smooth`", smopts
    if geojax is not None:
        for solver in ("LBFGS", "ConjugateGradient", "TrustRegions"):
            solve = functools.partial(geojaxs, solver=solver, limit=limit)
            yield f"geojax, `{solver}`", solve


def measure(n: int, p: int, limit: float) -> list[dict[str, Any]]:
    """Measure all programs on a random symmetric matrix."""
    rng = np.random.default_rng(n)
    a = rng.standard_normal((n, n))
    a, start = (a + a.T) / 2, np.linalg.qr(rng.standard_normal((n, p)))[0]
    least = -np.linalg.eigvalsh(a)[-p:] @ np.arange(1.0, p + 1)
    rows = []
    for name, run in programs(limit):
        seconds, x = spent(functools.partial(run, a, start), 2)
        product = (a @ x) * np.arange(1.0, p + 1)
        inner = x.T @ product
        norm = 2 * np.linalg.norm(product - x @ (inner + inner.T) / 2)
        excess = 1 + np.sum(x * product) / least
        rows.append({
            "shape": [n, p], "program": name, "first": seconds[0], "again": seconds[1],
            "gradient_norm": float(norm), "excess": float(excess),
        })  # fmt: skip
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return a table of CPU seconds, gradients, and relative distances from the least cost."""
    header = [
        "matrix",
        "program",
        "first call, CPU s",
        "second call",
        "gradient",
        "above the least",
    ]
    return markdown_table(header, [
        ["{} x {}".format(*row["shape"]), row["program"], f"{row['first']:.2g}",
         f"{row['again']:.2g}", f"{row['gradient_norm']:.0e}", f"{row['excess']:.0e}"]
        for row in rows
    ])  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = command("peers", __doc__)
    parser.add_argument("--shapes", nargs="+", default=["50x3", "300x10"], help="sizes n x p")
    parser.add_argument(
        "--limit", type=float, default=120, help="seconds allowed for a call of geojax"
    )
    options = parse(parser, argv, beside=(".md",))
    rows = []
    with jax.enable_x64(True):
        for shape in options.shapes:
            n, p = map(int, shape.split("x"))
            rows += measure(n, p, options.limit)
    settings = {"tolerance": TOLERANCE, "limit": options.limit}
    save_with_table(options, settings | {"rows": rows}, table(rows))


if __name__ == "__main__":
    main()
