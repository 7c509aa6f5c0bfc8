"""First and later calls of `minimize` on pymanopt's example problems, compared with pymanopt.

    python -m benchmarks minimize    # twenty minutes; docs/benchmarks/results/minimize.*

Each cost is written once and traced by both JAX and autograd. Both libraries start at the same
point, in float64, and stop at a Riemannian gradient of 1e-10. The rival is pymanopt's trust region
method with its autograd and its JAX backend (`pip install pymanopt autograd`); without pymanopt its
columns are omitted. Times are CPU seconds, which other work on the machine affects little: of the
first call, including tracing and compilation; of the first call with a persistent compilation
cache; and the minimum of several later calls.
"""

import contextlib
import dataclasses
import functools
import importlib
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from benchmarks._harness import command, save_with_table
from manifoldmuon.manifolds import EmbeddingRows, Euclidean, Grassmann, Hypersphere, Stiefel
from manifoldmuon.minimize import LBFGS, Reason, TrustRegion, minimize
from manifoldmuon.optim import init_tree
from studies.display import markdown_table
from studies.program import parse

pymanopt: Any = None
autograd_numpy: Any = None
with contextlib.suppress(ImportError):
    autograd_numpy = importlib.import_module("autograd.numpy")
    pymanopt = importlib.import_module("pymanopt")

