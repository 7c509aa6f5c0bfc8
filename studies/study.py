"""A study: a question, cut into cells, whose numbers make a record, a table and a picture.

How to add one. Write `studies/name.py`, or `studies/name/study.py`, with a frozen dataclass:

    @dataclasses.dataclass(frozen=True)
    class CoinTosses(Study):
        \"\"\"How often does a coin show heads?

        The first line is the question, what follows the method: `--help` prints both.
        \"\"\"

        name: ClassVar[str] = "coin-tosses"     # of the command and of the record

        tosses: int = option(100, "tosses of each coin")
        seeds: tuple[int, ...] = option((0, 1, 2), "one coin for each")

        def __post_init__(self):                # wrong settings: one line, before any work
            if self.tosses < 1:
                raise ValueError(f"tosses must be at least 1; got {self.tosses}")

        def cells(self):                        # one per setting and seed: seconds, not hours
            return [{"seed": seed} for seed in self.seeds]

        def run(self, cell):                    # from a cell to what was measured
            rng = np.random.default_rng(cell["seed"])
            return {"heads": float(rng.integers(2, size=self.tosses).mean())}

        def summarise(self, rows):              # a row is a cell and its measurements
            return {"heads": float(np.mean([row["heads"] for row in rows]))}

        def table(self, record):                # for the terminal
            return f"heads: {record['summary']['heads']:.1%}"

        def plot(self, record):                 # a figure, from the record alone
            from matplotlib.figure import Figure

            figure = Figure()
            figure.subplots().hist([row["heads"] for row in record["rows"]])
            return figure

and enter the class in `studies/__init__.py`. The command, its options, the progress bar, resuming,
several processes and the files come with it. Cells see nothing of each other; what they share
(data, compiled functions) goes into a cached function of the module, and cells that share it follow
each other. A page `docs/lab/name.md` states question, method and finding, with the saved figure.
"""

import abc
import dataclasses
import itertools
import json
import typing
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from studies.records import plain

Cell = Mapping[str, Any]
Row = dict[str, Any]
Record = dict[str, Any]


def option(default: Any, help: str, choices: Sequence[Any] = (), recorded: bool = True) -> Any:
    """A setting of a study: a field of its dataclass, and an option of its command.

    Args:
      default: what holds unless something else is said; frozen, such as a tuple.
      help: one line for `--help`.
      choices: the values, or the items of a tuple, that are allowed; empty: all.
      recorded: whether the record holds it; a folder on someone's disk is not part of
        the result.
    """
    metadata = {"help": help, "choices": tuple(choices), "recorded": recorded}
    return dataclasses.field(default=default, metadata=metadata)


class Study(abc.ABC):
    """A measurement as a frozen value: its fields are its settings (see `option`).

    A field is annotated `bool`, `int`, `float`, `str`, `Path | None`, or `tuple[..., ...]` of
    one of them; its default has that type. `__post_init__` raises `ValueError`, in one line,
    where settings do not go together.

    Attributes:
      name: of the command, and of the record unless another is asked for.
      traced: the names in a cell that are arguments of compiled programs. Cells in a row that
        differ in nothing else use the same programs, so they are measured in the same process.
    """

    name: ClassVar[str]
    traced: ClassVar[tuple[str, ...]] = ("seed", "rate")

    @abc.abstractmethod
    def cells(self) -> Sequence[Cell]:
        """The work, cut into parts that are saved one by one.

        A cell is a dictionary of numbers and strings that says what is to be measured, seeds
        included. Same settings, same cells.
        """

    @abc.abstractmethod
    def run(self, cell: Cell) -> Mapping[str, Any]:
        """Measures a cell: returns what `write_record` takes, under other names than the
        cell's."""

    def timed(self, cell: Cell) -> bool:
        """True if a cell measures time, and is therefore measured while nothing else runs."""
        return False

    @abc.abstractmethod
    def summarise(self, rows: Sequence[Row]) -> Mapping[str, Any]:
        """The findings in numbers, from all rows in the order of the cells; a row is `cell |
        run(cell)`, as JSON would give it back (None for NaN and infinity)."""

    @abc.abstractmethod
    def table(self, record: Record) -> str:
        """The findings as text for a terminal."""

    @abc.abstractmethod
    def plot(self, record: Record) -> Any:
        """The findings as a matplotlib `Figure`, from nothing but the record."""

    def settings(self) -> dict[str, Any]:
        """The settings that a record holds, in the types of JSON."""
        kept = (field for field in fields_of(type(self)) if field.metadata["recorded"])
        return json.loads(json.dumps({field.name: getattr(self, field.name) for field in kept}))

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> "Study":
        """The study whose `settings()` these are.

        Raises:
          ValueError: a setting that the study does not have, or a wrong one.
        """
        names = {field.name for field in fields_of(cls)}
        if unknown := sorted(set(settings) - names):
            raise ValueError(f"{cls.name} has no settings {', '.join(unknown)}")
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()})


def check_choices(study: Study) -> None:
    """Raises `ValueError` for a setting that is not among its choices."""
    for field in fields_of(type(study)):
        value, choices = getattr(study, field.name), field.metadata["choices"]
        items = value if isinstance(value, tuple) else (value,)
        if choices and not set(items) <= set(choices):
            raise ValueError(f"{field.name} must be among {choices}; got {value!r}")


def check_rival(rival: str, methods: Sequence[str], seeds: Sequence[int]) -> None:
    """Raises `ValueError` unless the rival is among the methods, and two or more seeds differ."""
    if rival not in methods or len(set(seeds)) < max(2, len(seeds)):
        raise ValueError(
            f"the methods must include {rival!r}, and there must be two or more different seeds; "
            f"got {methods} and {seeds}"
        )


def fields_of(study: type[Study]) -> tuple[dataclasses.Field, ...]:
    """The settings of a kind of study."""
    return dataclasses.fields(typing.cast(Any, study))


def types_of(study: type[Study]) -> dict[str, Any]:
    """The annotation of each setting."""
    hints = typing.get_type_hints(study)
    return {field.name: hints[field.name] for field in fields_of(study)}


def measured(study: Study, cell: Cell) -> Row:
    """The row of a cell.

    Raises:
      ValueError: the study measures what the cell says already.
    """
    found = plain(study.run(cell))
    if twice := cell.keys() & found.keys():
        raise ValueError(f"a cell of {study.name} measures {sorted(twice)}, which it is")
    return {**cell, **found}


def groups_of(study: Study, cells: Sequence[Cell]) -> list[list[Cell]]:
    """The cells in their order, cut where another compiled program begins (`Study.traced`)."""

    def program(cell: Cell) -> Cell:
        return {name: value for name, value in cell.items() if name not in study.traced}

    return [list(group) for _, group in itertools.groupby(cells, program)]
