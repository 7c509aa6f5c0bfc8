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
from manifoldmuon.checkpoints._geometry import entries_of, record_geometry
from manifoldmuon.optim import Table

try:
    import orbax.checkpoint as ocp
except ImportError as error:
    raise ImportError(
        "manifoldmuon.checkpoints needs Orbax: pip install 'manifoldmuon[checkpoints]'"
    ) from error

STATE_LAYOUT = 2
"""The version of the record and of what the transformations keep in their states. It is raised when
either changes its meaning; steps that were saved with another are refused."""


class CheckpointError(Exception):
    """A checkpoint that is refused, or could not be written: one line that says what to do."""


class Restored(NamedTuple):
    """A step that was found whole.

    Attributes:
      step: its number.
      tree: what was saved, in the structure and on the devices of the target.
      extra: what was saved with it; None if nothing was.
    """

    step: int
    tree: Any
    extra: Any


class Checkpoints:
    """A folder of checkpoints, each with a record that is checked when it is restored.

    The work is done by `orbax.checkpoint.CheckpointManager`: a step appears in the folder whole or
    not at all. Every step holds the item `tree` and the item `record`, so that Orbax reads it
    without this class, too. The record has a digest, dtype and shape of every array, the manifold,
    layout and budget of each parameter with all of their fields, and the version of the state's
    layout.

    Attributes:
      manager: Orbax's own, for its other methods.

    Example:
      ```
      with Checkpoints(folder) as checkpoints:
          if found := checkpoints.restore({"params": params, "state": state}, table):
              params, state = found.tree["params"], found.tree["state"]
          ...
          checkpoints.save(step, {"params": params, "state": state}, table)
      ```
    """

    def __init__(
        self, directory: str | os.PathLike[str], options: ocp.CheckpointManagerOptions | None = None
    ):
        """Opens a folder, and makes it if there is none.

        Args:
          directory: for the steps of one run; a path or, where Orbax can, a URL such as `gs://...`.
          options: of Orbax's manager, for instance how many steps are kept; by default all are, and
            what killed processes have left unfinished is removed.

        Raises:
          CheckpointError: if the folder cannot be opened.
        """
        place = os.fspath(directory)
        self._directory = place if "://" in place else os.path.abspath(place)
        options = options or ocp.CheckpointManagerOptions(cleanup_tmp_directories=True)
        with self._told("cannot be opened"):
            if os.path.isfile(self._directory):  # Orbax notices only when it saves
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            self.manager = ocp.CheckpointManager(self._directory, options=options)

    def save(
        self, step: int, tree: Any, table: Table | None = None, extra: Any | None = None
    ) -> bool:
        """Saves one step, whole or not at all.

        Args:
          step: its number, above those of all steps in the folder.
          tree: everything that training goes on from: parameters, state, random keys, in any
            registered pytree of arrays and numbers. Arrays may be sharded over devices and
            processes.
          table: `optim.tabulate` of geometry, parameters and budgets; None where there is no
            geometry.
          extra: what is not an array, such as the position in the data; what JSON holds.

        Returns:
          Whether it was saved: False where the manager's options skip this step.

        Raises:
          CheckpointError: if the folder holds this step or a later one, or if this save, or the one
            before if that was asynchronous, could not be written. The steps in the folder are as
            they were.
          TypeError: if a leaf of the tree is neither an array nor a number, if the numbers of an
            array are narrower than a byte, if JSON cannot hold `extra`, or if a field of a manifold
            is not data: a lambda, or an object that is no dataclass.
          ValueError: if the paths of two leaves read the same, or the tree has no node or no leaf.
        """
        newest = self.manager.latest_step()
        if newest is not None and step <= newest:
            raise CheckpointError(
                f"step {step} is not after step {newest}, which {self._directory} holds: restore"
                " that one and go on from there, or choose another folder"
            )
        if not self.manager.should_save(step):
            return False
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
        with self._told(f"cannot hold step {step}"):
            return self.manager.save(step, args=items)

    def restore(
        self, target: Any, table: Table | None = None, step: int | None = None
    ) -> Restored | None:
        """The newest step, or an error; nothing in the folder is changed.

        Args:
          target: a tree like the saved one, of arrays or of `jax.ShapeDtypeStruct`. An array is
            restored onto the sharding of its target, whatever it was saved from; without one, or
            where the target is not committed to its devices, to the default device, uncommitted, as
            `jnp.zeros` would be.
          table: `optim.tabulate` of the geometry that training goes on with; None: the geometry is
            not compared.
          step: another than the newest.

        Returns:
          The step, its tree and its extra; None if the folder holds no step.

        Raises:
          CheckpointError: if the step is damaged (the line names the newest older one that is
            whole), or was saved with another layout of the state, another geometry, or arrays of
            other paths, shapes or dtypes.
        """
        return self._checked(step, lambda step: self._restore(step, target, table))

    def read_extra(self, step: int | None = None) -> Any:
        """Return the metadata saved beside the arrays, for making the target of a restore.

        Args:
          step: another than the newest.

        Returns:
          The extra of the step; None if it has none, or the folder holds no step.

        Raises:
          CheckpointError: if its record is damaged.
        """
        found = self._checked(step, self._record)
        return None if found is None else found["extra"]

    def wait(self) -> None:
        """Waits for a save that goes on in the background.

        Raises:
          CheckpointError: if it could not be written.
        """
        with self._told("cannot hold the last step"):
            self.manager.wait_until_finished()

    def close(self) -> None:
        """Waits, and ends the manager's threads.

        Raises:
          CheckpointError: if the last step could not be written.
        """
        with self._told("cannot hold the last step"):
            self.manager.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _checked(self, step: int | None, read: Callable[[int], Any]) -> Any:
        """Read a step; if it is damaged, raise an error that names the newest intact step."""
        self.wait()
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
                f" {STATE_LAYOUT}: go on with that version, or restore the parameters alone with"
                " Orbax and initialise the state anew"
            )
        if table is not None:
            if (saved := record["geometry"]) is None:
                raise CheckpointError(f"{place} has no geometry: restore without a table")
            hint = "go on with that geometry, or restore without a table if the change is meant"
            another = f"{place} was saved with another geometry"
            _check_same(another, entries_of(saved), entries_of(record_geometry(table)), hint)
        hint = "go on with its model and optimizer, or restore a part of it with Orbax"
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
    def _told(self, what: str) -> Generator[None, None, None]:
        """Turns what Orbax and the file system raise into one line."""
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
    """A leaf, or None in place of an array without entries, which Orbax does not take."""
    return None if np.size(leaf) == 0 else leaf


def _abstract(leaf: Any) -> Any:
    """The target of a leaf as Orbax takes it: with a sharding, so that none is guessed."""
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return np.asarray(leaf) if isinstance(leaf, np.generic) else leaf
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _as_committed(target: Any, leaf: Any) -> Any:
    """A leaf, free to follow other arrays to their devices where its target is."""
    if leaf is None:
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
