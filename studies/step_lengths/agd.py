"""Automatic gradient descent against tuned Adam, on fully-connected networks of several depths.

`python -m studies.step_lengths.agd --help`: a progress bar, a table, a picture and a record. Both
methods use the same semi-orthogonal initial weights and the same batches in the same order. The
results are on docs/math/agd.md.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from studies import datasets
from studies.digits.figure import save as save_figure
from studies.program import (
    Parser,
    command,
    errors_in_one_line,
    integer,
    interrupted,
    load,
    parse,
    positive,
    progress,
    refuse_twice,
)
from studies.program import save as save_record
from studies.step_lengths.agd_training import AGDRun, AGDSettings, methods, scale_images, train

Runs = Mapping[int, Mapping[str, AGDRun]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison.

    Args:
      argv: the command line without the program's name; None reads the command line of the
        process.

    Returns:
      The exit status. Invalid arguments and missing data exit with status 2.
    """
    p = parser()
    given = parse(p, argv, beside=(".png",))
    settings = AGDSettings(
        data=given.data, width=given.width, depths=tuple(given.depths), epochs=given.epochs,
        batch_size=given.batch_size, learning_rates=tuple(given.learning_rates), gain=given.gain,
        seed=given.seed,
    )  # fmt: skip
    refuse_twice(p, given, "depths", "learning_rates")
    if given.data == "digits" and given.data_dir is not None:
        p.error("argument --data-dir: the digits ship inside scikit-learn; choose --data mnist")
    loader = {
        "digits": lambda folder: datasets.load_digits(settings.seed),
        "mnist": datasets.load_mnist,
        "cifar10": datasets.load_cifar10,
    }[settings.data]
    data = scale_images(datasets.standardise(load(p, loader, given.data_dir)))
    if settings.batch_size > len(data.train_y):
        p.error(f"argument --batch-size: there are only {len(data.train_y)} training images")
    try:
        runs = train_all(settings, data)
    except KeyboardInterrupt:
        return interrupted()
    print(table(settings, runs))
    save_record(given, as_record(settings, runs))
    with errors_in_one_line():
        save_figure(picture(runs), given.out.with_suffix(".png"))
    print("written:", given.out, given.out.with_suffix(".png"))
    return 0


def parser() -> Parser:
    """Create the parser of `python -m studies.step_lengths.agd`."""
    default = AGDSettings()
    what = "Trains ReLU networks of several depths with automatic gradient descent, and with Adam."
    p = command("studies.step_lengths.agd", what, "mnist or cifar10")
    # fmt: off
    p.add_argument("--data", choices=["digits", "mnist", "cifar10"], default=default.data,
                   help="data set; the default, digits, needs no download")
    p.add_argument("--width", type=integer(1), default=default.width, metavar="N",
                   help="of the hidden layers (default: %(default)s)")
    p.add_argument("--depths", type=integer(1), nargs="+", default=default.depths, metavar="N",
                   help=f"linear layers (default: {' '.join(map(str, default.depths))})")
    p.add_argument("--epochs", type=integer(1), default=default.epochs, metavar="N",
                   help="passes over the training images (default: %(default)s)")
    p.add_argument("--batch-size", type=integer(1), default=default.batch_size, metavar="N",
                   help="images per update (default: %(default)s)")
    p.add_argument("--learning-rates", type=positive, nargs="+", default=default.learning_rates,
                   metavar="RATE", help="of Adam, one run for each (default: "
                   f"{' '.join(f'{x:g}' for x in default.learning_rates)})")
    p.add_argument("--gain", type=positive, default=default.gain, metavar="X",
                   help="multiplies the automatic step (default: %(default)g, as published)")
    p.add_argument("--seed", type=integer(0), default=default.seed, metavar="N",
                   help="of weights and batches (default: %(default)s)")
    # fmt: on
    return p


