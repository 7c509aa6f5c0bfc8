"""Distributed stacks on eight devices: operations, communication and results of a step."""

import functools
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from manifoldmuon import optim
from manifoldmuon.manifolds import EmbeddingRows, Euclidean, Hypersphere, Stiefel
from manifoldmuon.manifolds.solvers import ProjectedPolar
from manifoldmuon.norms import RMSToRMS
from tests.optim.training import drawn
from tests.tolerances import rounding

# Eight devices: only the exhaustive run has these tests.
pytestmark = pytest.mark.slow

SPECS = {
    "replicated": PartitionSpec(),
    "rows": PartitionSpec("x"),
    "columns": PartitionSpec(None, "x"),
}
# Limit for a device's operations, relative to an eighth of the total. JAX 0.8 compiles replicated
# `muon` to 1.159.
SHARE = 1.15 if jax.__version_info__ >= (0, 9) else 1.17
# Limit for the bytes moved per step, relative to the parameters' size. Each argument goes to its
# owner and the result returns: an eighth per device. Replicated arguments are already local, and
# the result is gathered once.
MOVED = {
    "muon": {"replicated": 1, "rows": 2 / 8, "columns": 2 / 8},
    "manifold_muon": {"replicated": 1, "rows": 3 / 8, "columns": 3 / 8},
}
OPTIMIZERS = {
    "muon": optim.muon(0.02, Euclidean(RMSToRMS())),
    "manifold_muon": optim.manifold_muon(0.02, Stiefel(solver=ProjectedPolar())),
}
# Sixteen squares, eight tall and eight wide matrices: two and one for each of eight devices.
STACKED = optim.manifold_muon(0.02, Stiefel(solver=ProjectedPolar()).stacked())
LAYERS, WIDTH, NAMES = 8, 32, ("q", "o", "up", "down")
FEWER = ("q", "up")


def tree(
    seed: int, layers: int = LAYERS, stacked: bool = False, names: tuple[str, ...] = NAMES
) -> dict[str, Any]:
    """Return semi-orthogonal matrices."""
    rng = np.random.default_rng(seed)
    made: dict[str, Any] = {}
    for name in names:
        m = 4 * WIDTH if name in ("up", "down") else WIDTH
        stack = jnp.float32(np.linalg.qr(rng.standard_normal((layers, m, WIDTH)))[0])
        stack = stack.mT if name == "down" else stack
        made |= {name: stack} if stacked else {f"{name}{i}": x for i, x in enumerate(stack)}
    return made


def step_of(tx):
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def compiled(tx, params, grads, mesh, spec):
    """Compile a step for parameters of this sharding; return the program and its arguments."""
    place = NamedSharding(mesh, spec)
    params, grads = (jax.device_put(x, place) for x in (params, grads))
    with jax.set_mesh(mesh):
        state = tx.init(params)
        program = jax.jit(step_of(tx)).lower(params, state, grads).compile()
    return program, (params, state, grads)


def flops(program: Any) -> float:
    """Return the operations of a compiled program. XLA counts a loop's body once."""
    return program.cost_analysis()["flops"]


def collectives(text: str) -> dict[str, int]:
    """Return the bytes that each named computation receives by collectives."""
    found: dict[str, int] = {}
    name = ""
    for line in text.splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            name = header[1]
        kinds = r"= (.*?) (?:all-gather|all-to-all|all-reduce|collective-permute|reduce-scatter)"
        if call := re.search(kinds + r"(?:-start)?\(", line):
            shapes = re.findall(r"(?:f32|s32|pred)\[([\d,]*)\]", call[1])
            entries = sum(int(np.prod([int(d) for d in s.split(",") if d])) for s in shapes)
            found[name] = found.get(name, 0) + 4 * entries
    return found


@functools.cache
def alone(name: str, stacked: bool = False) -> tuple[Any, Any, float]:
    """Return parameters and state after a step on a single device, and its operations."""
    params, grads = (tree(seed, stacked=stacked) for seed in (0, 1))
    tx = STACKED if stacked else OPTIMIZERS[name]
    given = params, tx.init(params), grads
    program = jax.jit(step_of(tx)).lower(*given).compile()
    return *program(*given), flops(program)


def assert_close(found: Any, wanted: Any) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(jax.device_get(x), y, atol=5e-6)


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((8,), ("x",), (AxisType.Auto,))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_work_and_communication_are_divided(name, spec, mesh):
    params, grads, tx = tree(0), tree(1), OPTIMIZERS[name]
    program, given = compiled(tx, params, grads, mesh, SPECS[spec])
    wanted, _, work = alone(name)
    assert flops(program) < SHARE * work / 8
    text = program.as_text() or ""
    moved, entry = collectives(text), re.findall(r"ENTRY %?([\w.\-]+)", text)
    assert len(entry) == 1
    assert set(moved) <= set(entry)  # no collective inside a loop
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    assert sum(moved.values()) < 1.01 * MOVED[name][spec] * size
    found, state = program(*given)
    assert_close(found, wanted)
    # Results keep the user's sharding.
    for x in jax.tree.leaves((found, optax.tree.get(state, "trace"))):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, SPECS[spec]), 2)


