"""Steps without a learning rate beside modular descent with the best rate of a grid.

`python -m studies.step_lengths.free_steps --help`: handwritten digits, an MLP and a residual MLP,
unconstrained and constrained. Everything but the length of the steps is the same. What the numbers
say is on docs/math/agd.md.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from studies.estimates import Mean
from studies.program import (
    command,
    integer,
    interrupted,
    parse,
    positive,
    progress,
    refuse_twice,
    save,
)
from studies.step_lengths.free_training import (
    NETWORKS,
    FreeRun,
    free_links,
    train_once,
    trainer,
    tuned_links,
)

Runs = Mapping[str, Mapping[str, Sequence[FreeRun]]]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the comparison.

    Args:
      argv: the command line without the program's name; None for that of the process.

    Returns:
      The exit status. Wrong arguments end the program with status 2.
    """
    what = "Compares steps without a learning rate with tuned learning rates, on digits."
    p = command("studies.step_lengths.free_steps", what)
    # fmt: off
    p.add_argument("--networks", choices=list(NETWORKS), nargs="+", default=list(NETWORKS),
                   metavar="NAME", help=f"which of {', '.join(NETWORKS)} (default: all)")
    p.add_argument("--constrained", action="store_true",
                   help="weights on their manifolds instead of flat space")
    p.add_argument("--steps", type=integer(1), default=300, metavar="N",
                   help="updates (default: %(default)s)")
    p.add_argument("--batch-size", type=integer(1), default=128, metavar="N",
                   help="images per update (default: %(default)s)")
    p.add_argument("--momentum", type=positive, default=0.9, metavar="X",
                   help="decay of the average of gradients, below 1 (default: %(default)s)")
    p.add_argument("--seeds", type=integer(0), nargs="+", default=[0, 1, 2], metavar="N",
                   help="one run for each (default: 0 1 2)")
    # fmt: on
    given = parse(p, argv)
    if given.momentum >= 1:
        p.error(f"argument --momentum: {given.momentum:g} is not below 1")
    refuse_twice(p, given, "seeds", "networks")
    if given.batch_size > 1438:
        p.error(f"argument --batch-size: {given.batch_size} is more than the 1438 training images")
    try:
        runs = train_all(given)
    except KeyboardInterrupt:
        return interrupted()
    for name, found in runs.items():
        print(table(f"{name}, {len(given.seeds)} seeds", found))
    asked = ("networks", "constrained", "steps", "batch_size", "momentum", "seeds")
    settings = {option: getattr(given, option) for option in asked}
    chosen = {name: best(found) for name, found in runs.items()}
    save(given, {"settings": settings, "best": chosen, "runs": runs})
    print("written:", given.out)
    return 0


def train_all(given: Any) -> dict[str, dict[str, list[FreeRun]]]:
    """Every network with every link and seed, under one progress bar."""
    runs: dict[str, dict[str, list[FreeRun]]] = {}
    links = {}
    for name in given.networks:
        net = NETWORKS[name].constrained() if given.constrained else NETWORKS[name]
        links[name] = net, {**free_links(net), **tuned_links(given.steps)}
    total = sum(len(found) for _, found in links.values()) * len(given.seeds) * given.steps
    with progress(total) as bar:
        for name, (net, found) in links.items():
            runs[name] = {}
            for label, link in found.items():
                bar.set_description(f"{name}, {label}", refresh=False)
                run = trainer(net, link, given.momentum)
                runs[name][label] = []
                for seed in given.seeds:
                    runs[name][label].append(
                        train_once(net, run, seed, given.steps, given.batch_size)
                    )
                    bar.update(given.steps)
    return runs


def mean_loss(runs: Sequence[FreeRun]) -> float:
    """Over the seeds; infinite where one has diverged."""
    loss = float(np.mean([run.train_loss for run in runs]))
    return loss if np.isfinite(loss) else float("inf")


def best(found: Mapping[str, Sequence[FreeRun]]) -> str:
    """The learning rate of the grid with the smallest training loss at the end."""
    return min(
        (name for name in found if name.startswith("rate")), key=lambda n: mean_loss(found[n])
    )


def table(title: str, found: Mapping[str, Sequence[FreeRun]]) -> str:
    """The best rate, its two neighbours, and every method without one."""
    rates = [name for name in found if name.startswith("rate")]
    middle = rates.index(best(found))
    shown = [*rates[max(middle - 1, 0) : middle + 2], *(n for n in found if n not in rates)]
    lines = [title, f"{'method':<12} {'train loss':>10}  {'test accuracy':>15}  learning rate, "
             "at 1/30, at half, at the end"]  # fmt: skip
    for name in shown:
        runs = found[name]
        right = Mean.of(100 * run.test_accuracy for run in runs).text(".2f")
        rate = np.mean([run.learning_rate for run in runs], axis=0)
        steps = [len(rate) // 30, len(rate) // 2, len(rate) - 1]
        lengths = "falls linearly" if name in rates else "  ".join(f"{rate[t]:.3f}" for t in steps)
        mark = " (best)" if name == best(found) else ""
        lines.append(f"{name + mark:<17} {mean_loss(runs):>9.5f}  {right:>14} %  {lengths}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
