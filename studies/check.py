"""Check the records in the source against the code and the pages: `python -m studies check`.

* Every study has a record, and the current code recomputes its summary from its rows. A record
  with a `commit` is left from code that has gone; its page names the last commit with the code.
* The table of reproductions matches its records.
* Every record and picture is named on a page.
* The numbers on the first pages match their records.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from studies import STUDIES, claims
from studies.records import plain, read_record
from studies.reproduction.rows import RESULTS, TABLE, markdown, read_all

DOCS = Path(__file__).parents[1] / "docs"


def main() -> int:
    """Print the problems; return the exit status."""
    found = list(problems())
    print(*found, f"{len(found)} problems", sep="\n")
    return 1 if found else 0


def problems() -> Iterator[str]:
    """Yield a line for each record that does not match the code or the pages."""
    pages = [page for page in DOCS.rglob("*.md") if page.parent.name != "results"]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    records = sorted([*(DOCS / "lab" / "results").glob("*.json"), *RESULTS.glob("*.json")])
    seen = {read_record(path)["study"] for path in records}
    yield from (f"the study {name} has no record" for name in STUDIES if name not in seen)
    for path in records:
        yield from (f"{path.name}: {line}" for line in differences(path))
    if (RESULTS / TABLE).read_text(encoding="utf-8") != markdown(read_all(RESULTS)):
        yield f"{TABLE} is not that of its records; run make reproduce ARGS=--table"
    shown = [path for path in records if path.parent != RESULTS]
    pictures = (DOCS / "lab" / "results", DOCS / "benchmarks" / "results", RESULTS)
    for path in sorted(path for folder in pictures for path in folder.glob("*.png")):
        if path.name not in text:
            yield f"{path.name} is on no page"
    for commit in {read_record(path).get("commit", "") for path in records}:
        if commit not in text:
            yield f"{commit}, the last commit with the code of a record, is on no page"
    for path in (*shown, *(DOCS / "benchmarks" / "results").glob("*.json")):
        files = [f"{path.stem}.{suffix}" for suffix in ("json", "md", "png")]
        command = f"python -m benchmarks {path.stem}"
        if not any(name in text for name in (*files, command)):
            yield f"{path.name} is on no page"
    yield from claims.problems()


def differences(path: Path) -> list[str]:
    """Return the contradictions between a record and its settings and rows."""
    record = read_record(path)
    if "commit" in record:  # its code has gone
        return []
    study = STUDIES[record["study"]].from_settings(record["settings"])
    cells, rows = list(map(plain, study.cells())), record["rows"]
    asked = [{name: row.get(name) for name in cell} for cell, row in zip(cells, rows, strict=False)]
    if len(cells) != len(rows) or asked != cells:
        return ["the rows are not those of the cells"]
    if not study.table(record):
        return ["the table is empty"]
    return list(_unequal(plain(study.summarise(rows)), record["summary"], "summary"))


def _unequal(found: Any, saved: Any, place: str) -> Iterator[str]:
    """Yield the differences of two trees beyond the rounding of different NumPy versions."""
    if isinstance(found, dict) and isinstance(saved, dict) and found.keys() == saved.keys():
        for key, value in found.items():
            yield from _unequal(value, saved[key], f"{place}[{key!r}]")
    elif isinstance(found, list) and isinstance(saved, list) and len(found) == len(saved):
        for i, (one, other) in enumerate(zip(found, saved, strict=True)):
            yield from _unequal(one, other, f"{place}[{i}]")
    elif isinstance(found, float) and isinstance(saved, float | int):
        if not np.isclose(found, saved, rtol=1e-6, atol=1e-9):
            yield f"{place} is {saved}; the rows give {found}"
    elif found != saved:
        yield f"{place} is {saved}; the rows give {found}"


if __name__ == "__main__":
    sys.exit(main())
