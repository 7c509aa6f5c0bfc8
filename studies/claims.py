"""Check the numbers in README and the first pages against their records, in `studies check`.

`claims` renders each figure from its record in the words of its page. `unproved` reports claims
missing from a page and, except on the pages `IN_PART`, uncovered measured numbers: with a decimal
point, exponent, percent sign or ±. What programs print, `tests/programs/test_docs.py` compares.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from studies.estimates import estimate, shown

ROOT = Path(__file__).parents[1]
DIGITS = "studies/results/digits.json"
FORTY = "studies/results/digits-40-seeds.json"
PROOFS = "docs/lab/results/certified-mnist.json"
CIFAR = "docs/lab/results/certified-cifar10-shifts.json"
LONG = "docs/lab/results/certified-cifar10-120-epochs.json"
STEPS = "docs/benchmarks/results/steps.json"
RELIABILITY = "docs/benchmarks/results/reliability.json"
OVERHEADS = "docs/benchmarks/results/scale.overheads.md"
LAYERS = "docs/lab/results/torch-layers.json"
RECURRENT = "docs/lab/results/recurrent.json"
QUANTIZATION = "docs/lab/results/quantization.json"
FLOWS = "docs/lab/results/flows.json"
CONVOLUTIONS = "docs/lab/results/flows-convolutions.json"
TRANSFORMERS = "docs/lab/results/transformers-{}.json"
SIZES = "small", "middle", "large"
# Methods at the smallest size only: the record, the mark of the page, the names.
SMALL_ONLY = (
    ("small", "", ("NorMuon", "spectral ball", "Stiefel", "AdamW")),
    ("more", "*", ("rows, gains", "AuroraH, gains", "NorMuonH, gains", "band", "spectral sphere",
                   "AdamH")),
)  # fmt: skip
# Pages with further numbers, which are held to no record here.
IN_PART = (
    "docs/coming-from.md", "docs/constrain-a-transformer.md", "docs/lab/certified-networks.md",
    "docs/lab/index.md", "docs/lab/transformers.md", "docs/quantization.md", "docs/reliability.md",
    "docs/scale.md",
)  # fmt: skip

BCP = "proves 47.95 %"  # published, in the repository sungyoon-lee/bcp

# Settings and names that look like measured numbers.
_NO_RESULTS = (
    r"Python 3\.1[12]|arXiv:\d+\.\d+|1\.58|Apache-2\.0|95 %|within 0\.\d+ of 1"
    r"|[\d.]+ (?:B|million)\b"
)
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`|\]\([^)]*\)|\$[^$\n]*\$", re.MULTILINE | re.DOTALL)
_MEASURED = re.compile(r"\d+[\d,]*\.\d+(?:e-?\d+)?|\d+ %|± ?\d[\d.]*|\d+e-\d+")


def claims(root: Path = ROOT) -> dict[str, list[str]]:
    """Return the claims of each page, rendered from the records."""

    def read(name: str) -> dict[str, Any]:
        return json.loads((root / name).read_text(encoding="utf-8"))

    job, forty, nets = read(DIGITS), read(FORTY), read(PROOFS)["summary"]["fc-256"]
    cifar = read(CIFAR)["summary"]["shifts-4"]
    long = read(LONG)["summary"]["shifts-4"]["manifold Muon"]
    short = (
        "manifold Muon", "Muon + retraction", "Björck + Muon", "Björck + Adam", "Riemannian Adam",
        "AdamW, free",
    )  # fmt: skip
    proved = {name: _row(name, *_proved(nets[name])) for name in short}
    on_cifar = {name: _percent(cifar[name], "epochs", 1) for name in cifar}
    accuracy = {name: f"{_accuracy(forty, name)} %" for name in forty["summary"]}
    bound = {name: _bound(row) for name, row in forty["summary"].items()}
    lead = {name: _lead(forty, name) for name in ("muon", "adamw")}
    unstacked = [row for row in read(STEPS)["rows"] if not row["stacked"]]
    stacked = [row for row in read(STEPS)["rows"] if row["stacked"]]
    drop_in, fastest = "optim.optax_muon", "optim.optax_muon, TRAINING_MSIGN"
    overheads = (root / OVERHEADS).read_text(encoding="utf-8")
    scale = _overheads(overheads)
    losses = {size: read(TRANSFORMERS.format(size)) for size in (*SIZES, "long", "more")}
    small, middle, large = (_beyond_muon(losses[size], size, "MuonH") for size in SIZES)
    best = max(
        -found["over_muon"]["mean"]
        for record in losses.values()
        for methods in record["summary"]["losses"].values()
        for found in methods.values()
    )
    recipes = [
        " | ".join(
            [
                _beyond_muon(losses["small"], "small", name),
                _beyond_muon(losses["long"], "small", name, 900),
                *(_beyond_muon(losses[size], size, name) for size in SIZES[1:]),
            ]
        )
        for name in ("MuonH", "stream vectors, gains")
    ]
    behind = {name: _behind(row, -1) for name, row in nets.items()}
    return {
        "README.md": [
            f"takes {_span(unstacked, 'seconds', drop_in)} of the time of Optax's step",
            f"{_span(unstacked, 'compile_seconds', drop_in)} of its compile time",
            f"({_span(stacked, 'seconds', drop_in)} and"
            f" {_span(stacked, 'compile_seconds', drop_in)} where layers are stacked already",
            f"`method=TRAINING_MSIGN` it takes {_span(unstacked, 'seconds', fastest)} of the time",
            scale,
            *(
                _row(row["label"], accuracy[name], f"{row['milliseconds']:.2f}", bound[name])
                for name, row in forty["summary"].items()
            ),
            f"leads Muon by {lead['muon']} points and AdamW by {lead['adamw']}",
            *(
                _row(name, *_proved(nets[name]), on_cifar.get(name, "not run"))
                for name in short
                if name not in ("Björck + Muon", "Riemannian Adam")
            ),
            f"by more than {best:.2f} nats",
            f"MuonH beyond Muon's: {small} at the smallest size, {middle} at the middle size,"
            f" {large} (worse) at the largest",
            f"on every kernel: {_beyond_muon(losses['small'], 'small', 'Stiefel')}",
            BCP,
        ],
        "docs/index.md": [
            f"{_percent(nets['manifold Muon'], 'epochs', -1)} % of the test images",
            f"Björck's parametrisation, Adam: {_percent(nets['Björck + Adam'], 'epochs', -1)} %",
            f"An unconstrained network, same loss: {_percent(nets['AdamW, free'], 'epochs', -1)} %",
            f"{accuracy['stiefel']} with a Lipschitz bound of {bound['stiefel']}.",
            f"Muon is {lead['muon']} points behind, AdamW {lead['adamw']}",
            scale,
            f"on two CPU cores: {_span(unstacked, 'seconds', drop_in)} of the time,"
            f" {_span(unstacked, 'compile_seconds', drop_in)} of the compile time",
            f"{_span(stacked, 'seconds', drop_in)} and"
            f" {_span(stacked, 'compile_seconds', drop_in)} where layers are stacked",
        ],
        "docs/certified-classifier.md": [
            *(line for name, line in proved.items() if name != "Björck + Adam"),
            f"manifold Muon proves {on_cifar['manifold Muon']} % of CIFAR-10 at 36/255, Muon with a"
            f" retraction {_behind(cifar['Muon + retraction'], 1)} less, Cayley with Adam"
            f" {_behind(cifar['Cayley + Adam'], 1)} less",
        ],
        "docs/coming-from.md": _made_up(read(LAYERS)),
        "docs/constrain-a-transformer.md": recipes,
        "docs/lab/transformers.md": [
            *recipes,
            *(
                _row(f"{name}{mark}", _beyond_muon(losses[record], "small", name))
                for record, mark, names in SMALL_ONLY
                for name in names
            ),
        ],
        "docs/lab/certified-networks.md": [
            *(_row(_code(name), *_proved(row)) for name, row in nets.items()),
            f"{behind['Muon + retraction']} points more images than Muon with a retraction, and"
            f" {behind['Björck + Adam']} more than the best method under Adam",
            *(
                _row(
                    name,
                    *map(_in_percent, row["epochs"]["accuracies"]),
                    _behind(row, 1) if name != "manifold Muon" else "",
                    _percent(row, "time", 1),
                    *[_behind(row, 1, "time")] * (name != "manifold Muon"),
                )
                for name, row in cifar.items()
            ),
            f"certify {_percent(long, 'epochs', 1)} % at 36/255",
            f"({_percent(long, 'epochs', 0)} clean",
        ],
        "docs/lab/index.md": [
            f"by {behind['Muon + retraction']} points over Muon with a retraction and"
            f" {behind['Björck + Adam']} over the best under Adam"
        ],
        "docs/scale.md": [_spread(overheads)],
        "docs/reliability.md": _random_cases(read(RELIABILITY)),
        "docs/getting-started.md": [_job(job, name) for name in job["summary"]],
        "docs/flows.md": [*_flows(read(FLOWS)), *_convolutions(read(CONVOLUTIONS))],
        "docs/quantization.md": _rotations(read(QUANTIZATION)),
        "docs/recurrent.md": _recurrent(read(RECURRENT)),
        "docs/swap-muon.md": [
            f"| {_span(unstacked, part, drop_in)}; stacked {_span(stacked, part, drop_in)}"
            f" | {_span(unstacked, part, fastest)}; {_span(stacked, part, fastest)} |"
            for part in ("compile_seconds", "seconds")
        ],
    }


def unproved(pages: Mapping[str, str], held: Mapping[str, list[str]]) -> Iterator[str]:
    """Yield a line for each claim missing from its page and each number without a claim."""
    for page, lines in held.items():
        text = pages[page].replace("**", "")
        for line in lines:
            if line not in text:
                yield f"{page} does not say what its record gives: {line}"
            text = text.replace(line, "")
        if page in IN_PART:
            continue
        for number in _MEASURED.findall(re.sub(_NO_RESULTS, "", _CODE.sub("", text))):
            yield f"{page} says {number}, which is held to no record"


def problems(root: Path = ROOT) -> list[str]:
    """Return a line for each number on the first pages that does not match its record."""
    held = claims(root)
    return list(unproved({page: (root / page).read_text("utf-8") for page in held}, held))


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _accuracies(record: Mapping[str, Any], optimizer: str) -> np.ndarray:
    """Return the final test accuracies by seed, in percent."""
    rows = [row for row in record["rows"] if row["optimizer"] == optimizer]
    return 100 * np.array([row["test_accuracy"][-1] for row in rows])


def _accuracy(record: Mapping[str, Any], optimizer: str) -> str:
    return shown(record["summary"][optimizer]["test_accuracy"], ".2f")


def _lead(record: Mapping[str, Any], other: str) -> str:
    """Format the lead of manifold Muon over another optimizer, paired by seed."""
    lead = _accuracies(record, "stiefel") - _accuracies(record, other)
    return shown(estimate(lead), ".2f")


def _bound(row: Mapping[str, Any]) -> str:
    mean = row["lipschitz"]["mean"]
    return f"{mean:.0f}" if abs(mean - round(mean)) < 1e-4 else f"{mean:.1f}"


def _code(name: str) -> str:
    """Write the call in a method's name as code."""
    return re.sub(r"\w+\(\)", r"`\g<0>`", name)


