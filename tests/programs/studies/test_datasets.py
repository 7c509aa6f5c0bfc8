"""Data sets: small files in the official formats; damaged or missing files raise errors."""

import functools
import gzip
import pydoc_data.topics
import struct
from typing import Any, cast

import numpy as np
import pytest

from studies import datasets
from studies.datasets import DatasetError, digits


def test_digits_match_scikit_learn():
    from sklearn.datasets import load_digits

    original = cast(Any, load_digits())
    found = datasets.load_digits()
    assert found.train_x.dtype == found.test_x.dtype == np.float32
    assert found.train_x.shape[1:] == found.test_x.shape[1:] == (8, 8)
    assert found.classes == tuple(str(name) for name in original.target_names)

    def rows(images, labels):
        return sorted(map(tuple, np.column_stack([labels, images.reshape(-1, 64)])))

    both = np.concatenate([found.train_x, found.test_x])
    labels = np.concatenate([found.train_y, found.test_y])
    assert rows(16 * both, labels) == rows(original.data, original.target)
    assert both.min() == 0
    assert both.max() == 1


def test_split_is_stratified_and_depends_only_on_seed():
    first, again, other = (datasets.load_digits(seed) for seed in (0, 0, 1))
    for one, two in zip(first[:4], again[:4], strict=True):
        np.testing.assert_array_equal(one, two)
    assert not np.array_equal(first.test_x, other.test_x)
    counts = np.bincount(first.train_y), np.bincount(first.test_y)
    np.testing.assert_allclose(counts[1] / (counts[0] + counts[1]), 0.2, atol=0.5 / counts[0].min())
    # Both parts are shuffled, not sorted by class.
    assert np.any(np.diff(first.train_y) < 0)
    assert np.any(np.diff(first.test_y) < 0)


def test_split_with_missing_class_raises():
    with pytest.raises(ValueError, match="test_fraction=0.1 puts 0 of the 3 images of class 1"):
        digits.stratified_split(np.array([0] * 10 + [1] * 3), 0, 0.1)


def idx(array: np.ndarray) -> bytes:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()


@pytest.fixture
def mnist_files(tmp_path):
    """Write MNIST's four files, with seven training and three test images; return the folder."""
    rng, arrays = np.random.default_rng(0), {}
    for part, size in (("train", 7), ("t10k", 3)):
        arrays[f"{part}-images-idx3-ubyte"] = rng.integers(0, 256, (size, 28, 28))
        arrays[f"{part}-labels-idx1-ubyte"] = rng.integers(0, 10, size)
    for name, array in arrays.items():
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
    return tmp_path, arrays


