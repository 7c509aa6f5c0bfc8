"""Checkpoints resume bit for bit; damaged steps and other geometries raise errors."""

import asyncio
import dataclasses
import functools
import math
import resource
import shutil
import threading
from pathlib import Path
from typing import Any

import equinox as eqx
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.traverse_util import flatten_dict
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import config

from manifoldmuon import optim
from manifoldmuon._internal.trees.paths import path_string
from manifoldmuon.checkpoints import STATE_LAYOUT, CheckpointError, Checkpoints
from manifoldmuon.manifolds import Euclidean, Hypersphere, Stiefel
from manifoldmuon.manifolds.solvers import DualAscent, ProjectedPolar
from manifoldmuon.norms import Frobenius
from tests.optim.test_processes import JOINED
from tests.optim.test_processes import run as run_processes

pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.usefixtures("no_futures_left"),
]

GEOMETRY = {"w": Stiefel(solver=DualAscent(steps=2)), "b": Euclidean()}
SPHERES = {"w": Hypersphere(ndim=2), "b": Euclidean()}
SOLVERS = "manifoldmuon.manifolds.solvers"
EXTRA = {"epoch": 2, "loss": 0.1, "worst": float("inf")}
OURS, THEIRS = {"w": jnp.ones(3)}, {"w": jnp.zeros(3)}
TRANSFORMATIONS = {
    "manifold_muon": optim.manifold_muon(0.1, GEOMETRY),
    "hyperball": optim.hyperball(optax.scale_by_adam(), 0.1, SPHERES),
}


def start(tx):
    """Return initial parameters, state and random key."""
    params = {"w": jnp.eye(16, 8), "b": jnp.zeros(16)}
    return {"params": params, "state": tx.init(params), "key": jax.random.key(0)}


def trained(tx, tree, steps):
    for _ in range(steps):
        tree = _step(tx, tree)
    return tree


@functools.partial(jax.jit, static_argnums=0)
def _step(tx, tree):
    key, *draws = jax.random.split(tree["key"], 3)
    params, state = tree["params"], tree["state"]
    grads = {k: jax.random.normal(d, params[k].shape) for k, d in zip("wb", draws, strict=True)}
    updates, state = tx.update(grads, state, params)
    return {"params": optax.apply_updates(params, updates), "state": state, "key": key}


def bits(tree):
    """Return dtype, shape and bytes of every leaf, by path."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
    found = {}
    for path, x in pairs:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        found[path_string(path)] = (str(x.dtype), x.shape, np.asarray(x).tobytes())
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a folder with steps 2 and 3, the transformation, its table, and the tree of step 3."""
    folder = tmp_path_factory.mktemp("run")
    tx = TRANSFORMATIONS["manifold_muon"]
    table = optim.tabulate(GEOMETRY, start(tx)["params"])
    with Checkpoints(folder) as saved:
        tree = trained(tx, start(tx), 2)
        assert saved.save(2, tree, table)
        tree = trained(tx, tree, 1)
        assert saved.save(3, tree, table, EXTRA)
    return folder, tx, table, tree


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run[0], tmp_path / "copy")


def restored(saved, *arguments, **options):
    found = saved.restore(*arguments, **options)
    assert found is not None
    return found


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refusal(folder, target, table=None, step=None):
    """Return the one-line error of a restore; assert that it changes no file."""
    before = contents(folder)
    with Checkpoints(folder) as saved, pytest.raises(CheckpointError) as error:
        saved.restore(target, table, step)
    assert contents(folder) == before
    line = str(error.value)
    assert "\n" not in line
    assert str(folder) in line
    return line


@pytest.mark.slow_except("hyperball")
@pytest.mark.parametrize("tx", TRANSFORMATIONS.values(), ids=list(TRANSFORMATIONS))
def test_training_resumes_bit_for_bit(tx, tmp_path):
    tree = trained(tx, start(tx), 2)
    with Checkpoints(tmp_path) as saved:
        saved.save(2, tree)
        found = restored(saved, start(tx))
    assert bits(found.tree) == bits(tree)
    assert bits(trained(tx, found.tree, 2)) == bits(trained(tx, start(tx), 4))
    encoded = flax.serialization.to_bytes(tree["state"])
    decoded = flax.serialization.from_bytes(start(tx)["state"], encoded)
    assert bits(decoded) == bits(tree["state"])
    assert jax.tree.structure(decoded) == jax.tree.structure(tree["state"])