def _behind(row: Mapping[str, Any], at: int, part: str = "epochs") -> str:
    """Format how far a method is behind the first at a radius, in points."""
    found = row[part]["over_first_method"][at]
    low, high = found["interval"]
    return f"{-100 * found['mean']:z.1f} ± {50 * (high - low):.1f}"


def _percent(row: Mapping[str, Any], part: str, at: int) -> str:
    return _in_percent(row[part]["accuracies"][at])


def _in_percent(found: Mapping[str, Any]) -> str:
    """Format the mean and half the width of the 95 % interval, in percent."""
    low, high = found["interval"]
    return f"{100 * found['mean']:.1f} ± {50 * (high - low):.1f}"


def _beyond_muon(record: Mapping[str, Any], size: str, method: str, steps: int = 300) -> str:
    """Format the loss beyond tuned Muon's, in nats, paired by seed."""
    found = record["summary"]["losses"][f"{size}, {steps} steps"][method]["over_muon"]
    return shown(found, "+.3f").replace("-", "−")


def _span(rows: list[Mapping[str, Any]], part: str, name: str) -> str:
    """Format the smallest and largest ratio of an optimizer to Optax's Muon."""
    ratios = sorted(row[part][name] / row[part]["optax.contrib.muon"] for row in rows)
    ends = dict.fromkeys(f"{ratio:.2f}" for ratio in (ratios[0], ratios[-1]))
    return " to ".join(ends)


