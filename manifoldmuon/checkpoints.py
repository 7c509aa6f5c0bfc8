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
import re
import sys
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, UInt32

import manifoldmuon
from manifoldmuon._internal.arguments import shown
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

__all__ = ["STATE_LAYOUT", "CheckpointError", "Checkpoints", "Restored"]

STATE_LAYOUT = 4
"""Version of the record and of the states; steps that were saved with another are refused."""

_NO_LOCKS = errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP
_RACES = errno.EEXIST, errno.ENOENT, errno.ENOTEMPTY  # files that another process moved
_TOGETHER = "every process has to call save, with the same step"
_NARROW = jnp.bool_, jnp.int4, jnp.uint4  # dtypes that are hashed as int8


class CheckpointError(Exception):
    """Raised, with a one-line message, if a checkpoint is refused or could not be written.

    Examples:
      >>> Checkpoints(__import__("tempfile").mkdtemp()).restore({"w": jnp.ones(3)}, step=7)
      Traceback (most recent call last):
      manifoldmuon.checkpoints.CheckpointError: ... holds no step 7, but none
    """


class _DamagedError(CheckpointError):
    """The bytes of a step differ from the saved bytes."""


class Restored(NamedTuple):
    """A restored step: its number, the tree on the devices of the target, and `extra` or None.

    Examples:
      >>> Restored(20, {"w": jnp.ones(3)}, {"batches": 20}).step
      20
    """

    step: int
    tree: Any
    extra: Any


