"""`minimize` against pymanopt on a dozen of pymanopt's example problems, to a gradient of 1e-10.

    python -m benchmarks minimize    # minutes; docs/benchmarks/results/minimize.*

Each cost is written once and traced by both JAX and autograd. Both libraries start at the same
point, in float64, and stop at a Riemannian gradient of 1e-10. The rival is pymanopt's trust region
method with its autograd and its JAX backend (`pip install pymanopt autograd`); without pymanopt its
columns are omitted. Times are CPU seconds, which other work on the machine affects little: of the
first call, including tracing and compilation; of the first call with a persistent compilation
cache; and the minimum of several later calls. `starts` is the time of a hundred starts by
`jax.vmap` over the time of a single start.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from benchmarks._command import command, save_with_table
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


def square_matrices(n: int) -> tuple[tuple[int, ...], ...]:
    return ((n, n),)


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
            square_matrices, mixed, lambda m, n: m.Stiefel(n, n), 50),
    Problem("dictionary", lambda xp, a, x: -xp.sum((a @ x) ** 4) / 4e3, (Stiefel(),),
            square_matrices, mixed, lambda m, n: m.Stiefel(n, n), 50),
    Problem("rotation synchronisation",
            lambda xp, a, x: -xp.sum(a * xp.einsum("iab,jcb->ijac", x, x)), (Stiefel(),),
            lambda n: ((n, 3, 3),), synchronised, lambda m, n: m.Stiefel(3, 3, k=n), 100),
)  # fmt: skip


def cost_of(problem: Problem) -> Callable[..., Any]:
    """Return the cost as a function of the parts and the data, for `minimize`."""
    return lambda x, a: problem.cost(jnp, a, *x)


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


class Timed(NamedTuple):
    """CPU seconds of a call, and its result.

    Attributes:
      first: first call, including tracing and compilation.
      cached: first call with a persistent compilation cache, including tracing; None without cache.
      again: minimum of later calls.
      result: result of the last call.
    """

    first: float
    cached: float | None
    again: float
    result: Any


def seconds(call: Callable[[], Any], rounds: int, cache: bool = False) -> Timed:
    spent, result = [], None
    for number in range(rounds + 1 + cache):
        if cache and number == 1:
            jax.clear_caches()
        start = time.process_time()
        result = jax.block_until_ready(call())
        spent.append(time.process_time() - start)
    first, *rest = spent
    return Timed(first, rest.pop(0) if cache else None, min(rest), result)


def measure(problem: Problem, size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure a problem at a size with every method."""
    rng = np.random.default_rng(size)
    data = problem.data(rng, size) * 1.0
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float64) for shape in problem.shapes(size)]
    start = tuple(init_tree(problem.manifolds, jax.random.key(size), tuple(shapes)))
    cost = cost_of(problem)
    row: dict[str, Any] = {"problem": problem.name, "size": size, "methods": {}}
    for name, method in METHODS.items():
        solve = functools.partial(
            minimize, cost, problem.manifolds, method=method, tolerance=TOLERANCE, max_steps=2000
        )
        timed = seconds(lambda s=solve: s(start, (data,)), options.rounds, cache=True)
        found = timed.result
        row["methods"][name] = outcome(timed, found.value, found.gradient_norm) | {
            "steps": int(found.steps),
            "evaluations": int(found.evaluations),
            "reason": Reason(int(found.reason)).name,
        }
        if size <= options.starts_size:
            keys = jax.random.split(jax.random.key(1), options.starts)
            many = jax.vmap(lambda key: init_tree(problem.manifolds, key, tuple(shapes)))(keys)
            batch = jax.jit(jax.vmap(lambda x, s=solve: s(x, (data,))))
            together = seconds(lambda b=batch, m=many: b(m), options.rounds)
            row["methods"][name]["starts"] = together.again / timed.again
    if pymanopt is not None:
        for name, module in (("autograd", autograd_numpy), ("jax", jnp)):
            row["methods"][f"pymanopt, {name}"] = rival(problem, size, data, start, name, module)
    return row


def outcome(timed: Timed, value: Any, gradient_norm: Any) -> dict[str, Any]:
    spent = {"first": timed.first, "cached": timed.cached, "again": timed.again}
    return spent | {"value": float(value), "gradient_norm": float(gradient_norm)}