def _overheads(table: str) -> str:
    """Say what three optimizers add to a training step of 1.2 B parameters on 8 chips."""
    head, _, *lines = ([x.strip() for x in line.split("|")] for line in table.splitlines())
    (line,) = (line for line in lines if line[1:3] == ["1.2 B, v5e 2x4", "float32"])
    cells = {name: cell.split(" (")[0] for name, cell in zip(head, line, strict=True)}
    low, high = (cell for name, cell in cells.items() if name.startswith("manifold_muon"))
    return (
        f"adds at least {cells['optax.contrib.muon']} to forward and backward pass, `optim.muon`"
        f" {cells['muon']}, `manifold_muon` {low.removesuffix(' %')} to {high}"
    )


def _spread(table: str) -> str:
    """Say what optimizers add to a training step at least, over all models and slices.

    For Optax's Muon the two rows at full effort count: the others gather too many bytes.
    """
    head, _, *lines = ([x.strip() for x in line.split("|")] for line in table.splitlines())
    found = {}
    for name, *cells in zip(head, *lines, strict=True):
        counted = cells[:2] if name == "optax.contrib.muon" else cells
        values = [cell.split(" %")[0] for cell in counted if " % (" in cell]
        if values:
            low, *_, high = sorted(values, key=float)
            found[name] = f"{low} to {high} %"
    return (
        f"`muon` adds at least {found['muon']} to the forward and backward pass, `manifold_muon`"
        f" with `ProjectedPolar()` {found['manifold_muon, ProjectedPolar()']}, with `ClosedForm()`"
        f" {found['manifold_muon, ClosedForm()']}; the share falls as slices grow."
        f" Optax's Muon adds at least {found['optax.contrib.muon']} on 8 chips"
    )