def train_all(settings: AGDSettings, data: datasets.FlatImages) -> dict[int, dict[str, AGDRun]]:
    """Train every depth with every method, with a common progress bar."""
    runs: dict[int, dict[str, AGDRun]] = {}
    names = list(methods(settings))
    steps = settings.steps_per_epoch(len(data.train_y))
    with progress(len(settings.depths) * len(names) * settings.epochs * steps) as bar:

        def report(loss: float, accuracy: float) -> None:
            bar.set_postfix_str(f"loss {loss:.4f}, test {100 * accuracy:.1f} %", refresh=False)
            bar.update(steps)

        for depth in settings.depths:
            runs[depth] = {}
            for name in names:
                bar.set_description(f"depth {depth}, {name}", refresh=False)
                runs[depth][name] = train(settings, depth, name, data, report)
    return runs


def best_adam(runs: Mapping[str, AGDRun]) -> str:
    """Return the name of Adam's run with the highest final test accuracy, so Adam is tuned on the
    reported metric."""
    return max((name for name in runs if name != "agd"), key=lambda n: runs[n].test_accuracy[-1])


def table(settings: AGDSettings, runs: Runs) -> str:
    """Format automatic gradient descent and the best Adam by depth."""
    lines = [f"{settings.data}, width {settings.width}, {settings.epochs} epochs of batches of "
             f"{settings.batch_size}",
             f"{'depth':>5}  {'method':<14} {'train loss':>10}  {'train acc.':>10}  "
             f"{'test acc.':>10}"]  # fmt: skip
    for depth, found in runs.items():
        for name in ("agd", best_adam(found)):
            run = found[name]
            lines.append(
                f"{depth:>5}  {name:<14} {run.train_loss[-1]:>10.4f}  "
                f"{100 * run.train_accuracy[-1]:>8.2f} %  {100 * run.test_accuracy[-1]:>8.2f} %"
            )
    return "\n".join(lines)


def as_record(settings: AGDSettings, runs: Runs) -> dict[str, Any]:
    """Return the settings and all curves."""
    return {
        "settings": dataclasses.asdict(settings),
        "runs": [dataclasses.asdict(run) for found in runs.values() for run in found.values()],
        "best_adam": {str(depth): best_adam(found) for depth, found in runs.items()},
    }


def picture(runs: Runs) -> Figure:
    """Plot training loss, test accuracy and automatic step length, with a column per depth."""
    figure = Figure(figsize=(2.9 * len(runs) + 0.8, 7), dpi=150, layout="constrained")
    panels = figure.subplots(3, len(runs), sharex=True, sharey="row", squeeze=False)
    for (depth, found), (loss, accuracy, eta) in zip(runs.items(), panels.T, strict=True):
        best = best_adam(found)
        for name, run in found.items():
            style: dict[str, Any] = {"color": "#c9c9c9", "linewidth": 1}
            if name == "agd":
                style = {"color": "#0072B2", "linewidth": 2, "zorder": 3}
            elif name == best:
                style = {"color": "#E69F00", "linewidth": 2}
            loss.plot(run.train_loss, **style)
            accuracy.plot([100 * x for x in run.test_accuracy], **style)
        eta.plot(range(1, len(found["agd"].eta) + 1), found["agd"].eta, color="#0072B2")
        loss.set_yscale("log")
        eta.set_yscale("log")
        loss.set_title(f"depth {depth}: Adam best at {best.removeprefix('adam ')}", fontsize=9)
        eta.set_xlabel("epoch")
    for panel, label in zip(panels[:, 0], ("training loss", "test accuracy (%)", "step length"),
                            strict=True):  # fmt: skip
        panel.set_ylabel(label)
    for panel in panels.flat:
        panel.grid(color="#e2e2e2", linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Automatic gradient descent (blue), Adam at its best rate (orange), at others",
                    fontsize=10)  # fmt: skip
    return figure


if __name__ == "__main__":
    sys.exit(main())
