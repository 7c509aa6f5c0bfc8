"""Check the numbers in README and the first pages against their records, in `studies check`.

`claims` renders each figure from its record in the words of its page. `unproved` reports claims
missing from a page and uncovered measured numbers: with a decimal point, exponent, percent sign
or ±.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DIGITS = "studies/results/digits.json"
FORTY = "studies/results/digits-40-seeds.json"
PROOFS = "docs/lab/results/certified-mnist.json"
STEPS = "docs/benchmarks/results/steps.json"
LARGE = "docs/lab/results/transformers-large.json"

# Settings and names that look like measured numbers.
_NO_RESULTS = r"Python 3\.11|arXiv:\d+\.\d+|1\.58|Apache-2\.0|95 %|within 0\.\d+ of 1"
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`|\]\([^)]*\)|\$[^$\n]*\$", re.MULTILINE | re.DOTALL)
_MEASURED = re.compile(r"\d+[\d,]*\.\d+(?:e-?\d+)?|\d+ %|± ?\d[\d.]*|\d+e-\d+")


def claims(root: Path = ROOT) -> dict[str, list[str]]:
    """Return the claims of each page, rendered from the records."""
    digits, forty, proofs, steps, transformers = (
        json.loads((root / name).read_text(encoding="utf-8"))
        for name in (DIGITS, FORTY, PROOFS, STEPS, LARGE)
    )
    job, many, nets = digits["summary"], forty["summary"], proofs["summary"]["fc-256"]
    times = [row["seconds"] for row in steps["rows"]]
    ratios = [row["muon"] / row["optax.contrib.muon"] for row in times]
    span = f"{min(ratios):.2f} to {max(ratios):.2f}"
    short = (
        "manifold Muon", "Muon + retraction", "Björck + Muon", "Björck + Adam", "Riemannian Adam",
        "AdamW, free",
    )  # fmt: skip
    table = [_row(name, *_proved(nets[name])) for name in short]
    return {
        "README.md": [
            *(
                _row(row["label"], f"{_accuracy(row)} %", f"{row['milliseconds']:.2f}", _bound(row))
                for row in many.values()
            ),
            *table,
        ],
        "docs/index.md": [
            f"{_percent(nets['manifold Muon'], 'epochs', -1)} % of the test images",
            f"Björck's parametrisation: {_percent(nets['Björck + Adam'], 'epochs', -1)} %",
            f"An unconstrained network: {_percent(nets['AdamW, free'], 'epochs', -1)} %",
            f"{_accuracy(many['stiefel'])} % with a Lipschitz bound of {_bound(many['stiefel'])}.",
            f"Muon {_accuracy(many['muon'])} % with {_bound(many['muon'])}",
            f"AdamW {_accuracy(many['adamw'])} % with {_bound(many['adamw'])}",
            f"{span} of the time",
            f"trail it by {_difference(transformers['summary']['losses'], 'MuonH')} at the largest",
        ],
        "docs/certified-classifier.md": [line for line in table if "Björck + Adam" not in line],
        "docs/getting-started.md": [_job(row) for row in job.values()],
        "docs/swap-muon.md": [span],
    }


def unproved(pages: Mapping[str, str], held: Mapping[str, list[str]]) -> Iterator[str]:
    """Yield a line for each claim missing from its page and each number without a claim."""
    for page, lines in held.items():
        text = pages[page].replace("**", "")
        for line in lines:
            if line not in text:
                yield f"{page} does not say what its record gives: {line}"
            text = text.replace(line, "")
        for number in _MEASURED.findall(re.sub(_NO_RESULTS, "", _CODE.sub("", text))):
            yield f"{page} says {number}, which is held to no record"


def problems(root: Path = ROOT) -> list[str]:
    """Return a line for each number on the first pages that does not match its record."""
    held = claims(root)
    return list(unproved({page: (root / page).read_text("utf-8") for page in held}, held))


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _accuracy(row: Mapping[str, Any]) -> str:
    """Format the mean and standard error over the seeds, in percent."""
    found = row["test_accuracy"]
    return f"{found['mean']:.2f} ± {found['error']:.2f}"


def _bound(row: Mapping[str, Any]) -> str:
    mean = row["lipschitz"]["mean"]
    return f"{mean:.0f}" if abs(mean - round(mean)) < 1e-4 else f"{mean:.1f}"


def _percent(row: Mapping[str, Any], part: str, at: int) -> str:
    """Format the mean and half the width of the 95 % interval, in percent."""
    found = row[part]["accuracies"][at]
    low, high = found["interval"]
    return f"{100 * found['mean']:.1f} ± {50 * (high - low):.1f}"


def _difference(losses: Mapping[str, Any], method: str) -> str:
    """Format the loss minus Muon's at the largest size: mean and half the 95 % interval (nats)."""
    (found,) = (x[method]["over_muon"] for name, x in losses.items() if name.startswith("large"))
    low, high = found["interval"]
    return f"{found['mean']:.3f} ± {(high - low) / 2:.3f}"


def _proved(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return _percent(row, "epochs", 0), _percent(row, "epochs", -1), _percent(row, "time", -1)


def _job(row: Mapping[str, Any]) -> str:
    def small(value: float | None) -> str:
        return "" if value is None else f"{value:.1e}".replace("e-0", "e-")

    cells = (
        row["label"], f"{_accuracy(row)} %", small(row["distance"]), small(row["gap"]),
        f"{row['milliseconds']:.2f}", _bound(row),
    )  # fmt: skip
    return re.sub(r"\|  (?=\|)", "| ", _row(*cells))
