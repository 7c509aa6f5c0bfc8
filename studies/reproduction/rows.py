"""Rows of the reproduction table: published numbers, with reproduced numbers from the records."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from studies.display import markdown_table
from studies.estimates import estimate, shown
from studies.records import read_record
from studies.study import Record

RESULTS = Path(__file__).parents[1] / "results"
TABLE = "reproduction.md"


class Row(NamedTuple):
    """Published number with its reproductions.

    Attributes:
      what: description of the number and its protocol.
      published: number as in the source.
      reproduced: result with the published protocol.
      corrected: result with the corrected protocol; empty if there is none.
    """

    what: str
    published: str
    reproduced: str
    corrected: str = ""


class Chapter(NamedTuple):
    """Part of the table, from a single record.

    Attributes:
      title: heading.
      command: study that writes the record, with the options it needs.
      rows: function from the record to its rows.
    """

    title: str
    command: str
    rows: Callable[[Record], list[Row]]


def hello_world(record: Record) -> list[Row]:
    """Return the losses of seed 0, their range under rounding, and the range over other seeds."""
    rows = []
    for step, value in ((0, 0.979311), (100, 0.001822), (500, 0.000519), (900, 0.000025)):
        losses = {
            protocol: {
                (row["seed"], row["nudge"]): row["loss"][step // 100]
                for row in record["rows"]
                if row["protocol"] == protocol
            }
            for protocol in ("published", "corrected")
        }
        same = [loss for (seed, _), loss in losses["published"].items() if seed == 0]
        seeds = [loss for (seed, _), loss in losses["published"].items() if seed != 0]
        found = f"{same[0]:.6f}"
        if step:
            found += f" (by rounding {min(same):.6f} to {max(same):.6f}"
            found += f"; seeds 1 to {len(seeds)}: {min(seeds):.6f} to {max(seeds):.6f})"
        corrected = shown(estimate(list(losses["corrected"].values())), ".6f")
        rows.append(Row(f"loss at step {step}", f"{value:.6f}", found, corrected))
    return rows


def hello_mnist(record: Record) -> list[Row]:
    """Return the test accuracy."""
    published, corrected = (record["summary"][name] for name in ("published", "corrected"))
    ours = f"{published['first']:.2f} % (seeds: {shown(published, '.2f', ' %')})"
    return [Row("test accuracy", "90.58 %", ours, shown(corrected, ".2f", " %"))]


def hello_gpt(record: Record) -> list[Row]:
    """Return the character GPT's losses: on the last batch, and on validation windows."""
    found = {name: shown(loss, ".4f") for name, loss in record["summary"]["losses"].items()}
    return [
        Row(
            "training loss: last batch; corrected, last 100", "1.7122",
            found["last_train_loss"], found["late_train_loss"],
        ),
        Row(
            "validation loss: first 240 windows; corrected, the whole split", "1.8968",
            found["validation_first_windows"], found["validation_whole"],
        ),
    ]  # fmt: skip


def manifold_cifar(record: Record) -> list[Row]:
    """Return test accuracies; the published numbers are for the whole data set."""
    published = {
        "exact": ("manifold Muon, exact", ".523"),
        "one step": ("manifold Muon, one step", ".527"),
        "no projection": ("msign without tangent projection", ".523"),
        "adamw": ("AdamW", ".513"),
    }
    return [
        Row(*published[name], *(shown(own, ".3f") for own in found.values()))
        for name, found in record["summary"].items()
    ]


def agd(record: Record) -> list[Row]:
    """Return test accuracies; the published numbers are for the whole data set, fully trained."""
    published = {"4": "63.7 % at width 2048", "16": "52.7 % (53.5 %)"}
    rows = []
    for depth, found in record["summary"].items():
        ours, adams = (100 * found[name]["test_accuracy"] for name in ("agd", "adam"))
        what = f"{depth} layers of width 512: AGD (tuned Adam)"
        rows.append(Row(what, published[depth], f"{ours:.1f} % ({adams:.1f} %)"))
    return rows