def _random_cases(record: Mapping[str, Any]) -> list[str]:
    """Format the worst errors of random cases, with their limits, by dtype."""
    worst, special = record["worst"], record["limits_of_residuals"]
    labels = {
        "gap under the true one": "gap reported below the true one",
        "residual": "normal part",
        "descent": "ascent where a step should descend",
        "distance from the set": "distance from the set after a step; in runs",
    }

    def power(value: float) -> str:
        return "0" if value == 0 else f"{value:.1e}".replace("e-0", "e-").replace(".0e-", "e-", 1)

    def largest(error: str, dtype: str) -> str:
        # Two solvers have limits of their own for float32.
        apart = special if (error, dtype) == ("residual", "float32") else ()
        names = (name for name in worst if name.endswith(f", {dtype}"))
        return power(
            max(worst[x][error] for x in names if x.removesuffix(f", {dtype}") not in apart)
        )

    rows = []
    for error, limit in record["limits"].items():
        single, *others = (largest(error, d) for d in ("float32", "bfloat16", "float16", "float64"))
        if error == "distance from the set":
            single += f"; {power(worst['manifold_muon, sets'][error])}"
        rows.append(_row(labels.get(error, error), power(limit), single, *others))
    for name, limit in special.items():
        label = f"the same, `{name.removeprefix('Stiefel, ')}`"
        found = power(worst[f"{name}, float32"]["residual"])
        rows.append(f"{label} | {power(limit)} | {found} |")
    met, missed = record["cases"]["descents"], len(record["stop_above_the_minimum"])
    return [
        *rows,
        f"Of {sum(record['cases'].values()):,d} cases",
        f"we tried {met + missed} combinations of set, norm and optimizer: {met} descend",
    ]


