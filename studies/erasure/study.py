"""Weight erasure: which training overwrites its initial weights, and do constraints matter?"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from studies.classification import shapes_of
from studies.display import short, text_table
from studies.erasure.findings import findings
from studies.erasure.methods import FLAT, RETRACTIONS, method_of, split
from studies.erasure.picture import picture
from studies.erasure.training import Protocol, curves, problem, ranks
from studies.estimates import shown
from studies.study import Cell, Record, Row, Study, option

METHODS = (
    "gradient",
    "normalized",
    "adam",
    *(f"dualized:{variant}" for variant in ("six-steps", "exact")),
    *(
        f"{space}:{variant}"
        for space, retractions in RETRACTIONS.items()
        # orthogonal has the same twin as stiefel.
        for variant in ((FLAT,) if space != "orthogonal" else ()) + tuple(retractions)
    ),
)


@dataclasses.dataclass(frozen=True)
class WeightErasure(Study):
    """Which training overwrites its initial weights, and do constraints speed up erasure?

    The middle matrix of a network with two hidden layers is multiplied by a mask that is zero on
    the letter "a"; then the network is trained on the squared error without momentum. Readability
    of the letter is the area under the ROC curve (AUC) of |W_ij| as a predictor of the mask: 1 is a
    sharp letter, 0.5 no letter. "normalized" gradients have the spectral norm of dualized gradients
    but keep their low stable rank. A constrained method such as stiefel:polar is compared with its
    unconstrained twin, stiefel:flat: the same start and the steepest direction of the same norm.
    The comparison is paired by seed, with Student's 95 % intervals; a single seed decides nothing.
    The retraction "none" keeps the end point of the step: its weights leave the manifold, and may
    become infinite. The published numbers are from the Modula documentation: --data cifar10
    --width 1024 --steps 1001 --batch 1024.
    """

    name: ClassVar[str] = "weight-erasure"

    # fmt: off
    data: str = option("digits", "the images", choices=("digits", "mnist", "cifar10"))
    data_dir: Path | None = option(None, "folder of mnist or cifar10; left out: the "
                                   "folder of downloads", recorded=False)
    everything: bool = option(False, "whether batches come from all training images, or from the "
                              "first 3072, as published")
    width: int = option(64, "of the hidden layers")
    second_width: int | None = option(None, "of the second one, if it is to differ")
    methods: tuple[str, ...] = option(METHODS, "ways of training, with a variant after a colon: "
                                      "of dualized exact or six-steps, of a manifold a retraction "
                                      "or flat")
    rates: tuple[float, ...] = option((1 / 16, 1 / 4, 1 / 2, 1.0), "learning rates, constant")
    retraction_rates: tuple[float, ...] = option((1 / 4,), "those of all but the first retraction "
                                                 "of a manifold: they agree to first order")
    gradient_rates: tuple[float, ...] = option((0.1, 0.3, 1.0), "those of plain gradient descent")
    adam_rates: tuple[float, ...] = option((3e-4, 3e-3, 3e-2), "those of Adam")
    steps: int = option(301, "of each run")
    batch: int = option(256, "images in a step, drawn with replacement")
    rounds: int = option(30, "of masking and projecting before constrained training; 1: the "
                         "nearest point")
    widths: tuple[int, ...] = option((32, 128, 1024), "at which stable ranks are measured")
    seeds: tuple[int, ...] = option((0, 1, 2), "of weights and batches")
    # fmt: on

    def __post_init__(self):
        for what in ("steps", "batch", "rounds"):
            if getattr(self, what) < 1:
                raise ValueError(f"{what} must be at least 1; got {getattr(self, what)}")
        if (least := min(*self._hidden, *self.widths)) < 8:
            raise ValueError(f"a letter needs a width of at least 8; got {least}")
        for what in _RATES:
            if not all(rate >= 0 for rate in getattr(self, what)):
                raise ValueError(f"{what} must not be negative; got {getattr(self, what)}")
        for what in ("methods", "widths", "seeds", *_RATES):
            given = getattr(self, what)
            if len(set(given)) < len(given):
                raise ValueError(f"{what} must differ from each other; got {given}")
        if not self.seeds:
            raise ValueError("seeds must hold at least one")
        if self.data == "digits" and self.data_dir is not None:
            raise ValueError("data_dir is for mnist and cifar10; the digits ship with scikit-learn")
        for name in self.methods:
            method_of(name, tuple(shapes_of((64, *self._hidden, 10))))

    def cells(self) -> Sequence[Cell]:
        ranked = itertools.product(self.widths, self.seeds)
        runs = ((m, r, s) for m in self.methods for r in self._rates_of(m) for s in self.seeds)
        return [
            *({"part": "ranks", "width": width, "seed": seed} for width, seed in ranked),
            *({"part": "run", "method": m, "rate": r, "seed": s} for m, r, s in runs),
        ]

    def run(self, cell: Cell) -> Mapping[str, Any]:
        if cell["part"] == "ranks":
            return ranks(self._problem((cell["width"],) * 2), self.batch, cell["seed"])
        protocol = Protocol(cell["rate"], self.steps, self.batch, self.rounds, cell["seed"])
        return curves(cell["method"], self._problem(self._hidden), protocol)

    def summarise(self, rows: Sequence[Row]) -> Mapping[str, Any]:
        protocol = {
            "data": self.data,
            "everything": self.everything,
            "widths": self._hidden,
            "steps": self.steps,
            "batch": self.batch,
            "rounds": self.rounds,
            "seeds": self.seeds,
        }
        return findings(rows, protocol)

    def table(self, record: Record) -> str:
        summary = record["summary"]
        lines = [
            [
                run["method"],
                format(run["rate"], "g"),
                *(shown(run[what], ".3f") for what in ("train_accuracy", "test_accuracy")),
                *(shown(run[what], ".3f") for what in ("start_auc", "auc")),
                shown(run["half_life"], ".1f"),
                short(run["ratio"]["mean"], ".3f"),
                short(run["update_rank"]["mean"], ".1f"),
            ]
            for run in summary["runs"]
        ]
        header = ["", "rate", "accuracy", "test", "AUC at 0", "AUC", "half-life", "ratio", "rank"]
        said = [_protocol(summary["protocol"]), ""]
        for claim in summary["claims"]:
            said.append(f"- {claim['claim']}: {_HOLDS[claim['holds']]}")
            if not claim["published_size"] and claim["holds"] is not None:
                said[-1] += ", at another size than the published one"
            said += [f"    {name}: {_part(part)}" for name, part in claim["parts"].items()]
        said += [f"- {method}: {_answer(found)}" for method, found in summary["answer"].items()]
        return "\n".join([text_table(header, lines), "", *said])

    def plot(self, record: Record) -> Any:
        return picture(record)

    @property
    def _hidden(self) -> tuple[int, int]:
        return self.width, self.width if self.second_width is None else self.second_width

    def _problem(self, hidden: tuple[int, int]) -> Any:
        return problem(self.data, self.data_dir, self.everything, hidden)

    def _rates_of(self, method: str) -> tuple[float, ...]:
        special = {"gradient": self.gradient_rates, "adam": self.adam_rates}
        own = special.get(method, self.rates)
        return own if method in _firsts(self.methods) else self.retraction_rates


_RATES = ("rates", "retraction_rates", "gradient_rates", "adam_rates")


def _firsts(methods: Sequence[str]) -> set[str]:
    """Drop methods that differ from an earlier method only in the retraction."""
    firsts: dict[str, str] = {}
    for name in methods:
        kind, variant = split(name)
        firsts.setdefault(kind if kind in RETRACTIONS and variant != FLAT else name, name)
    return set(firsts.values())


_HOLDS = {True: "holds", False: "does not hold", None: "not measured"}
_PREVENTS = {
    True: "prevents erasure",
    False: "does not prevent erasure",
    None: "whether it prevents erasure is not measured",
}


def _protocol(protocol: Mapping[str, Any]) -> str:
    first, second = protocol["widths"]
    size = "" if protocol["published_size"] else "not "
    return (
        f"{protocol['data']}, hidden layers of {first} and {second}, {protocol['steps']} steps "
        f"with batches of {protocol['batch']}: {size}the published size; seeds: "
        f"{len(protocol['seeds'])}, intervals: 95 %; rank: the stable one of the last update"
    )


def _part(part: Mapping[str, Any]) -> str:
    if part["holds"] is None:
        return _HOLDS[None]
    closest, worst = part["closest"], part["worst_seed"]
    where = " ".join(f"{key} {value:g}" for key, value in closest.items() if key != "mean")
    return (
        f"{_HOLDS[part['holds']]} ({closest['mean']:.3f} at {where}; worst seed "
        f"{worst['value']:.3f})"
    )


def _answer(found: Mapping[str, Any]) -> str:
    speedup, auc = found["speedup"], found["auc_difference"]
    if speedup["mean"] is None:
        said = "speed-up not measured"
    else:
        said = f"erases {_between(speedup, '.2f')} times as fast as without the constraint"
        if found["speeds_up"] is None:
            said += ", undecided with one seed"
        elif not (found["speeds_up"] or found["slows_down"]):
            said += ", which may be chance"
    return f"{said}; AUC {_between(auc, '+.3f')} against its twin's; {_PREVENTS[found['prevents']]}"


def _between(estimate: Mapping[str, Any], form: str) -> str:
    interval = estimate["interval"]
    ends = "" if interval is None else f" ({interval[0]:{form}} to {interval[1]:{form}})"
    return short(estimate["mean"], form) + ends
