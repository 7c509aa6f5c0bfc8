"""Orbax's manager, with a record of what it saved."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import manifoldmuon
from manifoldmuon._internal.arguments import shown
from manifoldmuon.checkpoints._digests import digests, leaves
from manifoldmuon.checkpoints._geometry import record_geometry
from manifoldmuon.optim import Table

try:
    import orbax.checkpoint as ocp
except ImportError as error:
    raise ImportError(
        "manifoldmuon.checkpoints needs Orbax: pip install 'manifoldmuon[checkpoints]'"
    ) from error

STATE_LAYOUT = 4
"""Version of the record and of the states; steps that were saved with another are refused."""


class CheckpointError(Exception):
    """Raised, in one line, for a checkpoint that is refused or could not be written.

    Examples:
      >>> import tempfile
      >>> with Checkpoints(tempfile.mkdtemp()) as checkpoints:
      ...     saved = checkpoints.save(2, {"w": jnp.ones(3)})
      ...     try:
      ...         checkpoints.save(1, {"w": jnp.ones(3)})
      ...     except CheckpointError as error:
      ...         print(error)
      step 1 is not after step 2...
    """


class Restored(NamedTuple):
    """A restored step.

    Attributes:
      step: its number.
      tree: the saved tree, in the structure and on the devices of the target.
      extra: the `extra` of `save`, or None.

    Examples:
      >>> Restored(20, {"w": jnp.ones(3)}, {"batches": 20}).step
      20
    """

    step: int
    tree: Any
    extra: Any


class Checkpoints:
    """A folder of checkpoints, each with a record that is checked when it is restored.

    `orbax.checkpoint.CheckpointManager` does the work: a step appears in the folder whole or not at
    all. Each step holds the items `tree` and `record`, so Orbax reads it without this class, too.
    The record has digest, dtype and shape of every array, every field of each parameter's manifold,
    layout and budget, and `STATE_LAYOUT`.

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
        """Open a folder, and make it if there is none.

        Args:
          directory: for the steps of one run; a path or, where Orbax can, a URL such as `gs://...`.
          options: of Orbax's manager, such as how many steps to keep; by default all steps are kept
            and unfinished ones of killed processes are removed.

        Raises:
          CheckpointError: the folder cannot be opened.
        """
        place = os.fspath(directory)
        self._directory = place if "://" in place else os.path.abspath(place)
        options = options or ocp.CheckpointManagerOptions(cleanup_tmp_directories=True)
        with self._in_one_line("cannot be opened"):
            if os.path.isfile(self._directory):  # Orbax notices only when it saves
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            self.manager = ocp.CheckpointManager(self._directory, options=options)

    def save(
        self, step: int, tree: Any, table: Table | None = None, extra: Any | None = None
    ) -> bool:
        """Save one step, whole or not at all, and return whether the options chose it.

        Args:
          step: its number, above those of all steps in the folder.
          tree: everything that training needs to resume: parameters, state, random keys, in any
            registered pytree of arrays and numbers, sharded in any way.
          table: `optim.tabulate` of geometry, parameters and budgets; None without a geometry.
          extra: other data that JSON can hold, such as the position in the data set.

        Raises:
          CheckpointError: the folder holds this step or a later one, or this save (or the one
            before, if asynchronous) could not be written. Earlier steps are unchanged.
          TypeError: a leaf is neither an array nor a number, or narrower than 4 bits; `extra` is
            not JSON; a field of a manifold is not data, such as a lambda.
          ValueError: two leaves have the same path, or the tree has no node or no leaf.
        """
        self._check_newer(step)
        if not self.manager.should_save(step):
            return False
        # Another process may have saved since the folder was read, and Orbax overwrites steps that
        # it does not know.
        self.wait()
        self.manager.reload()
        self._check_newer(step)
        structure = jax.tree.structure(tree, is_leaf=lambda node: node is None)
        if jax.tree_util.treedef_is_leaf(structure) or structure.num_leaves == 0:
            raise ValueError(
                "Orbax keeps trees with a node and a leaf; got"
                f" {'a single leaf' if structure.num_leaves else 'no leaf'}: save"
                " {'params': params}, say."
            )
        record = {
            "layout": STATE_LAYOUT,
            "version": manifoldmuon.__version__,
            "arrays": _kinds(tree),
            "digests": digests(tree),
            "geometry": None if table is None else record_geometry(table),
            "extra": json.loads(json.dumps(extra)),  # as it will be read
        }
        items = ocp.args.Composite(
            tree=ocp.args.StandardSave(jax.tree.map(_unless_empty, tree)),
            record=ocp.args.JsonSave(record | {"sha256": _sha256(record)}),
        )
        with self._in_one_line(f"cannot hold step {step}"):
            return self.manager.save(step, args=items)

    def restore(
        self, target: Any, table: Table | None = None, step: int | None = None
    ) -> Restored | None:
        """Return the newest step, or None from an empty folder; nothing on disk is changed.

        Args:
          target: a tree like the saved one, of arrays or `jax.ShapeDtypeStruct`. Arrays are
            restored onto the sharding of their target; without one, or where the target is not
            committed to its devices, to the default device, uncommitted, as `jnp.zeros` would be.
          table: `optim.tabulate` of the current geometry; None does not compare it.
          step: another step than the newest.

        Raises:
          CheckpointError: the step is damaged (the line names the newest older one that is whole),
            or was saved with another layout of the state, another geometry, or arrays of other
            paths, shapes or dtypes.
        """
        return self._checked(step, lambda step: self._restore(step, target, table))

    def read_extra(self, step: int | None = None) -> Any:
        """Return the `extra` of the newest or given step, or None, to make a target with it.

        Raises:
          CheckpointError: the record of the step is damaged.
        """
        found = self._checked(step, self._record)
        return None if found is None else found["extra"]

    def wait(self) -> None:
        """Wait for a save in the background; raise `CheckpointError` if it failed."""
        with self._in_one_line("cannot hold the last step"):
            self.manager.wait_until_finished()

    def close(self) -> None:
        """Wait, and end the manager's threads; raise `CheckpointError` if the last save failed."""
        with self._in_one_line("cannot hold the last step"):
            self.manager.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_newer(self, step: int) -> None:
        newest = self.manager.latest_step()
        if newest is not None and step <= newest:
            raise CheckpointError(
                f"step {step} is not after step {newest}, which {self._directory} holds: restore"
                " that one and resume from there, or choose another folder"
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
            older = next((s for s in reversed(steps) if s < step and _reads(read, s)), None)
            hint = "no older step is whole: move it away to begin again"
            if older is not None:
                hint = f"move it away to go on from step {older}, which is whole"
            raise CheckpointError(f"{error}; {hint}") from error

    def _record(self, step: int) -> dict[str, Any]:
        record = self._item(step, "record", ocp.args.JsonRestore())
        if not isinstance(record, dict) or record.pop("sha256", None) != _sha256(record):
            raise _DamagedError(
                f"step {step} in {self._directory} is damaged: its record is not the one that was"
                " saved"
            )
        return record

    def _restore(self, step: int, target: Any, table: Table | None) -> Restored:
        place, record = f"step {step} in {self._directory}", self._record(step)
        if record["layout"] != STATE_LAYOUT:
            raise CheckpointError(
                f"{place} has the state's layout {record['layout']}, of manifoldmuon"
                f" {record['version']}, and this is {manifoldmuon.__version__} with layout"
                f" {STATE_LAYOUT}: continue with that version, or restore the parameters alone, as"
                " the page 'Save and resume' shows, and call tx.init again"
            )
        if table is not None:
            if (saved := record["geometry"]) is None:
                raise CheckpointError(f"{place} has no geometry: restore without a table")
            hint = "continue with that geometry, or restore without a table if the change is meant"
            another = f"{place} was saved with another geometry"
            _check_same(another, saved, record_geometry(table), hint)
        hint = "continue with its model and optimizer, or restore a part of it with Orbax"
        saved, given = (
            {repr(path): kind for path, kind in kinds.items()}
            for kinds in (record["arrays"], _kinds(target))
        )
        _check_same(f"{place} holds another tree", saved, given, hint)
        placed = jax.tree.map(_abstract, jax.tree.map(_unless_empty, target))
        tree = self._item(step, "tree", ocp.args.StandardRestore(placed))
        tree = jax.tree.map(_as_committed, target, tree)
        for path, digest in digests(tree).items():
            if digest != record["digests"][path]:
                raise _DamagedError(f"{place} is damaged: {path!r} is not the array that was saved")
        return Restored(step, tree, record["extra"])

    def _item(self, step: int, name: str, how: Any) -> Any:
        try:
            return self.manager.restore(step, args=ocp.args.Composite(**{name: how}))[name]
        except Exception as error:  # of many types, by which file is damaged and how
            raise _DamagedError(
                f"step {step} in {self._directory} is damaged: its {name} cannot be read"
                f" ({_brief(error)})"
            ) from error

    @contextlib.contextmanager
    def _in_one_line(self, what: str) -> Generator[None, None, None]:
        """Turn errors of Orbax and the file system into one line."""
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"{self._directory} {what} ({_brief(error)}): nothing that it holds has"
                " changed; make it writable or free space, or choose another folder"
            ) from error