def test_restore_returns_newest_step_and_extra(run):
    folder, tx, table, tree = run
    with Checkpoints(folder) as saved:
        found = restored(saved, jax.eval_shape(lambda: start(tx)), table)
        assert (found.step, found.extra) == (3, EXTRA)
        assert bits(found.tree) == bits(tree)
        assert jax.tree.structure(found.tree) == jax.tree.structure(tree)
        assert saved.read_extra() == EXTRA
        older = restored(saved, start(tx), table, step=2)
        assert (older.step, older.extra) == (2, None)


def test_all_leaf_types_round_trip(tmp_path):
    x = jnp.array([0.0, -0.0, jnp.nan, 1e-40])
    tree = {
        **{str(dtype): x.astype(dtype) for dtype in ("float16", "bfloat16", "float32", "bool")},
        "int8": jnp.arange(-3, 3, dtype=jnp.int8),
        "int4": jnp.arange(-8, 8).astype(jnp.int4),
        "int4 on the host": np.arange(-8, 8).astype(jnp.int4),
        "complex64": jnp.array([1 + 2j, 3j]),
        "empty": jnp.zeros((0, 3)),
        "empty on the host": np.zeros((0, 2)),
        "legacy key": jax.random.PRNGKey(1),
        "host": np.linspace(0, 1, 5),  # float64, without x64 in JAX
        "scalar": np.float64(0.1),
        "number": 7,
    }
    with Checkpoints(tmp_path) as saved:
        saved.save(0, tree)
        found = restored(saved, tree).tree
    assert found.pop("number") == tree.pop("number")
    assert bits(found) == bits(tree)
    assert {k: type(x) for k, x in found.items()} == {k: type(x) for k, x in tree.items()}


UNSUPPORTED: list[tuple[Any, Any, str]] = [
    ({"name": "run 1"}, None, "'name' must be an array of numbers or a number; got a str: save"),
    ({"w": np.array(["a"])}, None, "'w' must be an array of numbers or a number; got a ndarray"),
    ({"a": {"b": 1}, "a/b": 1}, None, "paths that read the same: rename a key"),
    (OURS, {"loss": np.float32(3)}, "extra must be JSON .* float32 is not .*; write float"),
    (OURS, {(1, 2): 3}, "extra must be JSON .* keys must be str, .* not tuple; write"),
]


@pytest.mark.parametrize(("tree", "extra", "message"), UNSUPPORTED)
def test_unsupported_trees_raise(tree, extra, message, tmp_path):
    with Checkpoints(tmp_path / "new" / "folder") as saved:
        with pytest.raises((TypeError, ValueError), match=message):
            saved.save(1, tree, extra=extra)
        assert saved.restore(OURS) is None


@pytest.mark.parametrize("step", [2.0, np.float32(4), True, -1, "5", None])
def test_steps_that_are_no_numbers_raise(step, tmp_path, monkeypatch):
    """Orbax writes them into folders that it does not find again."""
    monkeypatch.setattr(config, "jaxtyping_disable", True)
    with Checkpoints(tmp_path) as saved:
        with pytest.raises(ValueError, match=r"^step must be a whole number in \[0, inf\); got "):
            saved.save(step, OURS)
        assert saved.restore(OURS) is None


@pytest.mark.parametrize("step", [0, np.int64(3), 2**40])
def test_steps_are_whole_numbers_of_any_type(step, tmp_path):
    with Checkpoints(tmp_path) as saved:
        saved.save(step, OURS)
        saved.save(jnp.int32(2**31 - 1) if step < 2**31 else step + 1, OURS)
    with Checkpoints(tmp_path) as saved:
        assert restored(saved, OURS, step=step).step == step
        assert restored(saved, OURS).step == max(2**31 - 1, int(step) + 1)


