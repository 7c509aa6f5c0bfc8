"""Data sets: small files in the official formats are read back; damage and absence are told."""

import functools
import gzip
import hashlib
import http.server
import io
import pickle
import pydoc_data.topics
import socket
import struct
import tarfile
import threading
from typing import Any, cast

import numpy as np
import pytest

from manifoldmuon.lab import datasets
from manifoldmuon.lab.datasets import DatasetError, _cifar, _digits, _files, _mnist, _text

# --- digits ------------------------------------------------------------------------------------


def test_digits_are_the_ones_of_scikit_learn():
    from sklearn.datasets import load_digits

    original = cast(Any, load_digits())
    found = datasets.load_digits()
    assert found.train_x.dtype == found.test_x.dtype == np.float32
    assert found.train_x.shape[1:] == found.test_x.shape[1:] == (8, 8)
    assert found.classes == tuple(str(name) for name in original.target_names)

    def rows(images, labels):
        return sorted(
            (int(label), *image)
            for label, image in zip(labels, images.reshape(-1, 64), strict=True)
        )

    both = np.concatenate([found.train_x, found.test_x])
    labels = np.concatenate([found.train_y, found.test_y])
    assert rows(16 * both, labels) == rows(original.data, original.target)
    assert both.min() == 0
    assert both.max() == 1


def test_the_split_is_stratified_and_depends_on_the_seed_alone():
    first, again, other = (datasets.load_digits(seed) for seed in (0, 0, 1))
    for one, two in zip(first[:4], again[:4], strict=True):
        np.testing.assert_array_equal(one, two)
    assert not np.array_equal(first.test_x, other.test_x)
    counts = np.bincount(first.train_y), np.bincount(first.test_y)
    np.testing.assert_allclose(counts[1] / (counts[0] + counts[1]), 0.2, atol=0.5 / counts[0].min())
    # Shuffled: neither part is sorted by class.
    assert np.any(np.diff(first.train_y) < 0)
    assert np.any(np.diff(first.test_y) < 0)


def test_a_split_without_some_class_is_refused():
    with pytest.raises(ValueError, match="test_fraction=0.1 puts 0 of the 3 images of class 1"):
        _digits.stratified_split(np.array([0] * 10 + [1] * 3), 0, 0.1)


# --- MNIST -------------------------------------------------------------------------------------


def idx(array: np.ndarray) -> bytes:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()


@pytest.fixture
def mnist_files(tmp_path):
    """A folder with MNIST's four files, seven training and three test images long."""
    rng = np.random.default_rng(0)
    arrays = {}
    for part, size in (("train", 7), ("t10k", 3)):
        arrays[f"{part}-images-idx3-ubyte"] = rng.integers(0, 256, (size, 28, 28))
        arrays[f"{part}-labels-idx1-ubyte"] = rng.integers(0, 10, size)
    for name, array in arrays.items():
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
    return tmp_path, arrays


@pytest.mark.parametrize("compressed", [True, False])
def test_mnist_files_are_read_back(mnist_files, compressed):
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


IMAGES = "train-images-idx3-ubyte"
LABELS = "train-labels-idx1-ubyte"


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        (IMAGES, gzip.compress(b"\x00\x00\x0d\x03"), "wrong magic number"),
        (IMAGES, gzip.compress(b"<html>"), "wrong magic number"),
        (IMAGES, gzip.compress(b"\x00\x00\x08\x03\x00\x00"), "header is incomplete"),
        (IMAGES, gzip.compress(idx(np.zeros((7, 28, 28)))[:-1]), "promises 5504 bytes"),
        (IMAGES, gzip.compress(b"\x00\x00\x08\x03" + b"\xff" * 12), "promises"),
        (IMAGES, b"<html>", "not a whole gzip file"),
        (IMAGES, gzip.compress(idx(np.zeros((7, 28, 28))))[:-9], "not a whole gzip file"),
        (IMAGES, gzip.compress(idx(np.zeros((7, 28)))), r"not \(n, 28, 28\)"),
        (IMAGES, gzip.compress(idx(np.zeros((7, 32, 32)))), r"not \(n, 28, 28\)"),
        (LABELS, gzip.compress(idx(np.zeros(6))), "for 7 images"),
        (LABELS, gzip.compress(idx(np.full(7, 10))), "labels go up to 10"),
    ],
)
def test_damaged_mnist_files_are_named(mnist_files, name, contents, message):
    folder, _ = mnist_files
    (folder / f"{name}.gz").write_bytes(contents)
    with pytest.raises(DatasetError, match=message):
        datasets.load_mnist(folder)