# Mesh sizes and axis types, leading axes, partition spec, and the bytes that `muon` moves, in
# eighths of the parameters' size: update and result, or twice that if half of the owners get
# padding.
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
STACKS = {
    "layers": ((8,), (AUTO,), (8,), ("x",), 0),
    "experts by columns": ((4, 2), (AUTO, AUTO), (8,), ("x", None, "y"), 2),
    "experts on the last axis": ((4, 2), (EXPLICIT, EXPLICIT), (8,), ("y", "x"), 2),
    "layers of experts": ((4, 2), (AUTO, AUTO), (3, 8), (None, "x", None, "y"), 8 / 3),
    "layers of experts, twice": ((2, 4), (EXPLICIT, EXPLICIT), (4, 8), ("x", "y"), 0),
    "layers by rows and columns": ((4, 2), (AUTO, AUTO), (8,), (None, "x", "y"), 4),
    "few experts": ((4, 2), (AUTO, AUTO), (4,), ("x", None, "y"), 4),
    "rows by columns": ((4, 2), (EXPLICIT, EXPLICIT), (), ("x", "y"), 2),
    "columns by rows": ((4, 2), (EXPLICIT, EXPLICIT), (), ("y", "x"), 2),
    "rows by both": ((4, 2), (AUTO, AUTO), (), (("x", "y"),), 4),
}


def muon_of(lead: tuple[int, ...]) -> Any:
    return optim.muon(0.02, Euclidean(RMSToRMS()).stacked(len(lead)))


@pytest.mark.parametrize("name", STACKS)
def test_stacks_move_only_between_devices_sharing_a_shard(name, capfd):
    sizes, types, lead, spec, eighths = STACKS[name]
    mesh = jax.make_mesh(sizes, ("x", "y")[: len(sizes)], types)
    tx, heights = muon_of(lead), {f"{k}{i}": k for k in (1, 4) for i in range(1 if lead else 8)}
    params = drawn(0, {name: (*lead, k * WIDTH, WIDTH) for name, k in heights.items()})
    wanted = jax.jit(step_of(tx))(params, tx.init(params), params)[0]
    program, given = compiled(tx, params, params, mesh, PartitionSpec(*spec))
    size = sum(x.nbytes for x in params.values())
    text = program.as_text() or ""
    assert sum(collectives(text).values()) <= 1.01 * eighths / 8 * size
    assert "ENTRY" in text
    assert "all-gather" not in text
    assert "rematerialization" not in capfd.readouterr().err
    assert_close(program(*given)[0], wanted)


# Bytes that a device of (data, fsdp) handles, relative to its half of the parameters: each argument
# goes to its owner, the result returns, and is copied along the data axis. Of a table only lengths
# of rows move, summed over devices.
ROWS, COLUMNS = ("fsdp",), (None, "fsdp")
ON_TWO_AXES = {
    "muon": (optim.muon(0.02, Euclidean(RMSToRMS())), {ROWS: 3, COLUMNS: 3}),
    "muonh": (optim.muonh(0.02, Hypersphere(ndim=2)), {ROWS: 3, COLUMNS: 3}),
    "manifold_muon": (optim.manifold_muon(0.02, Stiefel()), {ROWS: 4, COLUMNS: 4}),
    "tables": (
        optim.manifold_muon(0.02, EmbeddingRows()),
        {ROWS: 2 / WIDTH, COLUMNS: 2 * 24 / WIDTH},
    ),
}


@pytest.mark.parametrize("spec", [ROWS, COLUMNS], ids=str)
@pytest.mark.parametrize("name", ON_TWO_AXES)
def test_leaves_divided_by_one_of_two_axes_are_not_gathered(name, spec, capfd):
    tx, halves = ON_TWO_AXES[name]
    mesh = jax.make_mesh((2, 2), ("data", "fsdp"), (AUTO, AUTO), devices=jax.devices()[:4])
    params, grads = (tree(seed, 4, names=("q",)) for seed in (0, 1))
    if name == "tables":
        params = optim.project_tree(EmbeddingRows(), params)
    program, given = compiled(tx, params, grads, mesh, PartitionSpec(*spec))
    assert "rematerialization" not in capfd.readouterr().err
    half, scalars = sum(x.nbytes for x in params.values()) / 2, 200 * (name != "tables")
    moved = sum(collectives(program.as_text() or "").values())
    assert moved <= halves[spec] * half + scalars
    assert_close(program(*given)[0], jax.jit(step_of(tx))(params, tx.init(params), grads)[0])


