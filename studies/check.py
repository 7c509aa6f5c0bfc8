"""Check the records in the source against the code and the pages: `python -m studies check`.

* Every study has a record and a picture, and the current code recomputes its summary from its rows.
* The table of reproductions matches its records.
* Every record is named on a page.
* The numbers on the first pages match their records.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from studies import claims
from studies.records import plain, read_record
from studies.reproduction.__main__ import RESULTS, TABLE, read_all
from studies.reproduction.rows import markdown
from studies.study import Study

DOCS = Path(__file__).parents[1] / "docs"


def problems(studies: Mapping[str, type[Study]]) -> Iterator[str]:
    """Yield a line for each record that does not match the code or the pages."""
    pages = [page for page in DOCS.rglob("*.md") if page.parent.name != "results"]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    records = sorted((DOCS / "lab" / "results").glob("*.json"))
    for name, kind in studies.items():
        own = [path for path in records if path.stem.startswith(name)]
        for path in own:
            yield from (f"{path.name}: {line}" for line in differences(path, kind))
            if not path.with_suffix(".png").exists():
                yield f"{path.name} has no picture"
        if not own:
            yield f"the study {name} has no record"
    if (RESULTS / TABLE).read_text(encoding="utf-8") != markdown(read_all(RESULTS)):
        yield f"{TABLE} is not that of its records; run make reproduce ARGS=--table"
    for path in (*records, *(DOCS / "benchmarks" / "results").glob("*.json")):
        files = [f"{path.stem}.{suffix}" for suffix in ("json", "md", "png")]
        command = f"python -m benchmarks {path.stem}"
        if not any(name in text for name in (*files, command)):
            yield f"{path.name} is on no page"
    yield from claims.problems()


def differences(path: Path, kind: type[Study]) -> list[str]:
    """Return the contradictions between a record and its settings and rows."""
    record = read_record(path, kind.name)
    study = kind.from_settings(record["settings"])
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