TOLERANCE = 1e-10
METHODS = {"L-BFGS": LBFGS(), "trust region": TrustRegion()}
ROWS = EmbeddingRows(scale=1.0)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Cost and manifolds, with shapes and data for each size.

    Attributes:
      name: name in the tables.
      cost: function of a module (`jax.numpy` or `autograd.numpy`), the data and the point's parts.
      manifolds: manifolds of the parts.
      shapes: shapes of the parts, as a function of the size.
      data: function of a generator and the size.
      rival: pymanopt's manifold, as a function of its module of manifolds and the size.
      largest: largest size.
    """

    name: str
    cost: Callable[..., Any]
    manifolds: tuple[Any, ...]
    shapes: Callable[[int], tuple[tuple[int, ...], ...]]
    data: Callable[[np.random.Generator, int], np.ndarray]
    rival: Callable[[Any, int], Any]
    largest: int = 1000

    def draw(self, size: int) -> np.ndarray:
        """Draw the data."""
        return self.data(np.random.default_rng(size), size) * 1.0

    def start(self, size: int, key: jax.Array) -> tuple[Any, ...]:
        """Draw a start."""
        shapes = tuple(jax.ShapeDtypeStruct(shape, jnp.float64) for shape in self.shapes(size))
        return tuple(init_tree(self.manifolds, key, shapes))


def covariance(rng: np.random.Generator, n: int) -> np.ndarray:
    """Draw a covariance matrix with eigenvalues 1, 1/2, ..., 1/n and random eigenvectors."""
    basis = np.linalg.qr(rng.standard_normal((n, n)))[0]
    return (basis / np.arange(1, n + 1)) @ basis.T


def mixed(rng: np.random.Generator, n: int) -> np.ndarray:
    """Draw a thousand whitened samples of independent heavy-tailed sources."""
    x = rng.laplace(size=(1000, n))
    return np.linalg.svd(x - x.mean(0), full_matrices=False)[0] * np.sqrt(1000)


def synchronised(rng: np.random.Generator, n: int) -> np.ndarray:
    """Draw noisy pairwise products of n rotations, `(n, n, 3, 3)`."""
    r = np.linalg.qr(rng.standard_normal((n, 3, 3)))[0]
    noise = 0.1 * rng.standard_normal((n, n, 3, 3))
    return np.einsum("iab,jcb->ijac", r, r) + noise + np.transpose(noise, (1, 0, 3, 2))


def graph(rng: np.random.Generator, n: int) -> np.ndarray:
    """Draw the adjacency matrix of a random graph."""
    upper = np.triu(rng.random((n, n)) < 0.5, 1) * 1.0
    return upper + upper.T


def weighted_gram(xp, a, x):
    return -xp.sum(x * (a @ x) * xp.arange(1.0, x.shape[1] + 1))


def sparse_components(xp, a, x):
    return -xp.sum(x * (a @ x)) + 0.02 * xp.sum(xp.sqrt(x * x + 1e-2))


def packed(xp, a, x):
    gram = x @ x.T - 4.0 * xp.eye(x.shape[0])
    return 0.2 * xp.log(xp.sum(xp.exp((gram - 1.0) / 0.2))) + 0 * xp.sum(a)


def stiefel(p: int) -> Callable[[Any, int], Any]:
    return lambda m, n: m.Stiefel(n, p)


PROBLEMS = (
    Problem("Rayleigh quotient", lambda xp, a, x: -xp.sum(x * (a @ x)), (Hypersphere(),),
            lambda n: ((n,),), covariance, lambda m, n: m.Sphere(n)),
    Problem("dominant subspace", lambda xp, a, x: -xp.sum(x * (a @ x)), (Grassmann(),),
            lambda n: ((n, 3),), covariance, lambda m, n: m.Grassmann(n, 3)),
    Problem("PCA, ordered", weighted_gram, (Stiefel(),),
            lambda n: ((n, 3),), covariance, stiefel(3)),
    Problem("Procrustes", lambda xp, a, x: xp.sum((a[0] @ x - a[1][:, :3]) ** 2), (Stiefel(),),
            lambda n: ((n, 3),), lambda rng, n: rng.standard_normal((2, n + 3, n)), stiefel(3)),
    Problem("max-cut relaxation", lambda xp, a, x: xp.sum(x * (a @ x)) / 4, (ROWS,),
            lambda n: ((n, 3),),
            graph,
            lambda m, n: m.Oblique(3, n)),
    Problem("packing on the sphere", packed, (ROWS,),
            lambda n: ((n, 3),), lambda rng, n: np.zeros(1), lambda m, n: m.Oblique(3, n), 100),
    Problem("low-rank approximation",
            lambda xp, a, u, s, v: xp.sum((a - (u * s) @ v.T) ** 2),
            (Stiefel(), Euclidean(), Stiefel()), lambda n: ((n, 3), (3,), (n + 2, 3)),
            lambda rng, n: rng.standard_normal((n, n + 2)),
            lambda m, n: m.Product([m.Stiefel(n, 3), m.Euclidean(3), m.Stiefel(n + 2, 3)])),
    Problem("sparse PCA, smooth", sparse_components, (Stiefel(),),
            lambda n: ((n, 3),), covariance, stiefel(3)),
    Problem("ICA", lambda xp, a, x: xp.mean(xp.log(xp.cosh(a @ x))), (Stiefel(),),
            lambda n: ((n, n),), mixed, lambda m, n: m.Stiefel(n, n), 50),
    Problem("dictionary", lambda xp, a, x: -xp.sum((a @ x) ** 4) / 4e3, (Stiefel(),),
            lambda n: ((n, n),), mixed, lambda m, n: m.Stiefel(n, n), 50),
    Problem("rotation synchronisation",
            lambda xp, a, x: -xp.sum(a * xp.einsum("iab,jcb->ijac", x, x)), (Stiefel(),),
            lambda n: ((n, 3, 3),), synchronised, lambda m, n: m.Stiefel(3, 3, k=n), 100),
)  # fmt: skip


def solver(problem: Problem, method: str) -> Callable[..., Any]:
    """Return `minimize` as a function of a start and the data."""
    return functools.partial(
        minimize,
        lambda x, a: problem.cost(jnp, a, *x),
        problem.manifolds,
        method=METHODS[method],
        tolerance=TOLERANCE,
        max_steps=2000,
    )


@contextlib.contextmanager
def fresh_cache() -> Iterator[None]:
    """Use an empty persistent compilation cache within the block."""
    before = cast(Any, jax.config).jax_compilation_cache_dir
    with tempfile.TemporaryDirectory() as folder:
        try:
            jax.config.update("jax_compilation_cache_dir", folder)
            compilation_cache.reset_cache()
            yield
        finally:
            jax.config.update("jax_compilation_cache_dir", before)
            compilation_cache.reset_cache()


def spent(call: Callable[[], Any], calls: int) -> tuple[list[float], Any]:
    """Return the CPU seconds of calls, and the result of the last call."""
    seconds, result = [], None
    for _ in range(calls):
        start = time.process_time()
        result = jax.block_until_ready(call())
        seconds.append(time.process_time() - start)
    return seconds, result


def ours(problem: Problem, size: int, method: str, rounds: int) -> dict[str, Any]:
    """Measure a method on a problem."""
    start, data = problem.start(size, jax.random.key(size)), problem.draw(size)
    solve = solver(problem, method)
    [first], _ = spent(lambda: solve(start, (data,)), 1)
    jax.clear_caches()  # the persistent cache stays
    [cached, *again], found = spent(lambda: solve(start, (data,)), 1 + rounds)
    return {
        "first": first, "cached": cached, "again": min(again), "value": float(found.value),
        "gradient_norm": float(found.gradient_norm), "steps": int(found.steps),
        "evaluations": int(found.evaluations), "reason": Reason(int(found.reason)).name,
    }  # fmt: skip


def pymanopts(problem: Problem, size: int, backend: str) -> dict[str, Any]:
    """Measure pymanopt's trust regions from the same start."""
    turned = problem.manifolds == (ROWS,)  # its oblique manifold has columns of norm 1
    module = {"autograd": autograd_numpy, "jax": jnp}[backend]
    manifold, data = problem.rival(pymanopt.manifolds, size), problem.draw(size)

    def cost(*parts):
        return problem.cost(module, data, *(part.T if turned else part for part in parts))

    parts = [np.asarray(x.T if turned else x) for x in problem.start(size, jax.random.key(size))]
    task = pymanopt.Problem(manifold, getattr(pymanopt.function, backend)(manifold)(cost))
    optimizer = pymanopt.optimizers.TrustRegions(
        min_gradient_norm=TOLERANCE, max_iterations=1000, max_time=60, verbosity=0
    )
    point = parts[0] if len(parts) == 1 else parts
    calls = 2 if backend == "jax" else 1  # the autograd backend compiles nothing
    seconds, found = spent(lambda: optimizer.run(task, initial_point=point), calls)
    return {
        "first": seconds[0], "cached": None, "again": seconds[-1], "value": float(found.cost),
        "gradient_norm": float(found.gradient_norm), "steps": found.iterations,
        "reason": found.stopping_criterion,
    }  # fmt: skip