def rival(
    problem: Problem, size: int, data: np.ndarray, start: Any, backend: str, module: Any
) -> dict[str, Any]:
    """Measure pymanopt's trust regions from the same start."""
    oblique = problem.manifolds == (ROWS,)
    manifold = problem.rival(pymanopt.manifolds, size)

    def cost(*parts):
        return problem.cost(module, data, *(part.T if oblique else part for part in parts))

    parts = [np.asarray(part.T if oblique else part) for part in start]

    decorated = getattr(pymanopt.function, backend)(manifold)(cost)
    task = pymanopt.Problem(manifold, decorated)
    optimizer = pymanopt.optimizers.TrustRegions(
        min_gradient_norm=TOLERANCE, max_iterations=1000, max_time=60, verbosity=0
    )
    point = parts[0] if len(parts) == 1 else parts
    # The autograd backend compiles nothing.
    rounds = 1 if backend == "jax" else 0
    spent, found = [], cast(Any, None)
    for _ in range(rounds + 1):
        before = time.process_time()
        found = optimizer.run(task, initial_point=point)
        spent.append(time.process_time() - before)
    result = outcome(Timed(spent[0], None, spent[-1], found), found.cost, found.gradient_norm)
    return result | {"steps": found.iterations, "reason": found.stopping_criterion}


def ratios(row: dict[str, Any]) -> dict[str, float]:
    """Return our faster method's times over the times of pymanopt's faster backend.

    Our methods count only if they reached the tolerance; pymanopt's always count.
    """
    own = [row["methods"][name] for name in METHODS]
    own = [found for found in own if found["gradient_norm"] <= TOLERANCE]
    others = [found for name, found in row["methods"].items() if name not in METHODS]
    least = lambda rows, key: min((found[key] for found in rows), default=np.nan)  # noqa: E731
    return {
        "first": least(own, "first") / least(others, "first"),
        "cached": least(own, "cached") / least(others, "first"),
        "again": least(own, "again") / least(others, "again"),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return a table of seconds, gradients, ratios of times, and differences of the values."""
    names = [name for name in rows[0]["methods"] if name.startswith("pymanopt")]
    header = ["problem", "size"]
    for name in METHODS:
        header += [f"{name}: first, cached, again", "steps", "gradient", "100 starts"]
    header += [f"{name}: first, again" for name in names]
    header += (
        ["first ÷", "cached ÷", "again ÷", "its gradient", "its value - ours"] if names else []
    )
    lines = []
    for row in rows:
        line = [row["problem"], row["size"]]
        for name in METHODS:
            found = row["methods"][name]
            starts = f"{found['starts']:.0f} x" if "starts" in found else "-"
            line += [f"{found['first']:.2f}, {found['cached']:.2f}, {found['again']:.4f}",
                     found["steps"], f"{found['gradient_norm']:.0e}", starts]  # fmt: skip
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
    parser = command("minimize", "What minimising to convergence takes beside pymanopt.")
    parser.add_argument("--rounds", type=int, default=2, help="timed rounds")
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 100, 1000], help="sizes")
    parser.add_argument("--starts", type=int, default=100, help="starts by vmap")
    parser.add_argument("--starts-size", type=int, default=10, help="the largest size for those")
    parser.add_argument("--problems", nargs="+", default=[p.name for p in PROBLEMS], help="names")
    options = parse(parser, argv, beside=(".md",))
    if pymanopt is None:
        print("pymanopt is not installed (pip install pymanopt autograd): its columns are left out")
    rows = []
    with fresh_cache(), jax.enable_x64(True):
        for problem in PROBLEMS:
            if problem.name in options.problems:
                for size in sorted({min(size, problem.largest) for size in options.sizes}):
                    rows.append(measure(problem, size, options))
                    print(table(rows[-1:]).splitlines()[-1], flush=True)
    settings = {"tolerance": TOLERANCE, "rounds": options.rounds, "starts": options.starts}
    rival_version = None if pymanopt is None else pymanopt.__version__
    save_with_table(options, settings | {"pymanopt": rival_version, "rows": rows}, table(rows))


if __name__ == "__main__":
    main()