class Checkpoints(contextlib.AbstractContextManager[Any]):
    """A folder of checkpoints, each verified against its record when it is restored.

    `orbax.checkpoint.CheckpointManager` writes each step whole or not at all, as the items `tree`
    and `record`. The record has the digest, dtype and shape of every array, every field of each
    parameter's manifold, layout and budget, and `STATE_LAYOUT`. One process at a time saves into a
    folder, from its first `save` to `close`; other processes may read meanwhile.

    Args:
      directory: folder of a single run, created if missing; a path or a URL such as `gs://...`.
      options: options of Orbax's manager; by default all steps are kept, and the first `save`
        removes unfinished steps of killed processes.

    Attributes:
      manager: Orbax's manager, for its other methods; the first `save` replaces it.

    Raises:
      CheckpointError: the folder cannot be opened.

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
        path = os.fspath(directory)
        self._directory = path if "://" in path else os.path.abspath(path)
        self._options = options or ocp.CheckpointManagerOptions(cleanup_tmp_directories=True)
        self._unlock, self._locked = None, True
        reading = dataclasses.replace(self._options, cleanup_tmp_directories=False)
        with self._in_one_line("cannot be opened"):
            if os.path.isfile(self._directory):  # Orbax notices only when it saves
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            self.manager = ocp.CheckpointManager(self._directory, options=reading)

    def save(
        self, step: int, tree: Any, table: Table | None = None, extra: Any | None = None
    ) -> bool:
        """Save a step, whole or not at all, and return whether the options chose it.

        In a job of several processes all of them call it, with the same step.

        Args:
          step: number of the step, larger than all in the folder.
          tree: all that training needs to resume: parameters, state, random keys, in any registered
            pytree of arrays and numbers, with any sharding.
          table: `optim.tabulate` of geometry, parameters and budgets; None without a geometry.
          extra: other data, as JSON, such as the position in the data set.

        Raises:
          CheckpointError: the folder holds this step or a later step, another job saves into it,
            the processes of this job save different steps, or this save (or an earlier asynchronous
            save) failed. Earlier steps are unchanged.
          TypeError: a leaf is neither array nor number, or narrower than 4 bits; `extra` is
            not JSON; a field of a manifold is not data, such as a lambda.
          ValueError: two leaves have the same path, or the tree has no node or no leaf.
        """
        self._check_newer(step)
        if not self.manager.should_save(step):
            return False
        self._check_together(step)
        structure = jax.tree.structure(tree, is_leaf=lambda node: node is None)
        if jax.tree_util.treedef_is_leaf(structure) or structure.num_leaves == 0:
            got = "a single leaf" if structure.num_leaves else "no leaf"
            raise ValueError(
                f"tree: Orbax needs a node; got {got}: save {{'params': params}}, say."
            )
        record = {
            "layout": STATE_LAYOUT,
            "version": manifoldmuon.__version__,
            "arrays": _kinds(tree),
            "digests": _digests(tree),
            "geometry": None if table is None else _record_geometry(table),
            "extra": json.loads(json.dumps(extra)),  # as JSON will return it
        }
        items = ocp.args.Composite(
            # Orbax rejects arrays without entries.
            tree=ocp.args.PyTreeSave(jax.tree.map(lambda x: x if np.size(x) else None, tree)),
            record=ocp.args.JsonSave(record | {"sha256": _sha256(record)}),
        )
        self.wait()
        with self._in_one_line(f"cannot hold step {step}"):
            self._lock()
            self.manager.reload()  # Orbax overwrites steps that it has not loaded
            self._check_newer(step)
            return self.manager.save(step, args=items)

    def restore(
        self,
        target: Any,
        table: Table | None = None,
        step: int | None = None,
        *,
        partial: bool = False,
    ) -> Restored | None:
        """Return the newest step, or None from an empty folder; nothing on disk is changed.

        Args:
          target: a tree like the saved tree, of arrays or `jax.ShapeDtypeStruct`. Arrays take the
            sharding of their target; if it has no sharding, or is not committed to its devices,
            they are on the default device, uncommitted, as `jnp.zeros` would be.
          table: `optim.tabulate` of the current geometry; None skips the comparison.
          step: number of the step; None: the newest.
          partial: whether the target may leave out leaves of the saved tree, which are not read:
            `{"params": shapes}` restores the parameters without an optimizer.

        Raises:
          CheckpointError: the folder does not hold the step; the step is damaged (the message names
            the newest older step that is intact), or has another layout of the state, another
            geometry, or other paths, shapes or dtypes.
        """
        return self._checked(step, lambda step: self._restore(step, target, table, partial))

    def read_extra(self, step: int | None = None) -> Any:
        """Return the `extra` of the newest or given step, or None, to build a target from it."""
        found = self._checked(step, self._record)
        return None if found is None else found["extra"]

    def wait(self) -> None:
        """Wait for a background save; raise `CheckpointError` if it failed."""
        with self._in_one_line("cannot hold the last step"):
            self.manager.wait_until_finished()

    def close(self) -> None:
        """Wait, and unlock the folder; raise `CheckpointError` if the last save failed."""
        try:
            with self._in_one_line("cannot hold the last step"):
                self.manager.close()
        finally:
            if self._unlock is not None:
                self._unlock()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lock(self) -> None:
        """Lock the folder until `close`, and remove unfinished steps of killed processes."""
        if self._unlock is not None:
            return
        with contextlib.ExitStack() as held:
            code = -1
            if fcntl is not None and jax.process_index() == 0 and "://" not in self._directory:
                try:
                    os.makedirs(self._directory, exist_ok=True)
                    file = os.open(os.path.join(self._directory, ".lock"), os.O_RDWR | os.O_CREAT)
                    held.callback(os.close, file)
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    code = 0
                except OSError as error:
                    code = -1 if error.errno in _NO_LOCKS else error.errno or errno.EIO
            code = int(multihost_utils.broadcast_one_to_all(np.int32(code)))
            if code > 0:
                raise OSError(code, os.strerror(code))
            self._locked = code == 0
            if self._options.cleanup_tmp_directories:
                reader = self.manager
                self.manager = ocp.CheckpointManager(self._directory, options=self._options)
                reader.close()
            # Bound to the manager, which lives until a background save has ended.
            self._unlock = weakref.finalize(self.manager, held.pop_all().close)

    def _check_newer(self, step: int) -> None:
        if (newest := self.manager.latest_step()) is not None and step <= newest:
            raise CheckpointError(
                f"step {step} is not after step {newest}, which {self._directory} holds: restore"
                " that one and resume from there, or choose another folder"
            )

    def _check_together(self, step: int) -> None:
        """Check that all processes save this step: in the collectives below they would hang."""
        if jax.process_count() == 1:
            return
        with self._in_one_line(f"cannot hold step {step}"):
            words = multihost_utils.process_allgather(np.array([step], np.int64).view(np.int32))
            steps = np.ascontiguousarray(words).view(np.int64).ravel().tolist()
        if len(set(steps)) > 1:
            raise CheckpointError(
                f"{self._directory} cannot hold step {step} (the processes save the steps {steps}):"
                f" nothing that it holds has changed; {_TOGETHER}"
            )

    def _checked(self, step: int | None, read: Callable[[int], Any]) -> Any:
        """Read a step; if it is damaged, raise an error that names the newest intact step."""
        self.wait()
        self.manager.reload()
        steps = sorted(self.manager.all_steps())
        if step is None and not steps:
            return None
        step = steps[-1] if step is None else step
        if step not in steps:
            known = ", ".join(map(str, steps)) or "none"
            raise CheckpointError(f"{self._directory} holds no step {step}, but {known}")
        try:
            return read(step)
        except _DamagedError as error:
            hint = "no older step is whole: move it away to begin again"
            for older in reversed(steps[: steps.index(step)]):
                with contextlib.suppress(CheckpointError):
                    read(older)
                    hint = f"move it away to go on from step {older}, which is whole"
                    break
            raise CheckpointError(f"{error}; {hint}") from error

    def _record(self, step: int) -> dict[str, Any]:
        record = self._item(step, "record", ocp.args.JsonRestore())
        if not isinstance(record, dict) or record.pop("sha256", None) != _sha256(record):
            raise self._damaged(step, "its record is not the one that was saved")
        return record

    def _restore(self, step: int, target: Any, table: Table | None, partial: bool) -> Restored:
        where, record = f"step {step} in {self._directory}", self._record(step)
        if record["layout"] != STATE_LAYOUT:
            raise CheckpointError(
                f"{where} has the state's layout {record['layout']}, of manifoldmuon"
                f" {record['version']}, and this is {manifoldmuon.__version__} with layout"
                f" {STATE_LAYOUT}: continue with that version, or restore the parameters alone, as"
                " the page 'Save and resume' shows, and call tx.init again"
            )
        if table is not None:
            if (saved := record["geometry"]) is None:
                raise CheckpointError(f"{where} has no geometry: restore without a table")
            hint = "continue with that geometry, or restore without a table if the change is meant"
            what = f"{where} was saved with another geometry"
            given = _without_copies(_record_geometry(table))
            _check_same(what, _without_copies(saved), given, hint)
        hint = "continue with its model and optimizer"
        hint += "" if partial else ", or restore a part of it by partial=True"
        saved, given = (
            {repr(path): kind for path, kind in kinds.items()}
            for kinds in (record["arrays"], _kinds(target))
        )
        if partial:
            saved = {path: kind for path, kind in saved.items() if path in given}
        _check_same(f"{where} holds another tree", saved, given, hint)
        tree = jax.tree.map(_abstract, target)
        if partial:  # Orbax 0.11.33 then fails at None
            tree = jax.tree.map(
                lambda x: ocp.PLACEHOLDER if x is None else x, tree, is_leaf=lambda x: x is None
            )
        arguments = ocp.checkpoint_utils.construct_restore_args(tree)
        how = ocp.args.PyTreeRestore(tree, restore_args=arguments, partial_restore=partial)
        tree = jax.tree.map(_as_target, target, self._item(step, "tree", how))
        for path, digest in _digests(tree).items():
            if digest != record["digests"][path]:
                raise self._damaged(step, f"{path!r} is not the array that was saved")
        return Restored(step, tree, record["extra"])

    def _item(self, step: int, name: str, how: Any) -> Any:
        try:
            return self.manager.restore(step, args=ocp.args.Composite(**{name: how}))[name]
        except Exception as error:  # the type depends on the damaged file
            raise self._damaged(step, f"its {name} cannot be read ({_brief(error)})") from error

    def _damaged(self, step: int, reason: str) -> _DamagedError:
        return _DamagedError(f"step {step} in {self._directory} is damaged: {reason}")

    @contextlib.contextmanager
    def _in_one_line(self, what: str) -> Generator[None, None, None]:
        """Turn errors of Orbax and the file system into one line."""
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:
            reason = _brief(error)
            hint = "make it writable or free space, or choose another folder"
            code = getattr(error, "errno", None)
            raced = code in _RACES or str(error).startswith("NOT_FOUND")
            if code == errno.EWOULDBLOCK or (raced and not self._locked):
                reason = "another process is saving into this folder"
                hint = "let one process save, and close its Checkpoints, or choose another folder"
            elif isinstance(error, jax.errors.JaxRuntimeError) and jax.process_count() > 1:
                hint = f"{_TOGETHER}; if all do, see the messages of the others"
            raise CheckpointError(
                f"{self._directory} {what} ({reason}): nothing that it holds has changed; {hint}"
            ) from error


def _check_same(what: str, saved: Mapping[str, Any], given: Mapping[str, Any], hint: str) -> None:
    """Raise `CheckpointError` at the first entry that differs."""
    for key in [*saved, *given]:
        then, now = saved.get(key, "nothing"), given.get(key, "nothing")
        if then != now:
            then, now = (x if isinstance(x, str) else shown(x) for x in (then, now))
            raise CheckpointError(f"{what}: {key} was {then} and is {now}; {hint}")


def _leaves(tree: Any) -> dict[str, Any]:
    pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    leaves = {path_string(path): leaf for path, leaf in pairs}
    if len(leaves) < len(pairs):
        raise ValueError("two leaves of the tree have paths that read the same: rename a key.")
    return leaves


def _kinds(tree: Any) -> dict[str, str]:
    """Return dtype and shape of every leaf by path, such as `float32[64,32]`."""
    arrays = {k: x if hasattr(x, "dtype") else np.asarray(x) for k, x in _leaves(tree).items()}
    return {k: f"{x.dtype}{list(x.shape)}".replace(" ", "") for k, x in arrays.items()}


def _abstract(leaf: Any) -> Any:
    """Return Orbax's target for a leaf, with a sharding, so that Orbax does not guess."""
    if np.size(leaf) == 0:
        return None
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
        if isinstance(target, np.ndarray):
            return np.zeros(target.shape, target.dtype)
        return jnp.zeros(target.shape, target.dtype, device=target.sharding)
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