def test_a_missing_mnist_file_is_named_with_its_folder(mnist_files):
    folder, _ = mnist_files
    (folder / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(
        DatasetError, match=r"no t10k-labels-idx1-ubyte.gz or t10k-labels-idx1-ubyte in"
    ) as caught:
        datasets.load_mnist(folder)
    assert str(folder) in str(caught.value)
    with pytest.raises(DatasetError, match="there is no folder"):
        datasets.load_mnist(folder / "elsewhere")


def test_the_cache_takes_only_official_contents(mnist_files, monkeypatch, tmp_path):
    folder, _ = mnist_files
    monkeypatch.setenv("MANIFOLDMUON_DATA", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    with pytest.raises(DatasetError, match="found no train-images-idx3-ubyte.gz in"):
        datasets.load_mnist(download=False)
    (tmp_path / "home" / "mnist").symlink_to(folder)
    with pytest.raises(DatasetError, match="md5 .* and not 6bbc9ace898e44ae57da46a324031adb"):
        datasets.load_mnist(download=False)


def test_the_real_mnist_passes_its_check(shared_data, monkeypatch):
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


# --- CIFAR-10 ----------------------------------------------------------------------------------

CIFAR_CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)


def python2_array(array: np.ndarray) -> bytes:
    """The opcodes with which Python 2 and NumPy 1 wrote an array of unsigned bytes."""
    contents = array.tobytes()
    return (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntU\x01btR"
        b"(I1\n(I%d\nI%d\ntcnumpy\ndtype\n(U\x02u1I0\nI1\ntR"
        % array.shape
        + b"(I3\nU\x01|NNNI-1\nI-1\nI0\ntb"
        + b"I00\nT"
        + struct.pack("<I", len(contents))
        + contents
        + b"tb"
    )


def python2_batch(images: np.ndarray, labels: list[int]) -> bytes:
    items = b"".join(b"I%d\n" % label for label in labels)
    array = python2_array(images)
    return b"\x80\x02}(U\x04data" + array + b"U\x06labels(" + items + b"lu."


def python3_batch(images: np.ndarray, labels: list[int]) -> bytes:
    return pickle.dumps({b"data": images, b"labels": labels}, protocol=2)


def archive(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, contents in files.items():
            info = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            info.size = len(contents)
            tar.addfile(info, io.BytesIO(contents))
    return buffer.getvalue()


def cifar_files(batch=python2_batch):
    """The archive's files, three images a batch, and what they hold."""
    rng = np.random.default_rng(0)
    files, images, labels = {}, {}, {}
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        images[name] = rng.integers(0, 256, (3, 3072)).astype(np.uint8)
        labels[name] = rng.integers(0, 10, 3).tolist()
        files[name] = batch(images[name], labels[name])
    names = [name.encode() for name in CIFAR_CLASSES]
    files["batches.meta"] = pickle.dumps({b"label_names": names}, protocol=2)
    return files, images, labels


@pytest.mark.parametrize("batch", [python2_batch, python3_batch])
@pytest.mark.parametrize("form", ["archive", "other name", "unpacked", "unpacked itself"])
def test_cifar_files_are_read_back(tmp_path, batch, form):
    files, images, labels = cifar_files(batch)
    place = tmp_path
    if form == "archive":
        (tmp_path / "cifar-10-python.tar.gz").write_bytes(archive(files))
    elif form == "other name":
        place = tmp_path / "small.tar.gz"
        place.write_bytes(archive(files))
    else:
        (tmp_path / "cifar-10-batches-py").mkdir()
        for name, contents in files.items():
            (tmp_path / "cifar-10-batches-py" / name).write_bytes(contents)
        place = tmp_path if form == "unpacked" else tmp_path / "cifar-10-batches-py"
    found = datasets.load_cifar10(place)
    assert found.train_x.shape == (15, 32, 32, 3)
    assert found.train_x.dtype == np.float32
    assert found.classes == CIFAR_CLASSES
    # A loop over the official layout: 1024 red bytes, row by row, then green, then blue.
    for i in range(3):
        for row, column, channel in [(0, 0, 0), (0, 5, 1), (7, 0, 2), (31, 31, 2)]:
            byte = images["test_batch"][i, 1024 * channel + 32 * row + column]
            assert found.test_x[i, row, column, channel] * 255 == pytest.approx(byte, abs=1e-3)
    assert found.test_y.tolist() == labels["test_batch"]
    assert found.train_y[3:6].tolist() == labels["data_batch_2"]


class Harm:
    """A pickle that, if it ran, would raise an error of its own."""

    def __reduce__(self):
        return exec, ("raise ZeroDivisionError('a pickle has run')",)


ROW = np.zeros((3, 3072), np.uint8)


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("data_batch_1", pickle.dumps({b"data": Harm()}), "it asks for builtins.exec"),
        ("data_batch_1", b"cos\nsystem\n(S'true'\ntR.", "it asks for os.system"),
        ("data_batch_1", python3_batch(ROW.astype(np.float32), [0, 0, 0]), "array of f4"),
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
def test_harmful_and_damaged_cifar_files_are_named(tmp_path, name, contents, message):
    files, _, _ = cifar_files()
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(archive(files | {name: contents}))
    with pytest.raises(DatasetError, match=message):
        datasets.load_cifar10(tmp_path)


def test_missing_and_cut_cifar_archives_are_told(tmp_path):
    with pytest.raises(DatasetError, match=r"no cifar-10-python.tar.gz or cifar-10-batches-py"):
        datasets.load_cifar10(tmp_path)
    files, _, _ = cifar_files()
    del files["data_batch_4"], files["batches.meta"]
    path = tmp_path / "cifar-10-python.tar.gz"
    path.write_bytes(archive(files))
    with pytest.raises(DatasetError, match=r"has no data_batch_4, batches.meta in"):
        datasets.load_cifar10(tmp_path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(DatasetError, match=r"is not a whole tar.gz archive"):
        datasets.load_cifar10(tmp_path)
    path.write_bytes(b"<html>")
    with pytest.raises(DatasetError, match=r"is not a whole tar.gz archive"):
        datasets.load_cifar10(tmp_path)


def test_a_real_cifar_archive_is_read(shared_data):
    path = shared_data / "cifar-10-python-subset.tar.gz"
    if not path.is_file():
        pytest.skip(f"no {path.name} in {shared_data}")
    found = datasets.load_cifar10(path)
    assert found.train_x.shape == (10000, 32, 32, 3)
    assert found.test_x.shape == (2000, 32, 32, 3)
    assert found.classes == CIFAR_CLASSES
    # Published channel means of the whole set, which a sample meets to about a hundredth.
    np.testing.assert_allclose(
        found.train_x.mean((0, 1, 2), dtype=np.float64), [0.491, 0.482, 0.447], atol=0.01
    )
    # Neighbouring pixels of photographs are alike: the axes are in the right order.
    sample = found.train_x[:500].astype(np.float64)
    for axis in (1, 2):
        assert np.abs(np.diff(sample, axis=axis)).mean() < 0.25 * sample.std()


# --- texts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tinyshakespeare.txt", "input.txt"])
def test_a_text_is_read_as_it_is(tmp_path, name):
    text = "First Citizen:\r\nÀ la carte\n"
    (tmp_path / name).write_bytes(text.encode("utf-8"))
    assert datasets.load_shakespeare(tmp_path) == text


@pytest.mark.parametrize(
    ("contents", "message"), [(b"", "is empty"), (b"\xff\xfe\x00", "not a text in UTF-8")]
)
def test_damaged_texts_are_told(tmp_path, contents, message):
    (tmp_path / "input.txt").write_bytes(contents)
    with pytest.raises(DatasetError, match=message):
        datasets.load_shakespeare(tmp_path)


def test_the_real_shakespeare_passes_its_check(shared_data, monkeypatch):
    monkeypatch.setenv("MANIFOLDMUON_DATA", str(shared_data))
    if not (shared_data / "tinyshakespeare.txt").is_file():
        pytest.skip(f"no tinyshakespeare.txt in {shared_data}")
    text = datasets.load_shakespeare(download=False)
    assert len(text) == 1_115_394
    assert len(set(text)) == 65
    assert text.startswith("First Citizen:\nBefore we proceed any further, hear me speak.")


def test_the_help_topics_are_all_there():
    text = datasets.load_pydoc_topics()
    topics = pydoc_data.topics.topics
    assert len(text) == sum(map(len, topics.values())) + 2 * (len(topics) - 1)
    assert all(topic in text for topic in topics.values())


# --- downloads ---------------------------------------------------------------------------------


@pytest.fixture
def unreachable(monkeypatch, tmp_path):
    """Every download leads to a port of this machine on which nothing listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    for module in (_mnist, _cifar, _text):
        monkeypatch.setattr(module, "_URL", f"http://127.0.0.1:{port}/")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("MANIFOLDMUON_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("load", "name"),
    [
        (datasets.load_mnist, "mnist/train-images-idx3-ubyte.gz"),
        (datasets.load_cifar10, "cifar-10-python.tar.gz"),
        (datasets.load_shakespeare, "tinyshakespeare.txt"),
    ],
)
def test_offline_is_one_line_that_says_what_to_do(unreachable, load, name):
    with pytest.raises(DatasetError) as caught:
        load()
    message = str(caught.value)
    assert "could not download http://127.0.0.1" in message
    assert f"put the file at {unreachable / name} by hand, or pass directory=" in message
    assert "\n" not in message
    assert caught.value.__suppress_context__
    assert [path for path in unreachable.rglob("*") if path.is_file()] == []


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A web server on this machine: its folder and its address."""
    (tmp_path / "served").mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format, *args):
            """Nothing on the screen."""

    handler = functools.partial(Quiet, directory=str(tmp_path / "served"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield tmp_path / "served", f"http://127.0.0.1:{running.server_address[1]}/"
        running.shutdown()
        thread.join()


def test_a_download_is_checked_and_kept(server, tmp_path):
    served, url = server
    (served / "file.txt").write_bytes(b"contents")
    digest = "sha256:" + hashlib.sha256(b"contents").hexdigest()
    path = tmp_path / "cache" / "deep" / "file.txt"
    assert _files.fetch("Text", path, url + "file.txt", digest, True) == path
    assert path.read_bytes() == b"contents"
    (served / "file.txt").unlink()  # the second time it is not asked for
    assert _files.fetch("Text", path, url + "file.txt", digest, True) == path


@pytest.mark.parametrize(
    ("served_contents", "message"),
    [(b"other", "what came from .* is damaged or another file"), (None, "could not download")],
)
def test_a_wrong_download_is_not_kept(server, tmp_path, served_contents, message):
    served, url = server
    if served_contents is not None:
        (served / "file.txt").write_bytes(served_contents)
    path = tmp_path / "cache" / "file.txt"
    with pytest.raises(DatasetError, match=message):
        _files.fetch("Text", path, url + "file.txt", "md5:" + "0" * 32, True)
    assert list(path.parent.iterdir()) == []


def test_mnist_comes_from_its_address_whatever_the_gzip_wrapping(server, tmp_path, monkeypatch):
    served, url = server
    images = {"train": np.ones((2, 28, 28)), "t10k": np.full((1, 28, 28), 255)}
    digests = {}
    for part, array in images.items():
        for name, values in (("images-idx3", array), ("labels-idx1", np.zeros(len(array)))):
            contents = idx(values)
            digests[f"{part}-{name}-ubyte"] = "md5:" + hashlib.md5(contents).hexdigest()
            (served / f"{part}-{name}-ubyte.gz").write_bytes(gzip.compress(contents, 1))
    monkeypatch.setattr(_mnist, "_URL", url)
    monkeypatch.setattr(_mnist, "_FILES", digests)
    monkeypatch.setenv("MANIFOLDMUON_DATA", str(tmp_path / "cache"))
    found = datasets.load_mnist()
    assert found.train_x.shape == (2, 28, 28)
    assert (tmp_path / "cache" / "mnist" / "t10k-labels-idx1-ubyte.gz").is_file()
    assert found.test_x.min() == 1


def test_the_data_home_is_the_variable_or_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("MANIFOLDMUON_DATA", str(tmp_path))
    assert datasets.data_home() == tmp_path
    monkeypatch.delenv("MANIFOLDMUON_DATA")
    assert datasets.data_home().name == "manifoldmuon"
