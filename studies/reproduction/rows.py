"""Rows of the reproduction table: published numbers, with reproduced numbers from the records."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from studies.display import markdown_table
from studies.estimates import estimate, shown

Record = dict[str, Any]

NOT_RUN = "not run"


class Row(NamedTuple):
    """Published number with its reproductions.

    Attributes:
      what: description of the number and its protocol.
      published: number as in the source.
      reproduced: result with the published protocol; None without a record.
      corrected: result with the corrected protocol; empty if there is nothing to correct.
    """

    what: str
    published: str
    reproduced: str | None
    corrected: str | None = ""


class Chapter(NamedTuple):
    """Part of the table, from a single record.

    Attributes:
      title: heading.
      command: module that writes the record, with the options it needs.
      rows: function from the record (None if missing) to its rows.
    """

    title: str
    command: str
    rows: Callable[[Record | None], list[Row]]


def mean(values: Iterable[float], form: str = ".4f", scale: float = 1.0) -> str:
    """Return mean and half of the 95 % interval as text."""
    return shown(estimate([scale * value for value in values]), form)


def hello_world(record: Record | None) -> list[Row]:
    """Return the losses of seed 0, their range under rounding, and the range over other seeds."""
    rows = []
    for step, value in ((0, 0.979311), (100, 0.001822), (500, 0.000519), (900, 0.000025)):
        what = f"loss at step {step}"
        if record is None:
            rows.append(Row(what, f"{value:.6f}", None, None))
            continue
        ours = [run for run in record["runs"] if run["protocol"] == "published"]
        same = [run["loss"][step // 100] for run in ours if run["seed"] == 0]
        seeds = [run["loss"][step // 100] for run in ours if run["seed"] != 0]
        corrected = [
            run["loss"][step // 100] for run in record["runs"] if run["protocol"] == "corrected"
        ]
        found = f"{same[0]:.6f}"
        if step:
            found += f" (by rounding {min(same):.6f} to {max(same):.6f}"
            found += f"; seeds 1 to {len(seeds)}: {min(seeds):.6f} to {max(seeds):.6f})"
        rows.append(Row(what, f"{value:.6f}", found, mean(corrected, ".6f")))
    return rows


def hello_mnist(record: Record | None) -> list[Row]:
    """Return the test accuracy."""
    if record is None:
        return [Row("test accuracy", "90.58 %", None, None)]
    found = {
        name: [run["test_accuracy"] for run in record["runs"] if run["protocol"] == name]
        for name in ("published", "corrected")
    }
    ours = (
        f"{100 * found['published'][0]:.2f} % (seeds: {mean(found['published'], '.2f', 100.0)} %)"
    )
    corrected = f"{mean(found['corrected'], '.2f', 100.0)} %"
    return [Row("test accuracy", "90.58 %", ours, corrected)]


def hello_gpt(record: Record | None) -> list[Row]:
    """Return the character GPT's losses: on the last batch, and on validation windows."""
    if record is None:
        return [
            Row("training loss", "1.7122", None, None),
            Row("validation loss", "1.8968", None, None),
        ]

    def values(name: str) -> str:
        return mean(run[name] for run in record["runs"])

    train = Row(
        "training loss: last batch; corrected, last 100",
        "1.7122",
        values("last_train_loss"),
        values("late_train_loss"),
    )
    validation = Row(
        "validation loss: first 240 windows; corrected, the whole split",
        "1.8968",
        values("validation_first_windows"),
        values("validation_whole"),
    )
    return [train, validation]


def manifold_cifar(record: Record | None) -> list[Row]:
    """Return test accuracies; the published numbers are for the whole data set."""
    published = {"exact": ".523", "one step": ".527", "no projection": ".523", "adamw": ".513"}
    labels = {
        "exact": "manifold Muon, exact",
        "one step": "manifold Muon, one step",
        "no projection": "msign without tangent projection",
        "adamw": "AdamW",
    }
    if record is None:
        return [Row(labels[name], value, None, None) for name, value in published.items()]
    lengths = sorted({run["steps"] for run in record["runs"]})
    rows = []
    for name, value in published.items():
        cells = [
            mean(
                (
                    run["test_accuracy"]
                    for run in record["runs"]
                    if run["method"] == name and run["steps"] == steps
                ),
                ".3f",
            )
            for steps in lengths
        ]
        same, more = cells[0], cells[1] if len(cells) > 1 else ""
        rows.append(Row(labels[name], value, same, more))
    return rows


def agd(record: Record | None) -> list[Row]:
    """Return test accuracies; the published numbers are for the whole data set, fully trained."""
    published = {4: "63.7 % at width 2048", 16: "52.7 % (53.5 %)"}
    rows = []
    for depth, value in published.items():
        found = None
        if record is not None:
            runs = [run for run in record["runs"] if run["depth"] == depth]
            final = {run["method"]: 100 * run["test_accuracy"][-1] for run in runs}
            found = f"{final['agd']:.1f} % ({final[record['best_adam'][str(depth)]]:.1f} %)"
        rows.append(Row(f"{depth} layers of width 512: AGD (tuned Adam)", value, found, ""))
    return rows