@pytest.mark.parametrize(
    ("lead", "spec", "eighths"), [((), ("y", "x"), 2), ((2, 4), ("y", "x"), 0)]
)
def test_explicit_axes_can_wrap_only_the_update(lead, spec, eighths, capfd):
    """As in `docs/scale.md`: only the update sees explicit axes."""
    mesh, tx = jax.make_mesh((4, 2), ("x", "y"), (AUTO, AUTO)), muon_of(lead)
    weights = drawn(0, {f"w{i}": (*lead, 64, 32) for i in range(1 if lead else 8)})
    params = jax.device_put(weights, NamedSharding(mesh, PartitionSpec(*spec)))

    @jax.jit
    def step(params, state):
        updates, state = update(params, state, params)
        return optax.apply_updates(params, updates), state

    with jax.set_mesh(mesh):
        state = tx.init(params)
        specs, own = jax.tree.map(
            lambda x: getattr(x.sharding, "spec", PartitionSpec()), (params, state)
        )
        update: Any = jax.sharding.explicit_axes(
            tx.update, axes=mesh.axis_names, in_sharding=(specs, own, specs)
        )
        program = step.lower(params, state).compile()
    text, size = program.as_text() or "", sum(x.nbytes for x in weights.values())
    assert sum(collectives(text).values()) <= 1.01 * eighths / 8 * size
    assert "ENTRY" in text
    assert "rematerialization" not in capfd.readouterr().err
    wanted = jax.jit(step_of(tx))(weights, tx.init(weights), weights)[0]
    assert_close(program(params, state)[0], wanted)


def test_unset_mesh_warns_once():
    mesh = jax.make_mesh((8,), ("x",), (AUTO,))
    params = jax.device_put(tree(0, 1), NamedSharding(mesh, PartitionSpec("x")))
    tx = OPTIMIZERS["manifold_muon"]
    with pytest.warns(UserWarning, match=r"within jax.set_mesh\(mesh\)") as found:
        tx.init(params)
    assert len(found) == 1
    with warnings.catch_warnings(action="error"):
        with jax.set_mesh(mesh):
            tx.init(params)
        tx.init(jax.device_put(params, NamedSharding(mesh, PartitionSpec())))


# Shapes of GPT-2's matrices, divided by 3: large enough to be solved singly.
GPT2 = ((768, 256), (256, 256), (1024, 256), (256, 1024))


def cost(m: int, n: int) -> int:
    """Count operations of `muon`: a Gram matrix, four quintic steps, a product."""
    return 2 * m * n * min(m, n) + 12 * min(m, n) ** 3


def solved(solve: Any, manifold: Any, params: Any) -> Any:
    """Apply `solve` to every leaf by its owner alone."""
    program = jax.jit(lambda x: optim.map_leaves(solve, manifold, x, x, divide=True))
    results = program(params)
    jax.effects_barrier()
    return results


@pytest.mark.parametrize(("layers", "spec"), [(3, "columns"), (9, "replicated"), (12, "rows")])
def test_work_is_balanced_over_all_shapes(layers, spec, mesh):
    """Devices solve their own matrices and no padding; counts per shape differ by at most 1."""
    params, calls = drawn(0, {f"{s}{i}": s for s in GPT2 for i in range(layers)}), []
    params = jax.device_put(params, NamedSharding(mesh, SPECS[spec]))

    def solve(manifold, point, update):
        device = jax.lax.axis_index("x")
        jax.debug.callback(lambda i: calls.append((int(i), *point.shape)), device)
        return 2 * update, jnp.full(len(point), device)

    with jax.set_mesh(mesh):
        found, owner = solved(solve, Euclidean(RMSToRMS()), params)
    assert_close(found, jax.tree.map(lambda x: 2 * x, params))
    owned = [(int(owner[f"{s}{i}"]), 1, *s) for s in GPT2 for i in range(layers)]
    assert sorted(calls) == sorted(owned)
    counts = np.array([[sum(x == (d, 1, *s) for x in owned) for s in GPT2] for d in range(8)])
    assert (np.ptp(counts, axis=0) <= 1).all()
    work = counts @ np.array([cost(*s) for s in GPT2])
    # The best ratio for twelve matrices on eight devices is 1.33.
    assert work.max() / work.mean() <= {3: 1.41, 9: 1.15, 12: 1.02}[layers]


