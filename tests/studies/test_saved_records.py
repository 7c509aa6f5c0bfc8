"""The records behind the pages of the laboratory: findings follow from the rows, as the code is."""

from pathlib import Path

import numpy as np
import pytest

from studies import STUDIES
from studies.records import plain, read_record

RESULTS = Path(__file__).parents[2] / "docs" / "lab" / "results"
PAGES = "\n".join(path.read_text(encoding="utf-8") for path in RESULTS.parent.glob("*.md"))
RECORDS = sorted(RESULTS.glob("*.json"))


def study_of(path):
    """The kind of study whose name begins that of the record."""
    (found,) = [study for name, study in STUDIES.items() if path.stem.startswith(name)]
    return found


def same(found, saved, place="summary"):
    """Equal but for the last digits, which another version of NumPy may round otherwise."""
    assert type(found) is type(saved) or {type(found), type(saved)} <= {int, float}, place
    if isinstance(found, dict):
        assert found.keys() == saved.keys(), place
        for key, value in found.items():
            same(value, saved[key], f"{place}[{key!r}]")
    elif isinstance(found, list):
        assert len(found) == len(saved), place
        for i, (one, other) in enumerate(zip(found, saved, strict=True)):
            same(one, other, f"{place}[{i}]")
    elif isinstance(found, float):
        np.testing.assert_allclose(found, saved, rtol=1e-6, atol=1e-9, err_msg=place)
    else:
        assert found == saved, place


def test_there_are_records_of_every_study():
    assert {study_of(path) for path in RECORDS} == set(STUDIES.values())


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_saved_summary_follows_from_the_rows(path):
    record = read_record(path, study_of(path).name)
    study = study_of(path).from_settings(record["settings"])
    assert [{k: row[k] for k in cell} for cell, row in zip(map(plain, study.cells()),
            record["rows"], strict=True)] == list(map(plain, study.cells()))  # fmt: skip
    same(plain(study.summarise(record["rows"])), record["summary"])
    assert study.table(record)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_has_its_picture_on_a_page(path):
    assert path.with_suffix(".png").exists()
    assert f"results/{path.stem}.png" in PAGES or f"results/{path.stem}.json" in PAGES
