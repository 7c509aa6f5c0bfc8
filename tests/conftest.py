"""Set-up of the whole suite: eight devices, checked shapes, and the optional data folder."""

import gc
import itertools
import os
import shutil
import zlib
from importlib.metadata import version
from pathlib import Path

# Set before importing JAX and the package: eight host devices for the sharding tests, and faster
# compilation, because the suite compiles for much longer than it computes: no LLVM optimisation, no
# splitting of small programs, and no MLIR between XLA and LLVM (newer versions require it). Users
# run XLA's defaults, which fuse and round differently; XLA_DEFAULTS=1 runs the tests with them.
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers inherit them
    flags = ["--xla_force_host_platform_device_count=8"]
    # By default XLA aborts after 40 seconds, which a loaded machine can need.
    flags += ["--xla_cpu_collective_call_terminate_timeout_seconds=300"]
    # Eight devices that wait for each other occupy eight threads, and up to jaxlib 0.10 XLA has
    # only a thread per device: a program dispatched meanwhile, as outside jit, causes a deadlock,
    # and XLA aborts the process after 40 seconds.
    os.environ.setdefault("NPROC", "32")
    if "XLA_DEFAULTS" not in os.environ:
        flags += ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
        if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):
            flags += ["--xla_cpu_use_fusion_emitters=false"]
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()
# On the CPU, so that a run means the same on every machine.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Share compiled programs between workers and runs; this saves half of a run's time.
# Not in .cache: the documentation builder empties it.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# Two workers use both cores; more threads of NumPy's linear algebra would only spin.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import jaxtyping
import numpy as np
import pytest

from tests.annotations import check
from tests.slow import mark_slow

# Annotated functions of the package and the studies check types and shapes of their arguments.
jaxtyping.install_import_hook(["manifoldmuon", "studies"], f"{check.__module__}.{check.__name__}")


_CACHE = Path(__file__).parents[1] / ".jax_cache"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="run slow cases, too")


def _skips_slow(config: pytest.Config) -> bool:
    """Return False if a test, a file or an option is named."""
    asked = (config.getoption(name, False) for name in ("exhaustive", "keyword", "markexpr", "lf"))
    return not any(asked) and not any("::" in arg or arg.endswith(".py") for arg in config.args)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_slow(items, complete=not any("::" in arg for arg in config.args))
    if _skips_slow(config):
        slow = [item for item in items if item.get_closest_marker("slow")]
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    if _skips_slow(config):
        terminalreporter.write_line("Slow cases are left out; --exhaustive runs every one.")


def pytest_configure(config: pytest.Config) -> None:
    # Every change of the code leaves unused programs in the cache.
    if not hasattr(config, "workerinput") and _size(_CACHE) > 2**30:
        shutil.rmtree(_CACHE, ignore_errors=True)
    # Tracing makes millions of objects; collecting cycles after every 700 takes a twentieth of the
    # time.
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    if jax.device_count() < 8:
        raise pytest.UsageError(
            f"the suite needs 8 devices and found {jax.device_count()}; run it with "
            "JAX_PLATFORMS=cpu"
        )


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    """Skip tests with float16 conversions, which XLA cannot compile for SSE4.2 (they need AVX)."""
    try:
        return (yield)
    except jax.errors.JaxRuntimeError as error:
        older = "--xla_cpu_max_isa=SSE4_2" in os.environ["XLA_FLAGS"]
        if older and "Failed to materialize symbols" in str(error):
            pytest.skip("XLA compiles no conversions of float16 for SSE4.2")
        raise


MODULES = itertools.count(1)


@pytest.fixture(autouse=True, scope="module")
def bounded_memory():
    """Clear compiled programs after every four test modules; the whole suite has gigabytes."""
    yield
    if next(MODULES) % 4 == 0:
        jax.clear_caches()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Return a generator seeded by the test's node id: independent of the tests that ran before."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(scope="module")
def no_futures_left():
    """Collect futures that Orbax leaves after failed reads or writes, before the next module."""
    yield
    gc.collect()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of real data sets: `MANIFOLDMUON_DATA`, or `../shared/data`."""
    folder = os.environ.get("MANIFOLDMUON_DATA")
    path = Path(folder) if folder else Path(__file__).parents[2] / "shared" / "data"
    if not path.is_dir():
        pytest.skip(f"no data: {path} does not exist, and MANIFOLDMUON_DATA names no other folder")
    return path