def measure(problem: Problem, size: int, rounds: int) -> dict[str, Any]:
    """Measure a problem at a size with every method."""
    methods = {name: ours(problem, size, name, rounds) for name in METHODS}
    if pymanopt is not None:
        for backend in ("autograd", "jax"):
            methods[f"pymanopt, {backend}"] = pymanopts(problem, size, backend)
    return {"problem": problem.name, "size": size, "methods": methods}


def ratios(row: dict[str, Any]) -> dict[str, float]:
    """Return our faster method's times over the times of pymanopt's faster backend.

    Our methods count only if they reached the tolerance; pymanopt's always count.
    """
    own = [row["methods"][name] for name in METHODS]
    own = [found for found in own if found["gradient_norm"] <= TOLERANCE]
    others = [found for name, found in row["methods"].items() if name not in METHODS]
    pairs = {"first": "first", "cached": "first", "again": "again"}
    return {
        key: min((found[key] for found in own), default=np.nan) / min(x[peer] for x in others)
        for key, peer in pairs.items()
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return a table of seconds, gradients, ratios of times, and differences of the values."""
    names = [name for name in rows[0]["methods"] if name.startswith("pymanopt")]
    header = ["problem", "size"]
    for name in METHODS:
        header += [f"{name}: first, cached, again", "steps", "gradient"]
    header += [f"{name}: first, again" for name in names]
    header += (
        ["first ÷", "cached ÷", "again ÷", "its gradient", "its value - ours"] if names else []
    )
    lines = []
    for row in rows:
        line = [row["problem"], row["size"]]
        for name in METHODS:
            found = row["methods"][name]
            line += [f"{found['first']:.2f}, {found['cached']:.2f}, {found['again']:.4f}",
                     found["steps"], f"{found['gradient_norm']:.0e}"]  # fmt: skip
        rivals = [row["methods"][name] for name in names]
        line += [f"{found['first']:.2f}, {found['again']:.2f}" for found in rivals]
        if names:
            best = min(row["methods"][name]["value"] for name in METHODS)
            line += [f"{ratio:.2g}" for ratio in ratios(row).values()]
            line += [f"{rivals[0]['gradient_norm']:.0e}", f"{rivals[0]['value'] - best:.0e}"]
        lines.append(line)
    return markdown_table(header, lines)


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = command("minimize", __doc__, rounds=2)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--problems", nargs="+", default=[p.name for p in PROBLEMS])
    options = parse(parser, argv, beside=(".md",))
    if pymanopt is None:
        print("pymanopt is not installed (pip install pymanopt autograd): its columns are left out")
    rows = []
    with fresh_cache(), jax.enable_x64(True):
        for problem in PROBLEMS:
            if problem.name in options.problems:
                for size in sorted({min(size, problem.largest) for size in options.sizes}):
                    rows.append(measure(problem, size, options.rounds))
                    print(table(rows[-1:]).splitlines()[-1], flush=True)
    settings = {"tolerance": TOLERANCE, "rounds": options.rounds}
    settings |= {"pymanopt": pymanopt and pymanopt.__version__}
    save_with_table(options, settings | {"rows": rows}, table(rows))


if __name__ == "__main__":
    main()
