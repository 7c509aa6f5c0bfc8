"""Checkpoints that resume to the bit or refuse: Orbax's manager, and a record of what it saved.

Imported by name; needs the extra `manifoldmuon[checkpoints]`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

import manifoldmuon
from manifoldmuon.optim import Table, path_string

try:
    import orbax.checkpoint as ocp
except ImportError as error:
    raise ImportError(
        "manifoldmuon.checkpoints needs Orbax: pip install 'manifoldmuon[checkpoints]'"
    ) from error

__all__ = ["Checkpoints", "CheckpointError", "Restored", "STATE_LAYOUT"]

STATE_LAYOUT = 1
"""The version of what the transformations keep in their states. It is raised when a state changes
its meaning; steps that were saved with another are refused."""


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
    without this class, too. The record has a digest, dtype and shape of every array, what each
    parameter is paired with, and the version of the state's layout.

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
            array are narrower than a byte, or if JSON cannot hold `extra`.
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
            "arrays": {path: _kind(x) for path, x in _leaves(tree).items()},
            "digests": _digests(tree),
            "geometry": None if table is None else _pairing(table),
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
        """What was saved beside the arrays, for whoever needs it to make the target.

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
        """What is read of a step; if that is damaged, an error with the newest that is whole."""
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
        _check_layout(place, record)
        if table is not None:
            _check_geometry(place, record["geometry"], _pairing(table))
        _check_arrays(place, record["arrays"], target)
        placed = jax.tree.map(_abstract, jax.tree.map(_unless_empty, target))
        tree = self._item(step, "tree", ocp.args.StandardRestore(placed))
        tree = jax.tree.map(_as_committed, target, tree)
        for path, digest in _digests(tree).items():
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
    def _told(self, what: str) -> Iterator[None]:
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


def _check_layout(place: str, record: Mapping[str, Any]) -> None:
    if record["layout"] != STATE_LAYOUT:
        raise CheckpointError(
            f"{place} has the state's layout {record['layout']}, of manifoldmuon"
            f" {record['version']}, and this is {manifoldmuon.__version__} with layout"
            f" {STATE_LAYOUT}: go on with that version, or restore the parameters alone with Orbax"
            " and initialise the state anew"
        )


def _check_geometry(place: str, saved: Any, given: dict[str, dict[str, str]]) -> None:
    hint = "go on with that geometry, or restore without a table if the change is meant"
    if saved is None:
        raise CheckpointError(f"{place} was saved without a geometry: restore without a table")
    for path in [*saved, *given]:
        if path not in saved or path not in given:
            where = "now" if path in saved else "then"
            raise CheckpointError(
                f"{place} was saved with another geometry: there is no {path!r} {where}; {hint}"
            )
        for column, text in given[path].items():
            if saved[path].get(column) != text:
                raise CheckpointError(
                    f"{place} was saved with another geometry: the {column} of {path!r} was"
                    f" {saved[path].get(column)} and is {text}; {hint}"
                )


def _check_arrays(place: str, saved: Mapping[str, str], target: Any) -> None:
    wanted = {path: _kind(x) for path, x in _leaves(target).items()}
    for path in [*saved, *wanted]:
        then, now = saved.get(path, "nothing"), wanted.get(path, "nothing")
        if then != now:
            raise CheckpointError(
                f"{place} holds another tree: {path!r} was {then} and is {now}; go on with the"
                " model and the optimizer that it was saved with, or restore a part of it with"
                " Orbax"
            )


def _pairing(table: Table) -> dict[str, dict[str, str]]:
    """What each parameter is paired with, by path, as text."""
    found = {}
    for row in table.rows:
        cells = dict(zip(_COLUMNS, row.cells()[1:], strict=True))
        budget = f"{jnp.asarray(row.budget).tolist()}"  # in full: the table's are for reading
        found[row.path] = cells | {"budget": budget, "layout": f"{row.layout}"}
    return found


_COLUMNS = (
    "shape", "copies", "fan-in", "fan-out", "manifold", "norm", "budget", "retraction",
)  # fmt: skip


def _leaves(tree: Any) -> dict[str, Any]:
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
    found = {path_string(path): leaf for path, leaf in pairs}
    if len(found) < len(pairs):
        raise ValueError("two leaves of the tree have paths that read the same: rename a key.")
    return found


def _kind(x: Any) -> str:
    """Dtype and shape of a leaf, such as `float32[64,32]`."""
    x = x if hasattr(x, "dtype") else np.asarray(x)
    return f"{x.dtype}{list(x.shape)}".replace(" ", "")


def _digests(tree: Any) -> dict[str, str]:
    """A digest of every leaf's bytes, by path: 64 bits, as hexadecimal digits."""
    found = {}
    for path, leaf in _leaves(tree).items():
        if _bits(leaf) < 8:
            raise TypeError(
                f"{path!r} has dtype {leaf.dtype}, narrower than a byte: save it in a wider one."
            )
        try:
            found[path] = _digest(leaf if isinstance(leaf, jax.Array) else _words(leaf))
        except TypeError as error:
            raise TypeError(
                f"{path!r} is a {type(leaf).__name__}, neither an array nor a number; what else"
                " there is to save goes into `extra`."
            ) from error
    return {path: np.asarray(digest).tobytes().hex() for path, digest in found.items()}


def _bits(leaf: Any) -> int:
    dtype = getattr(leaf, "dtype", np.dtype(np.float32))
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits
    return jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.floating) else 8


@jax.jit
def _digest(x: Any) -> UInt32[Array, "2"]:
    """Two sums over all words, each mixed with its place: the same however they are sharded.

    One word that differs changes both sums for certain, because `_mix` is a bijection and products
    with odd numbers are; anything else leaves both with probability 2**-64.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    words = jax.lax.bitcast_convert_type(x, f"uint{8 * min(x.dtype.itemsize, 4)}")
    words = words.astype(jnp.uint32)
    place, stride = jnp.zeros_like(words), 1
    for axis in reversed(range(words.ndim)):
        along = jax.lax.iota(jnp.uint32, words.shape[axis]) * np.uint32(stride % 2**32)
        place += along.reshape([-1 if k == axis else 1 for k in range(words.ndim)])
        stride *= words.shape[axis]
    key = _mix(place)
    mixed = _mix(words ^ key)
    return jnp.stack([jnp.sum(mixed, dtype="uint32"), jnp.sum(mixed * (key | 1), dtype="uint32")])


def _mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """The finaliser of MurmurHash3 (A. Appleby), a bijection of the 32-bit words."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _words(leaf: Any) -> UInt32[np.ndarray, "..."]:
    """What is on the host as 32-bit words, as `_digest` takes them on a device."""
    x = np.asarray(leaf)
    if x.dtype.kind not in "biufcV":
        raise TypeError(x.dtype)
    words = np.ascontiguousarray(x).reshape(*x.shape, 1).view(f"u{min(x.dtype.itemsize, 4)}")
    return words.astype(np.uint32)


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
    """What went wrong, without the specification that TensorStore puts behind it."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = re.sub(r" \[\w+=.*", "", " ".join(str(error).split())) or type(error).__name__
    return text if len(text) <= 160 else f"{text[:70]} ... {text[-80:]}"
