"""The check of saved records detects summaries that do not follow from the rows."""

import json

import pytest

from studies import STUDIES
from studies.check import DOCS, differences


@pytest.fixture
def record():
    path = DOCS / "lab" / "results" / "newton-schulz.json"
    return json.loads(path.read_text(encoding="utf-8"))


def found(record, tmp_path):
    path = tmp_path / "newton-schulz.json"
    path.write_text(json.dumps(record), encoding="utf-8")
    return differences(path, STUDIES["newton-schulz"])


def test_unchanged_record_has_no_differences(record, tmp_path):
    assert found(record, tmp_path) == []


def test_changed_summary_is_detected(record, tmp_path):
    record["summary"]["of another study"] = 1.0
    (line,) = found(record, tmp_path)
    assert line.startswith("summary is {")


def test_missing_rows_are_detected(record, tmp_path):
    del record["rows"][0]
    assert found(record, tmp_path) == ["the rows are not those of the cells"]