@pytest.mark.parametrize(
    ("lead", "specs", "evenness"),
    [
        ((3,), [(None, "x"), (None, None, "y"), (None, "x", "y"), (None, "y", "x")], 1.41),
        ((12,), [("x",), ("x", None, "y"), ("y",), ("y", None, "x")], 1.02),
    ],
    ids=["few", "experts"],
)
def test_work_is_balanced_over_different_shardings(lead, specs, evenness):
    """Even though each sharding numbers the devices in a different order."""
    mesh, work = jax.make_mesh((4, 2), ("x", "y"), (EXPLICIT, EXPLICIT)), np.zeros(8)
    params = {
        f"{i}": jax.device_put(jnp.ones((*lead, *s)), NamedSharding(mesh, PartitionSpec(*spec)))
        for i, (s, spec) in enumerate(zip(GPT2, specs, strict=True))
    }

    def solve(manifold, point, update):
        count, m, n = point.shape

        def tell(device):
            work[int(device)] += count * cost(m, n)

        jax.debug.callback(tell, jax.lax.axis_index(("x", "y")))
        return 2 * update

    with jax.set_mesh(mesh):
        found, _ = solved(solve, Euclidean(RMSToRMS()), params)
    assert_close(found, jax.tree.map(lambda x: 2 * x, params))
    assert work.min() > 0
    assert work.max() / work.mean() <= evenness


def test_padding_is_never_far_from_manifold(mesh):
    """Zeros are far from the manifold: padding with zeros doubled the time."""
    params, far = tree(0, 9, names=FEWER), []

    def solve(manifold, point, update):
        jax.debug.callback(lambda x: far.append(float(x)), jnp.max(manifold.distance(point)))
        return update

    with jax.set_mesh(mesh):
        found, _ = solved(solve, Stiefel(), params)
    assert_close(found, params)
    assert len(far) == 16
    assert max(far) < 1e-5


def test_exchanges_do_not_split_the_work(mesh):
    """Each exchange waits for the slowest device, so all work runs between the exchanges."""
    params = {f"{s}{i}": jnp.ones(s) for s in GPT2 for i in range(12)}
    text = compiled(OPTIMIZERS["muon"], params, params, mesh, SPECS["rows"])[0].as_text() or ""
    entry = text[text.index("ENTRY") :]
    found = re.findall(r" (all-to-all|while)\(", entry)
    assert found == 4 * ["all-to-all"] + 4 * ["while"] + 4 * ["all-to-all"]


def test_divided_work_supports_grad_and_vmap(mesh):
    """Through the conditionals and barriers that balance the remainders of each shape."""
    tx = OPTIMIZERS["muon"]
    params = drawn(0, {f"{s}{i}": s for s in GPT2[:2] for i in range(3)})

    def total(scale, params):
        grads = jax.tree.map(lambda x: x + scale * x**2, params)
        updates, _ = tx.update(grads, tx.init(params), params)
        return sum(jnp.vdot(x, jnp.sin(y)) for x, y in zip(jax.tree.leaves(updates),
                   jax.tree.leaves(params), strict=True))  # fmt: skip

    function = jax.jit(jax.vmap(jax.value_and_grad(total), (0, None)))
    scales = jnp.array([0.1, 0.2])
    wanted = function(scales, params)
    jax.clear_caches()
    with jax.set_mesh(mesh):
        found = function(scales, params)
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4)


def test_scan_stacked_layers_on_two_axes():
    mesh = jax.make_mesh((4, 2), ("data", "model"), (AxisType.Auto, AxisType.Auto))
    params, grads, tx = tree(0, stacked=True), tree(1, stacked=True), STACKED
    spec = PartitionSpec(None, "data", "model")
    program, given = compiled(tx, params, grads, mesh, spec)
    wanted, plain, work = alone("manifold_muon", stacked=True)
    assert flops(program) < 1.15 * work / 8
    found, state = program(*given)
    assert_close(found, wanted)
    found, wanted = optim.monitor(state), optim.monitor(plain)
    close = rounding(4, 4 * WIDTH**2)  # two sums over a matrix in each of the two programs
    for name in params:
        np.testing.assert_allclose(found["gap"][name], wanted["gap"][name], atol=close)


def test_products_of_huge_matrices_are_divided(mesh):
    """One matrix of 2^30 entries on eight devices: compiled, not run."""
    tx, rows = OPTIMIZERS["muon"], NamedSharding(mesh, SPECS["rows"])

    def work(sharding):
        huge = jax.ShapeDtypeStruct((2**15, 2**15), jnp.float32, sharding=sharding)
        state = jax.eval_shape(tx.init, huge)
        return flops(jax.jit(step_of(tx)).lower(huge, state, huge).compile())

    alone = work(None)
    with jax.set_mesh(mesh):
        assert work(rows) < 1.15 * alone / 8


def test_no_shard_map_without_mesh():
    params, tx = tree(0), OPTIMIZERS["muon"]
    lowered = jax.jit(step_of(tx)).lower(params, tx.init(params), params).as_text()
    assert "manual_computation" not in lowered
    assert "shmap" not in lowered