def _brief(error: BaseException) -> str:
    """Return the error message without the specification that TensorStore appends."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = re.sub(r" \[\w+=.*", "", " ".join(str(error).split())) or type(error).__name__
    return text if len(text) <= 160 else f"{text[:70]} ... {text[-80:]}"


def _digests(tree: Any) -> dict[str, str]:
    """Return a 64-bit digest of every leaf, in hex: Orbax's stores miss changed bytes."""
    digests = {}
    for path, leaf in _leaves(tree).items():
        x = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
        if re.match(r"u?int[12]$|float[46]_", str(x.dtype)):
            raise TypeError(f"{path!r} has dtype {x.dtype}, narrower than a byte: widen it.")
        if isinstance(x, np.ndarray):  # JAX may not support its dtype
            if x.dtype.kind not in "biufcV" or type(leaf) is complex:  # as in Orbax
                raise TypeError(
                    f"{path!r} is a {type(leaf).__name__}, neither an array of numbers nor a"
                    " number: save it in `extra`, as JSON."
                )
            x = x.astype(np.int8) if x.dtype in _NARROW else x
            x = np.ascontiguousarray(x).reshape(*x.shape, 1).view(f"u{min(x.dtype.itemsize, 4)}")
        digests[path] = _digest(x)
    return {path: np.asarray(digest).tobytes().hex() for path, digest in digests.items()}