def _rotations(record: Mapping[str, Any]) -> list[str]:
    """Format the cost of quantization: with 4-bit inputs, step held and not, and with 6 and 8."""
    labels = {"none": "not rotated", "minimize, noise": "`minimize` on noise",
              "Cayley SGD, rate 1.5": "Cayley SGD at SpinQuant's rate, 1.5"}  # fmt: skip
    four, six, eight = (record["summary"][f"{bits} bits, equal steps"] for bits in (4, 6, 8))

    def cell(found: Mapping[str, Any] | None) -> str:
        return f" {shown(found['cost'], '.3f')}" if found else ""

    def losses(method: str, budget: str = "steps") -> np.ndarray:
        names = {"method": method, "inputs": 4, "budget": budget}
        return np.array(
            [row["quantized"] for row in record["rows"] if names.items() <= row.items()]
        )

    def apart(other: str, budget: str = "steps") -> str:
        """Format how far the differentiated `riemannian_sgd` is from another method, paired."""
        found = losses(other, budget) - losses("riemannian_sgd, step", budget)
        return shown(estimate(found * np.sign(found.mean())), ".3f")

    muon = estimate(losses("manifold_muon, step") - losses("Cayley SGD, step"))
    return [
        *(
            f"| {labels.get(name, f'`{name}`' if '_' in name else name)} |{cell(found)}"
            f" |{cell(four.get(f'{name}, step'))}"
            f" |{cell(six.get(f'{name}, step', six[name]))}"
            f" |{cell(eight.get(f'{name}, step', eight[name]))} |"
            for name, found in four.items()
            if not name.endswith(", step")
        ),
        f"is {apart('Cayley SGD')} below tuned Cayley SGD with SpinQuant's gradient, and"
        f" {apart('Cayley SGD, rate 1.5')} below it at the published rate",
        f"Its loss is {apart('Cayley SGD, step')} below that of `riemannian_sgd`"
        f" ({apart('Cayley SGD, step', 'seconds')} in equal time",
        f"and {shown(muon, '.3f')} below that of `manifold_muon`",
        f"end {apart('Frobenius steps, step')} and {apart('minimize, noise')} above",
    ]


def _made_up(record: Mapping[str, Any]) -> list[str]:
    """Say after how many steps faster steps make up for a longer compilation."""

    def steps(ours: str, other: str) -> float:
        mine, theirs = (record["summary"][name] for name in (ours, other))
        return (mine["set_up"] - theirs["set_up"]) / (theirs["step"] - mine["step"])

    exact = round(steps("manifold Muon", "torch, matrix_exp"), -1)
    fast = (steps("manifold Muon, ProjectedPolar", x) for x in ("torch, cayley", "geoopt"))
    low, high = (f"{round(x, -2):,.0f}" for x in fast)
    return [
        f"after {exact:.0f} steps against `matrix_exp`",
        f"`ProjectedPolar()` makes up for it after {low} and {high} steps",
    ]