def weight_erasure(record: Record) -> list[Row]:
    """Return training accuracies with traces of the letter, and stable ranks of middle updates."""
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
    runs, ranks = record["summary"]["runs"], record["summary"]["stable_ranks"]
    narrow = ", at width 1024" if record["settings"]["width"] != 1024 else ""
    rows = []
    for name, value in published.items():
        if name in runs:
            method, _, rate = name.partition(":")
            label = {"dualized": method, "gradient": "spectrally normalised gradient"}[method]
            what = f"{label}, learning rate {rate}: training accuracy"
            cells = [_erased(runs[key]) for key in (name, f"{name}:all") if key in runs]
            rows.append(Row(what, value + narrow, *cells))
    for width, value in (("32", "1.0 and 22.6"), ("128", "1.0 and 57.7"), ("1024", "1.0 and 145")):
        if row := ranks.get(width):
            what = f"stable rank at width {width}: gradient, dualized (nearest of six readings)"
            found = f"{row['gradient']:.2f} and {row['six steps']:.1f}"
            corrected = f"dualized to convergence: {row['converged']:.1f}"
            rows.append(Row(what, value, found, corrected))
    return rows


def _erased(found: dict[str, Any]) -> str:
    return (
        f"{found['train_accuracy']:.3f}; AUC {found['auc']:.3f}, ratio {found['ratio']:.2f} after "
        f"{found['step']} steps"
    )


CHAPTERS = {
    "hello_world": Chapter(
        "Hello, world (MLP 784-256-256-10 on random targets, 1000 steps)",
        "hello-world",
        hello_world,
    ),
    "hello_mnist": Chapter(
        "Hello, MNIST (the same network, 1000 steps)", "hello-mnist", hello_mnist
    ),
    "hello_gpt": Chapter(
        "Hello, GPT (characters of Shakespeare, 2001 steps)", "gpt --text shakespeare", hello_gpt
    ),
    "hello_gpt-constrained": Chapter(
        "Hello, GPT, with every weight on its manifold",
        "gpt --text shakespeare --optimizer constrained",
        hello_gpt,
    ),
    "hello_gpt-bounded": Chapter(
        "Hello, GPT, in the scaling of the constrained run, its weights free",
        "gpt --text shakespeare --optimizer bounded",
        hello_gpt,
    ),
    "manifold_cifar": Chapter(
        "Manifold Muon on CIFAR-10 (test accuracy after five epochs; corrected: 245 steps)",
        "manifold-cifar",
        manifold_cifar,
    ),
    "agd_cifar10": Chapter(
        "Automatic gradient descent (fully connected on CIFAR-10; 15 epochs of the subset)",
        "agd --data cifar10 --width 512 --depths 4 16 --epochs 15 --learning-rates 1e-4 3e-4 1e-3",
        agd,
    ),
    "weight_erasure": Chapter(
        "Weight erasure (MLP 3072-1024-1024-10 on CIFAR-10)",
        "weight-erasure --runs dualized:0.5 gradient:0.5",
        weight_erasure,
    ),
    "weight_erasure_256": Chapter(
        "Weight erasure, a quarter as wide (MLP 3072-256-256-10)",
        "weight-erasure --width 256 --widths --runs dualized:0.5 gradient:0.5 dualized:2 "
        "gradient:1 dualized:0.25 dualized:0.5:all gradient:0.5:all",
        weight_erasure,
    ),
}


def markdown(records: dict[str, Record]) -> str:
    """Return the table as Markdown, with a heading and a table per chapter."""
    parts = []
    for name, chapter in CHAPTERS.items():
        header = ["", "published", "reproduced", "corrected protocol"]
        table = "not run"
        if name in records:
            table = markdown_table(header, chapter.rows(records[name]))
        parts.append(f"## {chapter.title}\n\n{table}\n\n`python -m studies {chapter.command}`")
    return "\n\n".join(parts) + "\n"


def read_all(results: Path) -> dict[str, Record]:
    """Return the records by name."""
    paths = {name: results / f"{name}.json" for name in CHAPTERS}
    return {name: read_record(path) for name, path in paths.items() if path.exists()}
