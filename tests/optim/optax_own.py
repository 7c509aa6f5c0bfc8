"""Run the optimizer tests of the installed Optax on our optimizers.

    python -m pytest -n 0 tests/optim/optax_own.py

Not part of the suite: each test takes thousands of steps. docs/reliability.md has the results.
"""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from manifoldmuon import optim
from manifoldmuon.manifolds import Euclidean
from manifoldmuon.norms import Frobenius

with warnings.catch_warnings(action="ignore"):
    from optax._src import alias_test, sharding_test
    from optax.contrib import _common_test

# Optax's test problems are unconstrained, over vectors and small matrices.
LEAF = Euclidean()


MAKERS = {
    "muon": lambda rate: optim.muon(rate, LEAF),
    "manifold_muon": lambda rate: optim.manifold_muon(rate, LEAF),
    "normed_adam": lambda rate: optim.chain(
        optim.normalize(optax.scale_by_adam(), LEAF), optax.scale_by_learning_rate(rate)
    ),
    "duality": lambda rate: optim.manifold_muon(rate, Euclidean(Frobenius(ndim=1)), None),
    "riemannian_adam": lambda rate: optim.riemannian_adam(rate, LEAF),
    "riemannian_sgd": lambda rate: optim.riemannian_sgd(rate, LEAF, 0.9),
}


def annotated(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return `make` with the annotation that Optax's tests look for."""

    def optimizer(learning_rate: optax.ScalarOrSchedule):
        return make(learning_rate)

    return optimizer


OURS = {f"ours_{name}": annotated(make) for name, make in MAKERS.items()}
# Steps of norm `RATE` end within about `RATE` of the optimum; Optax's tolerance is 0.03.
RATE = {"learning_rate": 3e-3}
WRAPPERS = {
    "mechanize": {"weight_decay": 0.0},
    "schedule_free": {"learning_rate": 1e-2},
    "reduce_on_plateau": {},
}
FLOATS = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)


def original(case: type, name: str) -> Callable[..., None]:
    """Return the test method before `parameterized` expands it per optimizer."""
    for key, method in vars(case).items():
        for cell in getattr(method, "__closure__", None) or () if key.startswith(name) else ():
            if getattr(cell.cell_contents, "__name__", None) == name:
                return cell.cell_contents
    raise LookupError(f"{case.__name__} of Optax {optax.__version__} has no {name}")


def cases() -> list[Any]:
    # At module level, pytest would collect these classes.
    contrib, alias = _common_test.ContribTest, alias_test.AliasTest
    sharding = sharding_test.ShardingTest
    bare: dict[str, Any] = {"wrapper_name": None, "wrapper_kwargs": None}
    wrapped = [{"wrapper_name": k, "wrapper_kwargs": v} for k, v in WRAPPERS.items()]
    short = [{"dtype": dtype} for dtype in ("bfloat16", "float32")]
    problems = [
        _common_test._setup_parabola,
        _common_test._setup_rosenbrock,
        _common_test._setup_matrix_parabola,
        _common_test._setup_mixed_tensor_target,
    ]
    theirs = [alias_test._setup_parabola, alias_test._setup_rosenbrock]
    schedules = "test_optimizers_accept_learning_rate_schedule_if_type_annotated_as_such"
    # fmt: off
    table: list[tuple[type, str, list[dict[str, Any]]]] = [
        (contrib, "test_optimizers_accept_extra_args", [bare | {"wrap": False}]),
        (contrib, "test_optimizers", [bare | {"target": x, "dtype": "float32"} for x in problems]),
        (contrib, "test_optimizers_can_be_wrapped_in_inject_hyperparams", [bare]),
        (contrib, "test_preserve_dtype", [bare | x for x in short]),
        (contrib, "test_gradient_accumulation", [bare | x for x in short]),
        (contrib, "test_state_shape_dtype_shard_stability", [bare | {"dtype": x} for x in FLOATS]),
        (contrib, schedules, [bare]),
        # The third wrapper needs a loss, which Optax's test passes only to `sgd`.
        (contrib, "test_optimizers_accept_extra_args", [x | {"wrap": True} for x in wrapped[:2]]),
        (contrib, "test_preserve_dtype", [x | y for x in wrapped for y in short]),
        (contrib, "test_gradient_accumulation", [x | y for x in wrapped for y in short]),
        (alias, "test_optimization", [{"target": x, "dtype": jnp.float32} for x in theirs]),
        (sharding, "test_init_with_abstract_input", [{}]),
        (sharding, "test_state_sharding_type_init_match_update", [{}]),
        (sharding, "test_state_sharding_type_preserved_with_jit", [{}]),
    ]
    # fmt: on
    return [
        pytest.param(case, name, row, id=f"{name}-{label(row)}")
        for case, name, rows in table
        for row in rows
    ]


def label(arguments: dict[str, Any]) -> str:
    chosen = (arguments.get(key) for key in ("wrapper_name", "target", "dtype"))
    return "-".join(getattr(x, "__name__", str(x)).strip("_") for x in chosen if x is not None)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("case", "name", "arguments"), cases())
@pytest.mark.parametrize("optimizer", OURS)
def test_passes(case, name, arguments, optimizer, monkeypatch):
    # Optax's tests look up the optimizer by name in these modules.
    monkeypatch.setattr(optax.contrib, optimizer, OURS[optimizer], raising=False)
    monkeypatch.setattr(alias_test.alias, optimizer, OURS[optimizer], raising=False)
    method, itself = original(case, name), case()
    if case is sharding_test.ShardingTest:
        # The test compares versions as strings, so 0.10 sorts before 0.7.
        monkeypatch.setattr(jax, "__version__", "0.9")
        method(itself, OURS[optimizer](**RATE))
    else:
        method(itself, opt_name=optimizer, opt_kwargs=RATE, **arguments)
    jax.clear_caches()
