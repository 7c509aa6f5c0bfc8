"""Checkpoints that resume bit for bit or are refused; needs Orbax, the extra `checkpoints`."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import errno
import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, UInt32

import manifoldmuon
from manifoldmuon._internal.arguments import check_number, shown
from manifoldmuon._internal.text import missing_extra
from manifoldmuon._internal.trees.paths import path_string
from manifoldmuon.manifolds import Layout
from manifoldmuon.optim import Table

try:
    import orbax.checkpoint as ocp
except ImportError as error:
    raise missing_extra("manifoldmuon.checkpoints", "Orbax", "checkpoints") from error
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

__all__ = ["STATE_LAYOUT", "CheckpointError", "Checkpoints", "Restored", "check_geometry",
           "describe_geometry"]  # fmt: skip

STATE_LAYOUT = 5
"""Version of the record and of the states. Steps of layout 4, whose states are not nested, are
restored by their paths; steps of other layouts are refused."""


class CheckpointError(Exception):
    """Raised, with a one-line message, if a checkpoint is refused."""


class Restored(NamedTuple):
    """A restored step: its number, the tree on the devices of the target, and `extra` or None."""

    step: int
    tree: Any
    extra: Any


class Checkpoints(contextlib.AbstractContextManager[Any]):
    """A folder of checkpoints, each verified against its record when it is restored.

    `orbax.checkpoint.CheckpointManager` writes each step whole or not at all, as the items `tree`
    and `record`. The record is JSON: digest, dtype and shape of every array, the geometry
    (`describe_geometry`), and `STATE_LAYOUT`. Errors of Orbax and of the file system are not
    changed.

    Args:
      directory: folder of a single run, created if missing; a path or a URL such as `gs://...`.
      options: options of Orbax's manager; by default all steps are kept. Steps have no metrics, so
        `best_fn` and `BestN` are refused.

    Attributes:
      manager: Orbax's manager, for its other methods.

    Examples:
      >>> import tempfile
      >>> tree = {"params": {"w": jnp.ones(3)}}
      >>> with Checkpoints(tempfile.mkdtemp()) as checkpoints:
      ...     saved = checkpoints.save(1, tree)
      ...     checkpoints.restore(tree).step
      1
    """

    def __init__(
        self, directory: str | os.PathLike[str], options: ocp.CheckpointManagerOptions | None = None
    ):
        policy = getattr(options, "preservation_policy", None)
        if getattr(options, "best_fn", None) or hasattr(policy, "get_metric_fn"):
            raise ValueError(  # Orbax would keep all steps, or delete all
                "options: best_fn and BestN choose by metrics, which steps do not have; use"
                " max_to_keep, keep_period or keep_time_interval"
            )
        path = os.fspath(directory)
        self._directory = path if "://" in path else os.path.abspath(path)
        handlers = {"tree": ocp.PyTreeCheckpointHandler(), "record": ocp.JsonCheckpointHandler()}
        self.manager = ocp.CheckpointManager(
            self._directory, options=options, item_handlers=handlers
        )
        self._held = contextlib.ExitStack()
        self._locked = self._closed = False

    def save(
        self, step: SupportsIndex, tree: Any, table: Table | None = None, extra: Any | None = None
    ) -> bool:
        """Save a step, whole or not at all, and return whether the options chose it.

        In a job of several processes all of them call it, with the same step. From the first call
        to `close` no other job can save into the folder; others may read.

        Args:
          step: number of the step, 0 or more and larger than all in the folder.
          tree: all that training needs to resume: parameters, state, random keys, in any registered
            pytree of arrays and numbers, with any sharding.
          table: `optim.tabulate` of geometry, parameters and budgets; None without a geometry.
          extra: other data, as JSON, such as the position in the data set.

        Raises:
          CheckpointError: the folder has this step or a later step, another job saves into it, or
            a process of this job does not save, or another step.
          TypeError: a leaf is neither array nor number, `extra` is not JSON, or a field of a
            manifold is not data, such as a lambda.
          ValueError: two leaves have the same path.
        """
        step = _step_number(step)
        self._lock()
        newest = self.manager.latest_step()
        if newest is not None and step <= newest:  # Orbax would skip it without an error
            raise CheckpointError(
                f"step {step} is not newer than step {newest}, the newest in {self._directory}:"
                " restore it and resume from there, or choose another folder"
            )
        if not self.manager.should_save(step):
            return False
        _in_all_processes(multihost_utils.assert_equal, np.asarray(divmod(step, 2**31), np.int32))
        record = {
            "layout": STATE_LAYOUT,
            "version": manifoldmuon.__version__,
            "arrays": _kinds(tree),
            "digests": _digests(tree),
            "geometry": None if table is None else describe_geometry(table),
            "extra": _as_json(extra),
        }
        # Orbax rejects arrays without entries.
        whole = ocp.args.PyTreeSave(jax.tree.map(lambda x: x if np.size(x) else None, tree))
        signed = ocp.args.JsonSave(record | {"sha256": _sha256(record)})
        return self.manager.save(step, args=ocp.args.Composite(tree=whole, record=signed))

    def restore(
        self,
        target: Any,
        table: Table | None = None,
        step: SupportsIndex | None = None,
        *,
        partial: bool = False,
    ) -> Restored | None:
        """Return the newest step, or None from an empty folder; nothing on disk is changed.

        Args:
          target: a tree like the saved tree, of arrays or `jax.ShapeDtypeStruct`. Arrays take the
            sharding of their target; if it has no sharding, or is not committed to its devices,
            they are on the default device, uncommitted, as `jnp.zeros` would be.
          table: `optim.tabulate` of the current geometry; None skips the comparison. With
            `partial` it may leave out parameters, too.
          step: number of the step; None: the newest.
          partial: whether the target may leave out leaves of the saved tree, which are not read:
            `{"params": shapes}` restores the parameters without an optimizer.

        Raises:
          CheckpointError: the folder does not have the step; the step is damaged, or has another
            layout of the state, another geometry, or other paths, shapes or dtypes.
        """
        if (step := self._choose(step)) is None:
            return None
        where, record = f"step {step} in {self._directory}", self._record(step)
        if record["layout"] not in (4, STATE_LAYOUT):
            raise CheckpointError(
                f"{where} has the state layout {record['layout']} of manifoldmuon"
                f" {record['version']}; this is {manifoldmuon.__version__} with layout"
                f" {STATE_LAYOUT}: continue with that version, or restore the parameters alone, as"
                " the page 'Save and resume' shows, and call tx.init again"
            )
        if table is not None:
            if record["geometry"] is None:
                raise CheckpointError(f"{where} has no geometry: restore without a table")
            whole = record["geometry"]
            check_geometry(_within(whole, table) if partial else whole, table, where)
        saved, given = (
            {repr(path): kind for path, kind in kinds.items()}
            for kinds in (record["arrays"], _kinds(target))
        )
        if partial:
            saved = {path: kind for path, kind in saved.items() if path in given}
        hint = "continue with its model and optimizer"
        hint += "" if partial else ", or restore some of its leaves by partial=True"
        _check_equal(f"{where} has another tree", saved, given, hint)
        leaves, map_paths = _leaves(target), jax.tree_util.tree_map_with_path
        tree = self._read(step, "tree", lambda: self.manager.item_metadata(step)["tree"].tree)
        # In the saved containers: their paths, not their types, have to fit the target.
        tree = map_paths(lambda path, _: _restore_target(leaves.get(path_string(path))), tree)
        arguments = ocp.checkpoint_utils.construct_restore_args(tree)
        how = ocp.args.PyTreeRestore(tree, restore_args=arguments)
        leaves = _leaves(self._item(step, "tree", how))
        tree = map_paths(lambda path, x: _as_target(x, leaves.get(path_string(path))), target)
        for path, digest in _digests(tree).items():
            if digest != record["digests"][path]:
                raise self._damaged(step, f"{path!r} is not the array that was saved")
        return Restored(step, tree, record["extra"])

    def read_extra(self, step: SupportsIndex | None = None) -> Any:
        """Return the `extra` of the newest or given step, or None, to build a target from it."""
        step = self._choose(step)
        return None if step is None else self._record(step)["extra"]

    def wait(self) -> None:
        """Wait for a background save, and raise its error if it failed."""
        self.manager.wait_until_finished()

    def close(self) -> None:
        """Wait, and unlock the folder."""
        self._closed = True
        with self._held:
            self.manager.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lock(self) -> None:
        """Lock the folder until `close`: Orbax lets two jobs overwrite each other's steps."""
        if self._closed:
            raise CheckpointError(f"{self._directory} was closed: open another Checkpoints")
        if self._locked:
            return
        free = True
        with contextlib.ExitStack() as held:
            if fcntl is not None and jax.process_index() == 0 and "://" not in self._directory:
                os.makedirs(self._directory, exist_ok=True)
                file = held.enter_context(open(os.path.join(self._directory, ".lock"), "w"))
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:  # others: the file system has no locks
                    free = error.errno != errno.EWOULDBLOCK
            if not _in_all_processes(multihost_utils.broadcast_one_to_all, np.bool_(free)):
                raise CheckpointError(
                    f"another process is saving into {self._directory}: close its Checkpoints, or"
                    " choose another folder"
                )
            self._held, self._locked = held.pop_all(), True
        self.manager.reload()  # Orbax overwrites steps that it has not loaded

    def _choose(self, given: SupportsIndex | None) -> int | None:
        step = None if given is None else _step_number(given)
        self.wait()
        self.manager.reload()
        steps = sorted(self.manager.all_steps())
        if step is not None and step not in steps:
            raise CheckpointError(f"{self._directory} holds no step {step}; its steps are {steps}")
        return max(steps, default=None) if step is None else step

    def _record(self, step: int) -> dict[str, Any]:
        record = self._item(step, "record", ocp.args.JsonRestore())
        if not isinstance(record, dict) or record.pop("sha256", None) != _sha256(record):
            raise self._damaged(step, "the saved record does not match")
        return record

    def _item(self, step: int, name: str, how: Any) -> Any:
        args = ocp.args.Composite(**{name: how})
        return self._read(step, name, lambda: self.manager.restore(step, args=args)[name])

    def _read(self, step: int, name: str, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except Exception as error:  # the type depends on the damaged file
            raise self._damaged(step, f"its {name} cannot be read ({_one_line(error)})") from error

    def _damaged(self, step: int, reason: str) -> CheckpointError:
        older = [s for s in sorted(self.manager.all_steps()) if s < step]
        return CheckpointError(
            f"step {step} in {self._directory} is damaged: {reason}; "
            + (f"move it away to resume from step {older[-1]}" if older else "begin again")
        )


def _in_all_processes(call: Callable[[Any], Any], value: Any) -> Any:
    try:
        return call(value)
    except (AssertionError, RuntimeError) as error:  # values differ, or a process is missing
        raise CheckpointError(
            "every process of the job has to call save, with the same step; got"
            f" {_one_line(error)!r}"
        ) from error


def _step_number(step: Any) -> int:
    step = step.item() if isinstance(step, jax.Array) and not step.ndim else step
    check_number("step", step, within="[0, inf)", whole=True)
    return int(step)


def _as_json(extra: Any) -> Any:
    """Return `extra` as JSON will return it."""
    try:
        return json.loads(json.dumps(extra))
    except TypeError as error:
        raise TypeError(
            "extra must be JSON (numbers, text, None, and lists and dictionaries of them, with text"
            f" as keys): {error}; write float(x), int(x), str(x) or x.tolist()"
        ) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:160]