@pytest.mark.slow
def test_sharded_training_resumes_bit_for_bit(tmp_path):
    mesh = jax.make_mesh((4, 2), ("x", "y"), (AxisType.Explicit, AxisType.Auto))
    both, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("x", "y"), ()))
    tx = optim.manifold_muon(0.1, {"w": Hypersphere(8**0.5, ndim=2), "b": Euclidean()})
    begin = start(tx)
    params = jax.tree.map(jax.device_put, begin["params"], {"w": both, "b": whole})
    begin |= {"params": params, "state": tx.init(params)}
    tree = trained(tx, begin, 2)
    with Checkpoints(tmp_path) as saved:
        saved.save(2, tree)
        found = restored(saved, tree).tree
        # Fresh as in a new process: the key is on a single device and may move to the mesh.
        fresh = restored(saved, begin).tree
        alone = restored(saved, start(tx)).tree
    assert jax.tree.map(lambda x: x.sharding, found) == jax.tree.map(lambda x: x.sharding, tree)
    assert fresh["params"]["w"].sharding == both
    assert bits(found) == bits(fresh) == bits(alone) == bits(tree)
    undisturbed = bits(trained(tx, begin, 4))
    assert bits(trained(tx, found, 2)) == undisturbed
    assert bits(trained(tx, fresh, 2)) == undisturbed
    assert len(alone["params"]["w"].devices()) == 1


def test_scalars_on_explicit_mesh_round_trip(tmp_path):
    """JAX gives a random key on a mesh of one device the sharding of its data, `P(None,)`."""
    with jax.set_mesh(jax.make_mesh((1,), ("x",), (AxisType.Explicit,))):
        tree = {"key": jax.random.key(0), "count": jnp.zeros((), jnp.int32)}
        with Checkpoints(tmp_path) as saved:
            saved.save(1, tree)
            found = restored(saved, tree).tree
    assert bits(found) == bits(tree)


SHARED = (
    JOINED
    + """
import fcntl
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from manifoldmuon.checkpoints import CheckpointError, Checkpoints

mesh = jax.make_mesh((4,), ("x",), (AxisType.Auto,))
rows = NamedSharding(mesh, PartitionSpec("x"))
whole = np.arange(32, dtype=np.float32).reshape(8, 4)
x = jax.make_array_from_callback(whole.shape, rows, lambda index: whole[index])
with (jax.set_mesh(mesh), Checkpoints(sys.argv[4]) as saved,
      open(sys.argv[4] + "/.lock", "w") as lock):
    if rank == 0:
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        saved.save(2, {"x": x})
    except CheckpointError as error:
        refused = "another process is saving" in str(error)
    lock.close()
    saved.save(2, {"x": x})
    shards = saved.restore({"x": jnp.zeros_like(x)}).tree["x"].addressable_shards
same = all(np.array_equal(shard.data, whole[shard.index]) for shard in shards)
json.dump({"same": same, "shards": len(shards), "refused": refused}, sys.stdout)
"""
)


@pytest.mark.slow
def test_two_jax_processes_save_together(tmp_path):
    found = run_processes(2, SHARED, str(tmp_path))
    assert found == [{"same": True, "shards": 2, "refused": True}] * 2
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "2"}


APART = (
    JOINED
    + """
from manifoldmuon.checkpoints import CheckpointError, Checkpoints

def refusal(step):
    try:
        saved.save(step, {"x": np.ones(3)})
    except CheckpointError as error:
        return str(error)

saved = Checkpoints(sys.argv[4])
refusals = [refusal(2 + rank)]
if rank == 0:
    refusals.append(refusal(4))  # the other process has gone
print(json.dumps(refusals), flush=True)
os._exit(0)  # without waiting for each other
"""
)


@pytest.mark.slow
def test_processes_that_save_apart_raise(tmp_path):
    (apart, alone), (other,) = run_processes(2, APART, str(tmp_path))
    for line in (apart, alone, other):
        assert line.startswith("every process of the job has to call save, with the same step; got")
    assert {path.name for path in tmp_path.iterdir()} == {".lock"}


