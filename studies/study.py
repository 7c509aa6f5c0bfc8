"""A study: a question, measured in cells, with a record, a table and a picture.

To add a study, write `studies/name.py` or `studies/name/study.py` with a frozen dataclass:

    @dataclasses.dataclass(frozen=True)
    class CoinTosses(Study):
        \"\"\"How often does a coin show heads?

        The first line is the question, the rest is the method: `--help` prints both.
        \"\"\"

        name: ClassVar[str] = "coin-tosses"     # names the command and the record

        tosses: int = option(100, "tosses of each coin")
        seeds: tuple[int, ...] = option((0, 1, 2), "one coin for each")

        def __post_init__(self):                # reject invalid settings, before any work
            if self.tosses < 1:
                raise ValueError(f"tosses must be at least 1; got {self.tosses}")

        def cells(self):                        # each setting and seed: seconds, not hours
            return [{"seed": seed} for seed in self.seeds]

        def run(self, cell):                    # measure a cell
            rng = np.random.default_rng(cell["seed"])
            return {"heads": float(rng.integers(2, size=self.tosses).mean())}

        def summarise(self, rows):              # a row is a cell and its measurements
            return {"heads": float(np.mean([row["heads"] for row in rows]))}

        def table(self, record):                # for the terminal
            return f"heads: {record['summary']['heads']:.1%}"

        def plot(self, record):                 # optional: a figure, from the record alone
            from matplotlib.figure import Figure

            figure = Figure()
            figure.subplots().hist([row["heads"] for row in record["rows"]])
            return figure

and list the class in `studies/__init__.py`. The command, its options, the progress bar, resuming,
multiprocessing and the files are automatic. Cells are independent. Keep shared data and compiled
functions in a cached function of the module, and list cells that share them next to each other;
`studies.training.train` is the loop. Document question and answer in `docs/lab/index.md`, with
the saved figure and its record.
"""

import abc
import dataclasses
import itertools
import typing
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from studies.records import plain

Cell = Mapping[str, Any]
Row = dict[str, Any]
Record = dict[str, Any]


def option(default: Any, help: str, choices: Sequence[Any] = (), recorded: bool = True) -> Any:
    """Declare a setting: a field of the dataclass and an option of its command.

    Args:
      default: an immutable default value, such as a tuple.
      help: a line for `--help`.
      choices: allowed values (allowed items of a tuple); empty allows all.
      recorded: whether the record stores the setting. False for local folders, which are not
        part of the result.
    """
    metadata = {"help": help, "choices": tuple(choices), "recorded": recorded}
    return dataclasses.field(default=default, metadata=metadata)


class Study(abc.ABC):
    """A measurement as a frozen value: its fields are its settings (see `option`).

    A field is annotated `bool`, `int`, `float`, `str`, `Path | None`, or `tuple[..., ...]` of
    such a type; its default has that type. `__post_init__` raises a one-line `ValueError` for
    incompatible settings.

    Attributes:
      name: the name of the command and the default name of the record.
      traced: the keys of a cell that are arguments of compiled programs. Consecutive cells
        that differ only in these keys share their programs, so the same process measures them.
    """

    name: ClassVar[str]
    traced: ClassVar[tuple[str, ...]] = ("seed", "rate")

    @abc.abstractmethod
    def cells(self) -> Sequence[Cell]:
        """Divide the work into cells, each saved as soon as it is measured.

        A cell is a dictionary of numbers and strings (seeds included) that defines a measurement.
        The same settings always give the same cells.
        """

    @abc.abstractmethod
    def run(self, cell: Cell) -> Mapping[str, Any]:
        """Measure a cell: return values that `write_record` accepts. Keys of the cell are not
        allowed."""

    def timed(self, cell: Cell) -> bool:
        """Return True if a cell measures time; such a cell runs alone."""
        return False

    @abc.abstractmethod
    def summarise(self, rows: Sequence[Row]) -> Mapping[str, Any]:
        """Summarise all rows, in the order of the cells. A row is `cell | run(cell)` after a
        round trip through JSON (None for NaN and infinity)."""

    @abc.abstractmethod
    def table(self, record: Record) -> str:
        """Format the findings as text for a terminal."""

    def plot(self, record: Record) -> Any:
        """Plot the findings as a matplotlib `Figure`, from the record alone; None for no figure."""
        return None

    def settings(self) -> dict[str, Any]:
        """Return the recorded settings, in JSON types."""
        kept = (field for field in fields_of(type(self)) if field.metadata["recorded"])
        return plain({field.name: getattr(self, field.name) for field in kept})

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> "Study":
        """Create a study from its `settings()`.

        Raises:
          ValueError: a setting is unknown or invalid.
        """
        names = {field.name for field in fields_of(cls)}
        if unknown := sorted(set(settings) - names):
            raise ValueError(f"{cls.name} has no settings {', '.join(unknown)}")
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()})


def check_choices(study: Study) -> None:
    """Raise `ValueError` for a setting that is not among its choices."""
    for field in fields_of(type(study)):
        value, choices = getattr(study, field.name), field.metadata["choices"]
        items = value if isinstance(value, tuple) else (value,)
        if choices and not set(items) <= set(choices):
            raise ValueError(f"{field.name} must be among {choices}; got {value!r}")


def check_rival(rival: str, methods: Sequence[str], seeds: Sequence[int]) -> None:
    """Raise `ValueError` unless the rival is among the methods and the seeds, two or more, all
    differ."""
    if rival not in methods or len(set(seeds)) < max(2, len(seeds)):
        raise ValueError(
            f"methods must include {rival!r}, and seeds be two or more different numbers; got "
            f"{methods} and {seeds}"
        )


def fields_of(study: type[Study]) -> tuple[dataclasses.Field, ...]:
    """Return the dataclass fields (settings) of a study class."""
    return dataclasses.fields(typing.cast(Any, study))


def types_of(study: type[Study]) -> dict[str, Any]:
    """Return the annotation of each setting."""
    hints = typing.get_type_hints(study)
    return {field.name: hints[field.name] for field in fields_of(study)}


def measured(study: Study, cell: Cell) -> Row:
    """Return the row of a cell; a measurement must not have the name of a key of the cell."""
    found = plain(study.run(cell))
    assert not cell.keys() & found.keys(), f"{study.name} measures what a cell is"
    return {**cell, **found}


def groups_of(study: Study, cells: Sequence[Cell]) -> list[list[Cell]]:
    """Group consecutive cells that share their compiled programs (`Study.traced`)."""

    def program(cell: Cell) -> Cell:
        return {name: value for name, value in cell.items() if name not in study.traced}

    return [list(group) for _, group in itertools.groupby(cells, program)]