class _DamagedError(CheckpointError):
    """A step whose bytes are not those that were saved."""


def _reads(read: Callable[[int], Any], step: int) -> bool:
    try:
        read(step)
    except CheckpointError:
        return False
    return True


def _check_same(place: str, saved: Mapping[str, Any], given: Mapping[str, Any], hint: str) -> None:
    """Raise `CheckpointError` at the first entry that differs."""
    for key in [*saved, *given]:
        then, now = saved.get(key, "nothing"), given.get(key, "nothing")
        if then != now:
            then, now = (x if isinstance(x, str) else shown(x) for x in (then, now))
            raise CheckpointError(f"{place}: {key} was {then} and is {now}; {hint}")


def _kinds(tree: Any) -> dict[str, str]:
    """Return dtype and shape of every leaf, such as `float32[64,32]`, by path."""

    def kind(x: Any) -> str:
        x = x if hasattr(x, "dtype") else np.asarray(x)
        return f"{x.dtype}{list(x.shape)}".replace(" ", "")

    return {path: kind(x) for path, x in leaves(tree).items()}


def _unless_empty(leaf: Any) -> Any:
    """Return a leaf, or None for an array without entries, which Orbax does not take."""
    return None if np.size(leaf) == 0 else leaf


def _abstract(leaf: Any) -> Any:
    """Return the target of a leaf for Orbax: with a sharding, so that none is guessed."""
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return np.asarray(leaf) if isinstance(leaf, np.generic) else leaf
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _as_committed(target: Any, leaf: Any) -> Any:
    """Return a leaf, free to follow other arrays to their devices where its target is."""
    if leaf is None:
        if isinstance(target, np.ndarray):
            return np.zeros(target.shape, target.dtype)
        return jnp.zeros(target.shape, target.dtype, device=target.sharding)
    if isinstance(target, np.generic):
        return leaf[()]
    bound = getattr(target, "committed", getattr(target, "sharding", None) is not None)
    if bound or not isinstance(leaf, jax.Array):
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