def describe_geometry(table: Table) -> dict[str, Any]:
    """Return every field of each parameter's manifold, layout and budget, as JSON.

    Args:
      table: `optim.tabulate` of geometry, parameters and budgets.

    Examples:
      >>> table = mm.optim.tabulate(mm.manifolds.Stiefel(), jnp.eye(3))
      >>> describe_geometry(table)["the manifold.scale of ''"]
      1.0
    """
    parts = [(row, part) for row in table.rows for part in ("manifold", "layout", "budget")]
    return dict(f for row, part in parts for f in _fields(getattr(row, part), part, row.path))


def check_geometry(saved: Mapping[str, Any], table: Table, where: str = "the step") -> None:
    """Raise `CheckpointError` if a saved geometry is another; the message names the paths.

    Args:
      saved: from `describe_geometry`.
      table: `optim.tabulate` of the current geometry.
      where: the step, for the message.

    Examples:
      >>> tables = [mm.optim.tabulate(mm.manifolds.Stiefel(s), jnp.eye(3)) for s in (1.0, 2.0)]
      >>> check_geometry(describe_geometry(tables[0]), tables[1])
      Traceback (most recent call last):
      manifoldmuon.checkpoints.CheckpointError: ... the manifold.scale of '' was 1.0 and is 2.0; ...
    """
    hint = "continue with that geometry, or restore without a table if the change is meant"
    given = _without_copies(describe_geometry(table))
    _check_equal(f"{where} was saved with another geometry", _without_copies(saved), given, hint)