def _recurrent(record: Mapping[str, Any]) -> list[str]:
    """Format the slopes of the best rate, the table of rivals, and their rates."""
    rule, rivals = record["summary"]["rule"], record["summary"]["rivals"]
    slopes = {task: shown(own["slope"], ".2f") for task, own in rule.items()}
    labels = {"Adam": "Adam, free", "expRNN": "expRNN, Adam", "scoRNN": "scoRNN, Adam",
              "GRU": "GRU, Adam", "Orthogonal": "`Orthogonal()`",
              "Stiefel input": "with `Stiefel()` inputs",
              "Cayley retraction": "with `Cayley()`"}  # fmt: skip
    delays = "copy-100", "copy-300", "copy-1000"

    def solved(found: Mapping[str, Any] | None) -> str:
        if found is None:
            return ""
        if found["solved"] < found["seeds"]:
            return f"{found['solved'] or 'none'} of {found['seeds']}"
        return f"{shown(found['solved_steps'], '.0f')} ({found['seconds']['mean']:.1f} s)"

    def read(found: Mapping[str, Any] | None) -> str:
        return _in_percent(found["accuracy"]) if found else ""

    def rates(method: str) -> str:
        best = [rivals[delay][method]["rate"] for delay in delays]
        return f"{best[0]:g} to {best[-1]:.5f}".rstrip("0")

    tried = {r["task"]: r["tried"] for r in record["rows"] if r.get("method") == "Orthogonal"}
    shared = [
        rate
        for k, rate in enumerate(tried[delays[0]]["rates"])
        if all(tried[task]["solved_steps"][k] for task in (*delays[:2], "adding"))
    ]
    adding = rivals["adding"]
    free = next(
        row["tried"]
        for row in record["rows"]
        if (row.get("method"), row["task"]) == ("Adam", "adding")
    )
    slow, steps = next(
        (r, n) for r, n in zip(free["rates"], free["solved_steps"], strict=True) if n
    )
    return [
        f"{slopes['recall']} for letters, {slopes['digits']} for digits".replace("-", "−"),
        *(
            _row(
                labels[name],
                *(solved(rivals[task].get(name)) for task in (*delays, "adding")),
                *(read(rivals[task].get(name)) for task in ("digits", "MNIST")),
            )
            for name in rivals["digits"]
        ),
        f"{min(shared):g} to {max(shared):g}",
        shown(rivals["copy-300"]["Orthogonal"]["beyond_adam"]["solved_steps"], ".0f"),
        f"Adam's rate tuned on the sixth seed, {adding['Adam']['rate']:g}, diverges",
        f"({slow:g} takes {steps:,} steps",
        f"Adam's best falls from {rates('Adam')} as the delay grows,"
        f" expRNN's from {rates('expRNN')}",
    ]


def _flows(record: Mapping[str, Any]) -> list[str]:
    """Format the rows of the table of methods."""
    *methods, (_, gaussian) = record["summary"].items()
    rows = [
        _row(name, *(shown(own[k], form) for k, form in (("bits", ".3f"), ("beyond", "+.3f"))))
        for name, own in methods
    ]
    bounds = [own["largest_bound"] for name, own in methods if "spectral norm" in name]
    others = max(own["largest_bound"] for name, own in methods if "spectral norm" not in name)
    return [
        *(row.replace("+0.000 ± 0.000 ", "").replace("-", "−") for row in rows),
        f"A Gaussian: {shown(gaussian['bits'], '.3f')}",
        f"rises to {max(bounds):.2f} in training",
        f"with the other methods it is {others:.3f} at most",
    ]


def _proved(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return _percent(row, "epochs", 0), _percent(row, "epochs", -1), _percent(row, "time", -1)


def _job(record: Mapping[str, Any], optimizer: str) -> str:
    def small(value: float | None) -> str:
        return "" if value is None else f"{value:.1e}".replace("e-0", "e-")

    row = record["summary"][optimizer]
    cells = (
        row["label"], f"{_accuracy(record, optimizer)} %", small(row["distance"]),
        small(row["gap"]), f"{row['milliseconds']:.2f}", _bound(row),
    )  # fmt: skip
    return re.sub(r"\|  (?=\|)", "| ", _row(*cells))


def _convolutions(record: Mapping[str, Any]) -> list[str]:
    """Format the range of the methods, the Gaussian's bits beyond spectral normalisation with Adam,
    and the largest bound of spectral normalisation."""
    *methods, (_, gaussian) = record["summary"].items()
    bits = [own["bits"]["mean"] for _, own in methods]
    bounds = [own["largest_bound"] for name, own in methods if "spectral norm" in name]
    return [
        f"{min(bits):.3f} to {max(bits):.3f}",
        f"clear of the Gaussian, by {shown(gaussian['beyond'], '.3f')}",
        f"bounds of spectral normalisation reach {max(bounds):.2f}",
    ]
