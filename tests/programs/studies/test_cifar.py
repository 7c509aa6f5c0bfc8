"""CIFAR-10: small archives in the official format; harmful or damaged files raise errors."""

import io
import pickle
import struct
import tarfile

import numpy as np
import pytest

from studies import datasets
from studies.datasets import DatasetError

CLASSES = "airplane automobile bird cat deer dog frog horse ship truck"
ARCHIVE, FOLDER = "cifar-10-python.tar.gz", "cifar-10-batches-py"


def python2_batch(images: np.ndarray, labels: list[int]) -> bytes:
    """Return the pickle of images of unsigned bytes, as by Python 2 and NumPy 1."""
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntU\x01btR"
    array += b"(I1\n(I%d\nI%d\ntcnumpy\ndtype\n(U\x02u1I0\nI1\ntR" % images.shape
    array += b"(I3\nU\x01|NNNI-1\nI-1\nI0\ntbI00\nT" + struct.pack("<I", images.size)
    items = b"".join(b"I%d\n" % label for label in labels)
    return b"\x80\x02}(U\x04data" + array + images.tobytes() + b"tbU\x06labels(" + items + b"lu."


def python3_batch(images: np.ndarray, labels: list[int]) -> bytes:
    return pickle.dumps({b"data": images, b"labels": labels}, protocol=2)


def archive(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, contents in files.items():
            info = tarfile.TarInfo(f"{FOLDER}/{name}")
            info.size = len(contents)
            tar.addfile(info, io.BytesIO(contents))
    return buffer.getvalue()


def cifar_files(batch=python2_batch):
    """Return the archive's files with three images per batch, and their images and labels."""
    rng = np.random.default_rng(0)
    files, images, labels = {}, {}, {}
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        images[name] = rng.integers(0, 256, (3, 3072)).astype(np.uint8)
        labels[name] = rng.integers(0, 10, 3).tolist()
        files[name] = batch(images[name], labels[name])
    files["batches.meta"] = pickle.dumps({b"label_names": CLASSES.encode().split()}, protocol=2)
    return files, images, labels


@pytest.mark.parametrize("batch", [python2_batch, python3_batch])
@pytest.mark.parametrize(
    ("written", "given"), [(ARCHIVE, ""), ("small.tar.gz",) * 2, (FOLDER, ""), (FOLDER, FOLDER)]
)
def test_cifar_files_round_trip(tmp_path, batch, written, given):
    files, images, labels = cifar_files(batch)
    if written == FOLDER:
        (tmp_path / FOLDER).mkdir()
        for name, contents in files.items():
            (tmp_path / FOLDER / name).write_bytes(contents)
    else:
        (tmp_path / written).write_bytes(archive(files))
    found = datasets.load_cifar10(tmp_path / given)
    assert found.train_x.shape == (15, 32, 32, 3)
    assert found.train_x.dtype == np.float32
    assert found.classes == tuple(CLASSES.split())
    # A loop over the official layout: 1024 red bytes, row by row, then green, then blue.
    for i in range(3):
        for row, column, channel in [(0, 0, 0), (0, 5, 1), (7, 0, 2), (31, 31, 2)]:
            byte = images["test_batch"][i, 1024 * channel + 32 * row + column]
            assert found.test_x[i, row, column, channel] * 255 == pytest.approx(byte, abs=1e-3)
    assert found.test_y.tolist() == labels["test_batch"]
    assert found.train_y[3:6].tolist() == labels["data_batch_2"]


class Harm:
    """Object with a pickle that raises ZeroDivisionError if it runs."""

    def __reduce__(self):
        return exec, ("raise ZeroDivisionError('a pickle has run')",)


ROW = np.zeros((3, 3072), np.uint8)


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("data_batch_1", pickle.dumps({b"data": Harm()}), "it imports builtins.exec"),
        ("data_batch_1", b"cos\nsystem\n(S'true'\ntR.", "it imports os.system"),
        ("data_batch_1", python3_batch(ROW.astype("f4"), [0, 0, 0]), "unsigned bytes; got f4"),
        ("data_batch_1", python3_batch(ROW, [0, 0, 0])[:-100], "not a pickle of plain data"),
        ("data_batch_1", b"", "not a pickle of plain data"),
        ("data_batch_1", pickle.dumps([1, 2]), "holds a list, not a dictionary"),
        ("data_batch_1", pickle.dumps({}), "data of data_batch_1 is not an array"),
        ("test_batch", python2_batch(ROW[:, :3071], [0, 0, 0]), r"not an array of shape \(n, 3072"),
        ("test_batch", python2_batch(ROW, [0, 0]), "no list of 3 labels"),
        ("test_batch", python2_batch(ROW, [0, 0, 10]), "labels that are not numbers from 0 to 9"),
        ("batches.meta", pickle.dumps({b"label_names": [b"cat"]}), "does not name ten classes"),
    ],
)
def test_harmful_or_damaged_cifar_files_raise(tmp_path, name, contents, message):
    files, _, _ = cifar_files()
    (tmp_path / ARCHIVE).write_bytes(archive(files | {name: contents}))
    with pytest.raises(DatasetError, match=message):
        datasets.load_cifar10(tmp_path)


def test_missing_or_truncated_cifar_archives_raise(tmp_path):
    files, _, _ = cifar_files()
    del files["data_batch_4"], files["batches.meta"]
    part = archive(files)
    for contents, message in [
        (None, "has no cifar-10-python.tar.gz or cifar-10-batches-py"),
        (part, "has no data_batch_4, batches.meta in"),
        (part[:1000], "is not a whole tar.gz archive"),
        (b"<html>", "is not a whole tar.gz archive"),
    ]:
        if contents is not None:
            (tmp_path / ARCHIVE).write_bytes(contents)
        with pytest.raises(DatasetError, match=message):
            datasets.load_cifar10(tmp_path)


@pytest.mark.slow
def test_real_cifar_archive_loads(shared_data):
    path = shared_data / "cifar-10-python-subset.tar.gz"
    if not path.is_file():
        pytest.skip(f"no {path.name} in {shared_data}")
    found = datasets.load_cifar10(path)
    assert found.train_x.shape == (10000, 32, 32, 3)
    assert found.test_x.shape == (2000, 32, 32, 3)
    assert found.classes == tuple(CLASSES.split())
    # Published channel means of the whole set; a sample matches them to about 0.01.
    np.testing.assert_allclose(
        found.train_x.mean((0, 1, 2), dtype=np.float64), [0.491, 0.482, 0.447], atol=0.01
    )
    # Neighbouring pixels of photographs are similar, so the axes are in the right order.
    sample = found.train_x[:500].astype(np.float64)
    for axis in (1, 2):
        assert np.abs(np.diff(sample, axis=axis)).mean() < 0.25 * sample.std()
