"""Records: strict JSON, written atomically."""

import json
import os
import platform
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from studies.records import environment, write_record


class Pair(NamedTuple):
    left: float
    right: list[int]


def refuse(constant: str):
    raise AssertionError(f"{constant} is not JSON")


def read(path):
    """Read strict JSON; by default, Python's reader accepts a bare NaN."""
    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1),
        (True, True),
        (None, None),
        ("Λ", "Λ"),
        (0.1, 0.1),
        (np.float64(0.1), 0.1),
        (np.float32(0.5), 0.5),
        (np.int64(7), 7),
        (np.bool_(True), True),
        (np.arange(4).reshape(2, 2), [[0, 1], [2, 3]]),
        (np.array(["a", "b"]), ["a", "b"]),
        (np.zeros((0, 3)), []),
        (jnp.float32(0.5), 0.5),
        (jnp.array([1, 2]), [1, 2]),
        (jnp.array([0.5, -2.0], jnp.bfloat16), [0.5, -2.0]),
        ((1, (2.0, "x")), [1, [2.0, "x"]]),
        (Pair(0.25, [1, 2]), {"left": 0.25, "right": [1, 2]}),
        ({"a": {"b": np.float32(3)}}, {"a": {"b": 3.0}}),
        (float("nan"), None),
        (-float("inf"), None),
        (np.array([1.0, np.nan, np.inf]), [1.0, None, None]),
        (jnp.array(jnp.nan, jnp.bfloat16), None),
    ],
)
def test_values_round_trip(tmp_path, value, expected):
    path = write_record(tmp_path / "record.json", {"value": value})
    arrived = read(path)["value"]
    assert arrived == expected
    assert type(arrived) is type(expected)


def test_numbers_round_trip_bit_for_bit(tmp_path):
    numbers = np.random.default_rng(0).standard_normal(50).astype(np.float32)
    path = write_record(tmp_path / "record.json", {"value": numbers})
    np.testing.assert_array_equal(np.float32(read(path)["value"]), numbers)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"a": [1, {2, 3}]}, r"record\['a'\]\[1\] is a set"),
        ({"a": {1: 2}}, r"record\['a'\] has the key 1"),
        ({"a": b"x"}, r"record\['a'\] is a bytes"),
        ({"a": np.array([1j])}, r"record\['a'\] is an array of complex128"),
        ({"a": jax.random.key(0)}, r"record\['a'\] is a random key"),
    ],
)
def test_unsupported_values_raise_with_path(tmp_path, record, message):
    with pytest.raises(TypeError, match=message):
        write_record(tmp_path / "record.json", record)
    assert list(tmp_path.iterdir()) == []


def test_existing_record_needs_overwrite(tmp_path):
    path = write_record(tmp_path / "new" / "record.json", {"run": 1})
    with pytest.raises(FileExistsError, match="overwrite=True"):
        write_record(path, {"run": 2})
    assert read(path) == {"run": 1}
    write_record(path, {"run": 3}, overwrite=True)
    assert read(path) == {"run": 3}
    assert [file.name for file in path.parent.iterdir()] == ["record.json"]


def test_failed_write_keeps_old_record(tmp_path, monkeypatch):
    path = write_record(tmp_path / "record.json", {"run": 1})

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_record(path, {"run": 2}, overwrite=True)
    assert read(path) == {"run": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["record.json"]


def test_environment_lists_only_versions_and_hardware():
    found = environment()
    versions = {"python", "manifoldmuon", "jax", "jaxlib", "optax", "numpy"}
    hardware = {"platform", "backend", "device_kind", "device_count", "cpu_count"}
    assert set(found) == versions | hardware  # no host name, no paths
    assert found["python"] == platform.python_version()
    assert found["jax"] == jax.__version__
    assert found["numpy"] == np.__version__
    assert found["device_count"] == 8
    assert found["cpu_count"] == os.cpu_count()
    assert all(found.values())