def damage(folder, step, how):
    """Damage the largest array file of a step."""
    files = [path for path in (folder / str(step) / "tree").rglob("*") if path.is_file()]
    file = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    if how == "flipped":
        content[len(content) // 2] ^= 1
    file.write_bytes(content[: len(content) // 2] if how == "truncated" else content)


@pytest.mark.parametrize("how", ["flipped", "truncated"])
def test_damage_names_older_step(how, run, copy):
    _, tx, table, _ = run
    damage(copy, 3, how)
    line = refusal(copy, start(tx), table)
    assert line.startswith(f"step 3 in {copy} is damaged: ")
    assert line.endswith("; move it away to resume from step 2")
    shutil.move(copy / "3", copy.parent / "3")
    with Checkpoints(copy) as saved:
        assert restored(saved, start(tx), table).step == 2
    damage(copy, 2, how)
    assert refusal(copy, start(tx)).endswith("; begin again")


@pytest.mark.slow_except("part")
@pytest.mark.parametrize(
    ("bits_per_file", "partial"), [(3, False), (1, True)], ids=["whole", "part"]
)
def test_flipped_bits_never_restore_wrong_arrays(bits_per_file, partial, run, copy):
    _, tx, _, tree = run
    tree, target = ({"params": x["params"]} if partial else x for x in (tree, start(tx)))
    outcomes = set()
    with Checkpoints(copy) as saved:
        for file, content in contents(copy / "3").items():
            for part in range(1, bits_per_file + 1):
                flipped = bytearray(content)
                flipped[part * len(content) // (bits_per_file + 1)] ^= 16
                file.write_bytes(flipped)
                try:
                    found = restored(saved, target, step=3, partial=partial)
                    assert (bits(found.tree), found.extra) == (bits(tree), EXTRA), file
                    outcomes.add("right")
                except CheckpointError:
                    outcomes.add("refused")
            file.write_bytes(content)
    assert outcomes == {"right", "refused"}


def test_files_of_another_step_raise(tmp_path):
    with Checkpoints(tmp_path) as saved:
        for step, value in enumerate([0.0, -0.0]):
            saved.save(step, {"w": jnp.full(3, value)})
    shutil.rmtree(tmp_path / "1" / "tree")
    shutil.copytree(tmp_path / "0" / "tree", tmp_path / "1" / "tree")
    assert "is damaged: 'w' is not the array that was saved; " in refusal(tmp_path, OURS)


@pytest.mark.parametrize(
    ("geometry", "reason"),
    [
        ({"w": Stiefel(solver=ProjectedPolar())}, f"manifold.solver of 'w' was {SOLVERS}.DualAsc"),
        ({"w": Stiefel(solver=DualAscent(steps=3))}, "manifold.solver.steps of 'w' was 2 and is 3"),
        (
            {"b": Euclidean(Frobenius(ndim=1, scale=math.nextafter(1.0, 2.0)))},
            "manifold.step_norm.scale of 'b' was 1.0 and is 1.0000000000000002; ",
        ),
        (
            {"w": GEOMETRY["w"].with_axes(-2, -1)},
            "layout of 'w' was None and is manifoldmuon.manifolds.Layout, ",
        ),
        ({"c": Euclidean()}, "manifold of 'c' was nothing and is manifold"),
        ({"b": None}, "manifold of 'b' was manifoldmuon.manifolds.Euclidean and is None, "),
        ({}, "budget of 'w' was 1.0 and is 0.5; continue with that"),
    ],
)
def test_changed_geometry_raises(geometry, reason, run):
    folder, tx, _, tree = run
    budgets = 1.0 if geometry else {"w": 0.5, "b": 1.0}
    geometry = GEOMETRY | geometry
    params = {k: tree["params"].get(k, jnp.ones(3)) for k in geometry}
    line = refusal(folder, start(tx), optim.tabulate(geometry, params, budgets))
    assert line.startswith(f"step 3 in {folder} was saved with another geometry: the {reason}")
    assert line.endswith("or restore without a table if the change is meant")


SAME = [
    (Stiefel(), Stiefel().stacked()),
    (Stiefel().stacked(), Stiefel()),
    (Stiefel().with_axes(), Stiefel().stacked()),
    (Stiefel().transposed(), Stiefel().transposed().stacked()),
]


@pytest.mark.parametrize(("before", "after"), SAME)
def test_declared_copies_are_the_same_geometry(before, after, tmp_path):
    tree = {"w": jnp.zeros((1, 4, 2))}
    with Checkpoints(tmp_path) as saved:
        saved.save(1, tree, optim.tabulate(before, tree))
        assert restored(saved, tree, optim.tabulate(after, tree)).step == 1


def own_set(name, **fields):
    """Return a user's manifold class with these fields and defaults."""
    given = [(field, Any, value) for field, value in fields.items()]
    names = {"__module__": "own.sets"}
    return dataclasses.make_dataclass(name, given, bases=(Euclidean,), namespace=names, frozen=True)


def test_changed_default_raises(tmp_path):
    with Checkpoints(tmp_path) as saved:
        saved.save(1, OURS, optim.tabulate(own_set("Ball", radius=1.0)(), OURS))
    table = optim.tabulate(own_set("Ball", radius=2.0)(), OURS)
    assert "the manifold.radius of 'w' was 1.0 and is 2.0; " in refusal(tmp_path, OURS, table)


def test_fields_that_cannot_be_recorded_raise(tmp_path):
    with Checkpoints(tmp_path) as saved:
        for held in (lambda x: x, object(), functools.partial(jnp.sum)):
            table = optim.tabulate(own_set("Ball", map=held)(), OURS)
            with pytest.raises(TypeError, match="'w': manifold.map is .* which no record can hold"):
                saved.save(1, OURS, table)
        fields = {"map": jnp.sum, "dtype": jnp.bfloat16, "narrow": np.dtype("int8"), "kind": Path}
        table = optim.tabulate(own_set("Ball", **fields)(), OURS)
        saved.save(1, OURS, table)
        assert restored(saved, OURS, table).step == 1


def test_missing_geometry_or_step_raises(run, tmp_path):
    folder, tx, table, tree = run
    with Checkpoints(tmp_path) as saved:
        saved.save(1, tree)
    assert "has no geometry: restore without a table" in refusal(tmp_path, start(tx), table)
    assert refusal(folder, start(tx), step=7).endswith(" holds no step 7; its steps are [2, 3]")


def test_changed_state_layout_raises(run, monkeypatch):
    folder, tx, table, _ = run
    monkeypatch.setattr("manifoldmuon.checkpoints.STATE_LAYOUT", STATE_LAYOUT + 1)
    line = refusal(folder, start(tx), table)
    assert f"has the state layout {STATE_LAYOUT} of manifoldmuon" in line
    assert "continue with that version, or restore the parameters alone, as the page" in line


def with_joined_keys(states):
    """Return states whose fields are dictionaries by `layers/0/w`, as in layout 4."""
    return type(states)(*[flatten_dict(field, sep="/") for field in states])


@pytest.mark.slow
def test_states_with_joined_keys_resume_bit_for_bit(tmp_path, monkeypatch):
    geometry = {"layers": [Stiefel(solver=DualAscent(steps=2))] * 2, "a": {"b": Euclidean()}}
    tx = optim.manifold_muon(0.1, geometry)
    params = {"layers": [jnp.eye(8, 4), jnp.eye(4)], "a": {"b": jnp.ones(3)}}
    grads = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size)).reshape(x.shape), params)
    state: Any = tx.update(grads, tx.init(params), params)[1]
    trace, steps = state
    old = trace, steps._replace(steepest=with_joined_keys(steps.steepest))
    assert old[1].steepest.gap.keys() == {"layers/0", "layers/1", "a/b"}
    monkeypatch.setattr("manifoldmuon.checkpoints.STATE_LAYOUT", 4)
    with Checkpoints(tmp_path) as saved:
        saved.save(1, {"params": params, "state": old})
    monkeypatch.undo()
    with Checkpoints(tmp_path) as saved:
        found = restored(saved, {"params": params, "state": tx.init(params)}).tree["state"]
    assert jax.tree.structure(found) == jax.tree.structure(state)
    assert bits(found) == bits(state)

    # The changelog's lines, for other libraries.
    def key(path):
        return jax.tree_util.keystr(path, simple=True, separator="/").replace("|", "/")

    read = flax.serialization.msgpack_restore(flax.serialization.to_bytes(old))
    values = {key(path): x for path, x in jax.tree_util.tree_leaves_with_path(read)}
    new = jax.tree_util.tree_map_with_path(lambda path, _: values[key(path)], tx.init(params))
    assert bits(new) == bits(state)
    with pytest.raises(ValueError, match="no entries for .*older version .* changelog"):
        tx.update(grads, old, params)


def test_changed_tree_raises(run):
    folder, _, table, tree = run
    for target, reason in [
        (start(optax.sgd(0.1)), "'state/0/trace/b' was float32[16] and is nothing"),
        (tree | {"key": jax.random.PRNGKey(0)}, "'key' was key<fry>[] and is uint32[2]"),
        ({"params": tree["params"]}, "'key' was key<fry>[] and is nothing"),
    ]:
        line = refusal(folder, target, table)
        assert line.startswith(f"step 3 in {folder} has another tree: {reason}")


PARTS = {
    "framework": eqx.filter(
        eqx.nn.Linear(3, 2, False, key=jax.random.key(1)), eqx.is_inexact_array
    ),
    "sequences": [(jnp.ones(2, jnp.bfloat16), None), {"empty": jnp.zeros((0, 3)), "no": ()}],
    "key": jax.random.key(3),
}


@pytest.mark.parametrize("part", PARTS.values(), ids=list(PARTS))
def test_partial_restore_returns_target_bit_for_bit(part, tmp_path):
    with Checkpoints(tmp_path) as saved:
        saved.save(1, {"part": part, "state": optax.adam(0.1).init(OURS)})
    with Checkpoints(tmp_path) as saved:
        found = saved.restore(jax.eval_shape(lambda: {"part": part}), partial=True)
    assert found is not None
    assert bits(found.tree) == bits({"part": part})
    assert jax.tree.structure(found.tree) == jax.tree.structure({"part": part})


def test_partial_restore_checks_geometry_and_its_own_leaves(run):
    folder, _, _, tree = run
    with Checkpoints(folder) as saved:
        for names in ("wb", "w"):
            part = {name: tree["params"][name] for name in names}
            table, other = (
                optim.tabulate({name: geometry[name] for name in names}, part)
                for geometry in (GEOMETRY, SPHERES)
            )
            found = restored(saved, {"params": part}, table, partial=True)
            assert (found.step, found.extra) == (3, EXTRA)
            assert bits(found.tree) == bits({"params": part})
            with pytest.raises(CheckpointError, match="another geometry"):
                saved.restore({"params": part}, other, partial=True)
        wrong = {"params": {"w": jnp.eye(16, 8), "c": jnp.zeros(16)}}
        with pytest.raises(CheckpointError, match="'params/c' was nothing and is .* optimizer$"):
            saved.restore(wrong, partial=True)


def test_saved_steps_are_never_overwritten(run, copy):
    with Checkpoints(copy) as saved:
        for step in (1, 2, 3):
            with pytest.raises(CheckpointError, match=f"step {step} is not newer than step 3"):
                saved.save(step, run[3])
        assert restored(saved, start(run[1])).step == 3


@pytest.mark.parametrize(
    "options",
    [
        {"best_fn": len, "max_to_keep": 1, "keep_checkpoints_without_metrics": False},
        {"preservation_policy": ocp.checkpoint_managers.BestN(get_metric_fn=len, n=1)},
    ],
    ids=["best_fn", "BestN"],
)
def test_options_that_need_metrics_raise(options, tmp_path):
    """Orbax keeps no step, or every step, and `save` returns True."""
    with pytest.raises(ValueError, match=r"^options: .* choose by metrics.* use max_to_keep"):
        Checkpoints(tmp_path, ocp.CheckpointManagerOptions(**options))


UNFINISHED = "1.orbax-checkpoint-tmp"


@pytest.fixture
def writer(tmp_path):
    """Yield a `Checkpoints` whose save of step 1 blocks until the event is set, and the event."""
    written, event = threading.Event(), threading.Event()

    class Waiting(ocp.path.atomicity.AtomicRenameTemporaryPath):
        async def finalize(self):
            written.set()
            await asyncio.to_thread(event.wait)
            await super().finalize()

    options = ocp.CheckpointManagerOptions(temporary_path_class=Waiting)
    writer = Checkpoints(tmp_path, options)
    assert writer.save(1, OURS)
    assert written.wait(60)
    assert (tmp_path / UNFINISHED).is_dir()
    yield writer, event
    event.set()


def test_saving_after_close_raises(tmp_path):
    """Orbax returns True and fails in the background."""
    with Checkpoints(tmp_path) as saved:
        assert saved.save(1, {"a": jnp.ones(1)})
    with pytest.raises(CheckpointError, match="was closed: open another Checkpoints"):
        saved.save(2, {"a": jnp.ones(1)})


def test_deleted_folder_is_made_again(tmp_path):
    with Checkpoints(tmp_path / "run") as saved:
        shutil.rmtree(tmp_path / "run")
        assert saved.save(1, OURS)
        assert bits(restored(saved, OURS).tree) == bits(OURS)


def test_opening_keeps_running_saves_of_others(writer, tmp_path):
    writer, event = writer
    with Checkpoints(tmp_path) as reader:
        assert reader.restore(OURS) is None
        reader.manager._maybe_await_cleanup_tmp_directory()
        assert (tmp_path / UNFINISHED).is_dir()
        event.set()
        writer.close()
        assert bits(restored(reader, OURS).tree) == bits(OURS)


def test_second_process_cannot_save(writer, tmp_path):
    writer, event = writer
    with Checkpoints(tmp_path) as second:
        for step in (1, 2):
            with pytest.raises(CheckpointError, match="another process is saving into "):
                second.save(step, THEIRS)
        event.set()
        writer.close()
        with pytest.raises(CheckpointError, match="step 1 is not newer than step 1"):
            second.save(1, THEIRS)
        assert bits(restored(second, OURS).tree) == bits(OURS)
        assert second.save(2, THEIRS)


def test_unfinished_step_is_saved_again(tmp_path):
    (tmp_path / UNFINISHED).mkdir()
    with Checkpoints(tmp_path) as saved:
        assert saved.restore(OURS) is None
        assert saved.save(1, OURS)
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "1"}


@pytest.mark.parametrize("background", [False, True])
def test_full_disk_raises_and_keeps_steps(background, tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    tree = {"w": jax.random.normal(jax.random.key(0), (256, 256))}
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=background)
    with Checkpoints(tmp_path, options) as saved:
        saved.save(1, tree)
        saved.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
        try:
            with pytest.raises(Exception, match="File too large"):  # noqa: PT012
                saved.save(2, tree)
                saved.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert restored(saved, tree).step == 1
        assert saved.save(2, tree)
    with Checkpoints(tmp_path) as saved:
        assert bits(restored(saved, tree).tree) == bits(tree)


def test_orbax_alone_restores_a_step(run):
    folder, tx, _, tree = run
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, start(tx))
    with ocp.CheckpointManager(folder) as manager:
        items = ocp.args.Composite(
            tree=ocp.args.StandardRestore(target), record=ocp.args.JsonRestore()
        )
        found = manager.restore(3, args=items)
    assert bits(found["tree"]) == bits(tree)
    assert found["record"]["arrays"]["params/w"] == "float32[16,8]"
    assert found["record"]["geometry"]["the manifold.scale of 'w'"] == 1.0