def _within(saved: Mapping[str, Any], table: Table) -> dict[str, Any]:
    """Return the part of a saved geometry about the parameters of a table."""
    paths = {repr(row.path) for row in table.rows}
    return {key: x for key, x in saved.items() if key.partition(" of ")[2] in paths}


def _check_equal(what: str, saved: Mapping[str, Any], given: Mapping[str, Any], hint: str) -> None:
    differ = [
        f"{key} was {then if isinstance(then, str) else shown(then)}"
        f" and is {now if isinstance(now, str) else shown(now)}"
        for key in dict.fromkeys([*saved, *given])
        if (then := saved.get(key, "nothing")) != (now := given.get(key, "nothing"))
    ]
    if differ:
        more = f", and {len(differ) - 3} more" if len(differ) > 3 else ""
        raise CheckpointError(f"{what}: {', '.join(differ[:3])}{more}; {hint}")


def _leaves(tree: Any) -> dict[str, Any]:
    pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    leaves = {path_string(path): leaf for path, leaf in pairs}
    if len(leaves) < len(pairs):
        raise ValueError("two leaves of the tree have paths that read the same: rename a key")
    return leaves


def _kinds(tree: Any) -> dict[str, str]:
    """Return dtype and shape of every leaf by path, such as `float32[64,32]`."""
    arrays = {k: x if hasattr(x, "dtype") else np.asarray(x) for k, x in _leaves(tree).items()}
    return {k: f"{x.dtype}{list(x.shape)}".replace(" ", "") for k, x in arrays.items()}