@jax.jit
def _digest(x: Any) -> UInt32[Array, "2"]:
    """Return two sums of all words, each mixed with its index: the same for every sharding.

    A change of a single word changes both sums, because `_mix` and products with odd numbers are
    bijections; other changes pass unnoticed with probability 2**-64.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    x = x.astype(jnp.int8) if x.dtype in _NARROW else x
    words = jax.lax.bitcast_convert_type(x, f"uint{8 * min(x.dtype.itemsize, 4)}").astype("uint32")
    index = jnp.zeros_like(words)
    for axis in range(words.ndim):
        stride = np.uint32(math.prod(words.shape[axis + 1 :]) % 2**32)
        index += jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * stride
    key = _mix(index)
    mixed = _mix(words ^ key)
    return jnp.stack([jnp.sum(mixed, dtype="uint32"), jnp.sum(mixed * (key | 1), dtype="uint32")])


def _mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Apply the finaliser of MurmurHash3 (A. Appleby), a bijection of 32-bit words."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _record_geometry(table: Table) -> dict[str, Any]:
    """Return every field of each parameter's manifold, layout and budget, by description."""
    parts = [(row, part) for row in table.rows for part in ("manifold", "layout", "budget")]
    return dict(f for row, part in parts for f in _fields(getattr(row, part), part, row.path))


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
