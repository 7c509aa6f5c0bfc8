"""Records: strict JSON, written atomically, and checked against their studies."""

import json
import os
import platform
import resource
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from studies import STUDIES
from studies.check import DOCS, differences
from studies.records import WriteError, environment, read_record, write_record
from studies.reproduction.rows import RESULTS

NUMBERS = np.random.default_rng(0).standard_normal(50).astype(np.float32)


class Pair(NamedTuple):
    left: float
    right: list[int]


def read(path):
    """Read strict JSON; by default, Python's reader accepts a bare NaN."""
    return json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, True),
        ("Λ", "Λ"),
        (0.1, 0.1),
        (np.float64(0.1), 0.1),
        (np.int64(7), 7),
        (np.bool_(True), True),
        (np.arange(4).reshape(2, 2), [[0, 1], [2, 3]]),
        (np.array(["a", "b"]), ["a", "b"]),
        (jnp.float32(0.5), 0.5),
        (jnp.array([0.5, -2.0], jnp.bfloat16), [0.5, -2.0]),
        ((1, (2.0, "x")), [1, [2.0, "x"]]),
        (Pair(0.25, [1, 2]), {"left": 0.25, "right": [1, 2]}),
        ({"a": {"b": np.float32(3)}}, {"a": {"b": 3.0}}),
        (-float("inf"), None),
        (np.array([1.0, np.nan, np.inf]), [1.0, None, None]),
        (jnp.array(jnp.nan, jnp.bfloat16), None),
        (NUMBERS, NUMBERS.tolist()),
    ],
)
def test_values_round_trip(tmp_path, value, expected):
    path = write_record(tmp_path / "record.json", {"value": value})
    arrived = read(path)["value"]
    assert arrived == expected
    assert type(arrived) is type(expected)


@pytest.mark.parametrize("value", [[1, {2, 3}], b"x", np.array([1j]), jax.random.key(0)])
def test_unsupported_values_raise(tmp_path, value):
    with pytest.raises(TypeError):
        write_record(tmp_path / "record.json", {"a": value})
    assert list(tmp_path.iterdir()) == []


def test_existing_record_needs_overwrite(tmp_path):
    path = write_record(tmp_path / "new" / "record.json", {"run": 1})
    with pytest.raises(FileExistsError, match="overwrite=True"):
        write_record(path, {"run": 2})
    assert read(path) == {"run": 1}
    write_record(path, {"run": 3}, overwrite=True)
    assert read(path) == {"run": 3}
    assert [file.name for file in path.parent.iterdir()] == ["record.json"]


def test_failed_write_keeps_old_record(tmp_path):
    path = write_record(tmp_path / "record.json", {"run": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**12, before[1]))  # as on a full disk
    try:
        with pytest.raises(WriteError, match="make room or choose another folder"):
            write_record(path, {"runs": list(range(5000))}, overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert read(path) == {"run": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["record.json"]


def test_environment_lists_only_versions_and_hardware():
    found = environment()
    versions = {"python", "manifoldmuon", "jax", "jaxlib", "optax", "numpy"}
    hardware = {"platform", "processor", "backend", "device_kind", "device_count", "cpu_count"}
    assert set(found) == versions | hardware  # no host name, no paths
    assert found["python"] == platform.python_version()
    assert found["cpu_count"] == os.cpu_count()
    assert all(found.values())


def test_check_detects_records_that_contradict_themselves(tmp_path):
    source = DOCS / "lab" / "results" / "newton-schulz.json"
    record, path = json.loads(source.read_text(encoding="utf-8")), tmp_path / "newton-schulz.json"
    path.with_suffix(".png").touch()

    def found():
        path.write_text(json.dumps(record), encoding="utf-8")
        return differences(path)

    assert found() == []
    record["summary"]["of another study"] = 1.0
    assert [line[:12] for line in found()] == ["summary is {"]
    del record["rows"][0]
    assert found() == ["the rows are not those of the cells"]
    record["commit"] = "left from code that has gone"
    assert found() == []


FOLDERS = (DOCS / "lab" / "results", RESULTS)
RECORDS = [p for x in FOLDERS for p in sorted(x.glob("*.json")) if "commit" not in read(p)]


@pytest.mark.slow_except(*{read(p)["study"]: p.stem for p in RECORDS}.values())
@pytest.mark.parametrize("path", RECORDS, ids=lambda p: p.stem)
def test_studies_summarise_and_plot_their_records(path):
    assert differences(path) == []
    record = read_record(path)
    figure = STUDIES[record["study"]].from_settings(record["settings"]).plot(record)
    assert figure is None or figure.axes