def _restore_target(leaf: Any) -> Any:
    """Return Orbax's target for a leaf, with a sharding, so that Orbax does not guess."""
    if leaf is None:
        return ocp.PLACEHOLDER
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return np.asarray(leaf) if isinstance(leaf, np.generic) else leaf
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    if not leaf.ndim and isinstance(sharding, NamedSharding):
        # A scalar random key on an explicit mesh has the sharding of its key data, `P(None,)`.
        sharding = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _as_target(target: Any, leaf: Any) -> Any:
    """Return a restored leaf with the type of its target, uncommitted if the target is."""
    if leaf is None:
        array = np.zeros(target.shape, target.dtype)
        return array if isinstance(target, np.ndarray) else jnp.asarray(array)
    if isinstance(target, np.generic):
        return leaf[()]
    committed = getattr(target, "committed", getattr(target, "sharding", None) is not None)
    if committed or not isinstance(leaf, jax.Array):
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = jnp.asarray(np.asarray(jax.random.key_data(leaf)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    return jnp.asarray(np.asarray(leaf))


def _sha256(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _digests(tree: Any) -> dict[str, str]:
    """Return a 64-bit digest of every leaf, in hex: Orbax's stores miss changed bytes."""
    digests = {}
    for path, leaf in _leaves(tree).items():
        x = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
        if isinstance(x, np.ndarray):  # JAX may not support its dtype
            if x.dtype.kind not in "biufcV":
                raise TypeError(
                    f"{path!r} must be an array of numbers or a number; got a"
                    f" {type(leaf).__name__}: save it in `extra`, as JSON"
                )
            x = x.astype(np.int8) if _is_narrow(x) else np.ascontiguousarray(x)
            x = x.reshape(-1).view(f"u{min(x.dtype.itemsize, 4)}")
        digests[path] = _checksum(x)
    return {path: np.asarray(digest).tobytes().hex() for path, digest in digests.items()}


def _is_narrow(x: Any) -> bool:
    return x.dtype == bool or (jnp.issubdtype(x.dtype, jnp.integer) and jnp.iinfo(x.dtype).bits < 8)


@jax.jit
def _checksum(x: Any) -> UInt32[Array, "2"]:
    """Return two sums of all words, each mixed with its index: the same for every sharding.

    A change of a single word changes both sums, because `mix` and products with odd numbers are
    bijections; other changes pass unnoticed with probability 2**-64.
    """

    def mix(x: Array) -> Array:  # the finaliser of MurmurHash3 (A. Appleby)
        x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
        x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
        return x ^ (x >> 16)

    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    x = x.astype(jnp.int8) if _is_narrow(x) else x
    words = jax.lax.bitcast_convert_type(x, f"uint{8 * min(x.dtype.itemsize, 4)}").astype("uint32")
    index = jnp.zeros_like(words)
    for axis in range(words.ndim):
        stride = np.uint32(math.prod(words.shape[axis + 1 :]) % 2**32)
        index += jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * stride
    key = mix(index)
    mixed = mix(words ^ key)
    return jnp.stack([jnp.sum(mixed, dtype="uint32"), jnp.sum(mixed * (key | 1), dtype="uint32")])


def _without_copies(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record of a geometry without the axes declared as copies, which change no step."""
    kept = {key: x for key, x in record.items() if not key.startswith("the layout.ndim of ")}
    # Older records have no `ConvRMSToRMS.tap_axes`.
    kept = {key: x for key, x in kept.items() if x != 2 or "step_norm.tap_axes of " not in key}
    plain = {key.removesuffix(" of ''"): x for key, x in _fields(Layout(), "layout", "")}
    del plain["the layout.ndim"]
    for key in [key for key in kept if key.startswith("the layout of ")]:
        own = {key.replace("the layout", name, 1): x for name, x in plain.items()}
        if own.items() <= kept.items():  # the order of the axes does not change either
            kept = {name: x for name, x in kept.items() if name not in own} | {key: None}
    return kept


def _fields(value: Any, name: str, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the name and the JSON form of each part of a value."""
    parts, qualified = {}, getattr(value, "__qualname__", "")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        plain = _public_name(type(value))
        parts = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
    elif isinstance(value, tuple | list):
        plain, parts = len(value), dict(enumerate(value))
    elif value is None or isinstance(value, bool | int | float | str):
        plain = value
    elif isinstance(value, np.ndarray | np.generic | jax.Array):
        plain = np.asarray(value).tolist()
    elif isinstance(value, enum.Enum | np.dtype):
        plain = value.name
    elif qualified and getattr(sys.modules.get(value.__module__), qualified, None) is value:
        plain = _public_name(value)  # a function or class at the top of a module
    else:
        raise TypeError(
            f"{path!r}: {name} is {shown(value)}, which no record can hold: make it a frozen"
            " dataclass or a function at the top of a module, or save without a table"
        )
    yield f"the {name} of {path!r}", plain
    for part, held in parts.items():
        yield from _fields(held, f"{name}.{part}", path)


def _public_name(value: Any) -> str:
    parts = [part for part in value.__module__.split(".") if not part.startswith("_")]
    return ".".join([*parts, value.__qualname__])