@pytest.mark.parametrize("compressed", [True, False])
def test_mnist_files_round_trip(mnist_files, compressed):
    folder, arrays = mnist_files
    if not compressed:
        for path in list(folder.iterdir()):
            path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
            path.unlink()
    found = datasets.load_mnist(folder)
    for images, labels, part in ((*found[:2], "train"), (*found[2:4], "t10k")):
        assert images.dtype == np.float32
        assert labels.dtype == np.int32
        np.testing.assert_array_equal(np.rint(images * 255), arrays[f"{part}-images-idx3-ubyte"])
        np.testing.assert_array_equal(labels, arrays[f"{part}-labels-idx1-ubyte"])
    assert found.name == "mnist"


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
packed = functools.partial(gzip.compress, mtime=0)  # without a time stamp
DAMAGED = {
    "magic of labels": (IMAGES, packed(b"\x00\x00\x0d\x03"), "wrong magic number"),
    "no idx at all": (IMAGES, packed(b"<html>"), "wrong magic number"),
    "short header": (IMAGES, packed(b"\x00\x00\x08\x03\x00\x00"), "header is incomplete"),
    "one byte short": (IMAGES, packed(idx(np.zeros((7, 28, 28)))[:-1]), "promises 5504 bytes"),
    "huge sizes": (IMAGES, packed(b"\x00\x00\x08\x03" + b"\xff" * 12), "promises"),
    "not gzip": (IMAGES, b"<html>", "not a whole gzip file"),
    "torn gzip": (IMAGES, packed(idx(np.zeros((7, 28, 28))))[:-9], "not a whole gzip file"),
    "no images": (IMAGES, packed(idx(np.zeros((7, 28)))), r"not \(n, 28, 28\)"),
    "other sizes": (IMAGES, packed(idx(np.zeros((7, 32, 32)))), r"not \(n, 28, 28\)"),
    "too few labels": (LABELS, packed(idx(np.zeros(6))), "for 7 images"),
    "labels beyond 9": (LABELS, packed(idx(np.full(7, 10))), "labels go up to 10"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_mnist_files_raise(mnist_files, case):
    (name, contents, message), (folder, _) = DAMAGED[case], mnist_files
    (folder / f"{name}.gz").write_bytes(contents)
    with pytest.raises(DatasetError, match=message):
        datasets.load_mnist(folder)


def test_missing_mnist_file_error_names_folder(mnist_files):
    folder, _ = mnist_files
    name = "t10k-labels-idx1-ubyte"
    (folder / f"{name}.gz").unlink()
    with pytest.raises(DatasetError, match=rf"{folder} has no {name}.gz or {name}"):
        datasets.load_mnist(folder)
    with pytest.raises(DatasetError, match="the folder .* does not exist"):
        datasets.load_mnist(folder / "elsewhere")


def test_cache_accepts_only_official_files(mnist_files, monkeypatch, tmp_path):
    folder, _ = mnist_files
    monkeypatch.setenv("MANIFOLDMUON_DATA", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    with pytest.raises(DatasetError, match="mnist has no train-images-idx3-ubyte.gz; "):
        datasets.load_mnist(download=False)
    (tmp_path / "home" / "mnist").symlink_to(folder)
    with pytest.raises(DatasetError, match="the md5 .*, not 6bbc9ace898e44ae57da46a324031adb"):
        datasets.load_mnist(download=False)


@pytest.mark.slow
def test_real_mnist_loads(shared_data, monkeypatch):
    monkeypatch.setenv("MANIFOLDMUON_DATA", str(shared_data))
    if not (shared_data / "mnist").is_dir():
        pytest.skip(f"no MNIST in {shared_data}")
    found = datasets.load_mnist(download=False)
    assert found.train_x.shape == (60000, 28, 28)
    assert found.test_x.shape == (10000, 28, 28)
    # Published: mean and standard deviation of the training pixels, and the count of ones.
    assert found.train_x.mean(dtype=np.float64) == pytest.approx(0.1307, abs=5e-5)
    assert found.train_x.std(dtype=np.float64) == pytest.approx(0.3081, abs=5e-5)
    assert np.bincount(found.train_y)[1] == 6742


@pytest.mark.parametrize("name", ["tinyshakespeare.txt", "input.txt"])
def test_text_is_read_unchanged(tmp_path, name):
    text = "First Citizen:\r\nÀ la carte\n"
    (tmp_path / name).write_bytes(text.encode("utf-8"))
    assert datasets.load_shakespeare(tmp_path) == text


@pytest.mark.parametrize(
    ("contents", "message"), [(b"", "is empty"), (b"\xff\xfe\x00", "not a text in UTF-8")]
)
def test_damaged_texts_raise(tmp_path, contents, message):
    (tmp_path / "input.txt").write_bytes(contents)
    with pytest.raises(DatasetError, match=message):
        datasets.load_shakespeare(tmp_path)


def test_real_shakespeare_loads(shared_data, monkeypatch):
    monkeypatch.setenv("MANIFOLDMUON_DATA", str(shared_data))
    if not (shared_data / "tinyshakespeare.txt").is_file():
        pytest.skip(f"no tinyshakespeare.txt in {shared_data}")
    text = datasets.load_shakespeare(download=False)
    assert len(text) == 1_115_394
    assert len(set(text)) == 65
    assert text.startswith("First Citizen:\nBefore we proceed any further, hear me speak.")


def test_pydoc_text_has_all_topics():
    text = datasets.load_pydoc_topics()
    topics = pydoc_data.topics.topics
    assert len(text) == sum(map(len, topics.values())) + 2 * (len(topics) - 1)
    assert all(topic in text for topic in topics.values())