def weight_erasure(record: Record | None) -> list[Row]:
    """Return training accuracies with traces of the letter, and stable ranks of middle updates."""
    runs = record["runs"] if record else {}
    published = {
        "dualized:0.25": "1.00; the letter fades",
        "dualized:0.5": "1.00; the letter is gone",
        "dualized:1": ".999; gone",
        "dualized:2": ".987; gone",
        "gradient:0.25": ".601; the letter stays",
        "gradient:0.5": ".696; stays",
        "gradient:1": ".758; stays",
        "gradient:2": ".451; stays",
    }
    rows = []
    narrow = record is not None and record["settings"]["width"] != 1024
    if narrow:  # another network: show only existing runs
        published = {name: f"{value}, at width 1024" for name, value in published.items()}
        published = {name: value for name, value in published.items() if name in runs}
    for name, value in published.items():
        method, _, rate = name.partition(":")
        label = {"dualized": "dualized", "gradient": "spectrally normalised gradient"}[method]
        cells = [_erased(runs.get(key)) for key in (name, f"{name}:all")]
        if narrow and cells[1] is None:
            cells[1] = ""
        rows.append(Row(f"{label}, learning rate {rate}: training accuracy", value, *cells))
    if record and not record["stable_ranks"]:
        return rows
    ranks = {row["width"]: row for row in reversed(record["stable_ranks"])} if record else {}
    for width, value in ((32, "1.0 and 22.6"), (128, "1.0 and 57.7"), (1024, "1.0 and 145")):
        what = f"stable rank at width {width}: gradient, dualized (nearest of six readings)"
        row = ranks.get(width)
        cells: list[str | None] = [None, None]
        if row is not None:
            cells = [f"{row['gradient']:.2f} and {row['six steps']:.1f}"]
            cells += [f"dualized to convergence: {row['converged']:.1f}"]
        rows.append(Row(what, value, *cells))
    return rows


def _erased(curves: Record | None) -> str | None:
    if curves is None:
        return None
    step, auc, ratio = (curves[key][-1] for key in ("step", "auc", "ratio"))
    accuracy = curves["train_accuracy"][-1]
    return f"{accuracy:.3f}; AUC {auc:.3f}, ratio {ratio:.2f} after {step} steps"


NARROW = ("--width", "256", "--widths", "--runs", "dualized:0.25", "dualized:0.5", "dualized:2",
          "gradient:0.5", "gradient:1", "dualized:0.5:all", "gradient:0.5:all")  # fmt: skip
"""Options for a run of minutes; the published width takes hours."""

SHORT = ("--data", "cifar10", "--width", "512", "--depths", "4", "16", "--epochs", "15",
         "--learning-rates", "1e-4", "3e-4", "1e-3")  # fmt: skip
"""Options for a run of minutes; the published figures took longer training."""

CHAPTERS = {
    "hello_world": Chapter(
        "Hello, world (MLP 784-256-256-10 on random targets, 1000 steps)",
        "studies.reproduction.hello_world",
        hello_world,
    ),
    "hello_mnist": Chapter(
        "Hello, MNIST (the same network, 1000 steps)",
        "studies.reproduction.hello_mnist",
        hello_mnist,
    ),
    "hello_gpt": Chapter(
        "Hello, GPT (characters of Shakespeare, 2001 steps)", "studies.gpt", hello_gpt
    ),
    "hello_gpt-constrained": Chapter(
        "Hello, GPT, with every weight on its manifold",
        "studies.gpt --optimizer constrained",
        hello_gpt,
    ),
    "hello_gpt-bounded": Chapter(
        "Hello, GPT, in the scaling of the constrained run, its weights free",
        "studies.gpt --optimizer bounded",
        hello_gpt,
    ),
    "manifold_cifar": Chapter(
        "Manifold Muon on CIFAR-10 (test accuracy after five epochs; corrected: 245 steps)",
        "studies.reproduction.manifold_cifar",
        manifold_cifar,
    ),
    "agd_cifar10": Chapter(
        "Automatic gradient descent (fully connected on CIFAR-10; 15 epochs of the subset)",
        f"studies.step_lengths.agd {' '.join(SHORT)}",
        agd,
    ),
    "weight_erasure": Chapter(
        "Weight erasure (MLP 3072-1024-1024-10 on CIFAR-10)",
        "studies.reproduction.weight_erasure",
        weight_erasure,
    ),
    "weight_erasure_256": Chapter(
        "Weight erasure, a quarter as wide (MLP 3072-256-256-10)",
        f"studies.reproduction.weight_erasure {' '.join(NARROW)}",
        weight_erasure,
    ),
}


def cell(text: str | None) -> str:
    """Return the text of a cell."""
    return NOT_RUN if text is None else text


def markdown(records: dict[str, Record | None]) -> str:
    """Return the table as Markdown, with a heading and a table per chapter."""
    parts = []
    for name, chapter in CHAPTERS.items():
        rows = [
            [row.what, row.published, cell(row.reproduced), cell(row.corrected)]
            for row in chapter.rows(records.get(name))
        ]
        table = markdown_table(["", "published", "reproduced", "corrected protocol"], rows)
        parts.append(f"## {chapter.title}\n\n{table}\n\n`python -m {chapter.command}`")
    return "\n\n".join(parts) + "\n"


def text(records: dict[str, Record | None]) -> str:
    """Return the table for a terminal."""
    parts = []
    for name, chapter in CHAPTERS.items():
        rows = chapter.rows(records.get(name))
        lines = [chapter.title]
        for row in rows:
            lines.append(f"  {row.what}")
            values: Sequence[str | None] = row[1:]
            for label, value in zip(("published", "reproduced", "corrected"), values, strict=True):
                if value != "":
                    lines.append(f"    {label:<11} {cell(value)}")
        if any(None in row for row in rows):
            lines.append(f"  what is not run: python -m {chapter.command}")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)
