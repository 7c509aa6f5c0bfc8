"""Downloads of data sets: checked, cached, with a one-line error when offline."""

import functools
import gzip
import hashlib
import http.server
import re
import socket
import threading

import numpy as np
import pytest

from studies import datasets
from studies.datasets import DatasetError, cifar, digits, files, text
from tests.programs.studies.test_datasets import idx


@pytest.fixture
def unreachable(monkeypatch, tmp_path):
    """Redirect every download to a local port without a server; return the cache folder."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    for module in (digits, cifar, text):
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
def test_offline_gives_one_line_error(unreachable, load, name):
    with pytest.raises(DatasetError) as caught:
        load()
    remedy = f"put the file at {unreachable / name} by hand, or pass directory="
    assert re.fullmatch(f".*could not download http://127.0.0.1.*{remedy}.*", str(caught.value))
    assert caught.value.__suppress_context__
    assert [path for path in unreachable.rglob("*") if path.is_file()] == []


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Run a local web server; yield its folder and address."""
    (tmp_path / "served").mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format, *args):
            """Print nothing."""

    handler = functools.partial(Quiet, directory=str(tmp_path / "served"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield tmp_path / "served", f"http://127.0.0.1:{running.server_address[1]}/"
        running.shutdown()
        thread.join()


def test_download_is_checked_and_cached(server, tmp_path):
    served, url = server
    (served / "file.txt").write_bytes(b"contents")
    digest = "sha256:" + hashlib.sha256(b"contents").hexdigest()
    path = tmp_path / "cache" / "deep" / "file.txt"
    assert files.fetch("Text", path, url + "file.txt", digest, True) == path
    assert path.read_bytes() == b"contents"
    (served / "file.txt").unlink()  # the second call must not download
    assert files.fetch("Text", path, url + "file.txt", digest, True) == path


@pytest.mark.parametrize(
    ("served_contents", "message"),
    [(b"other", "the download of .* is damaged or another file"), (None, "could not download")],
)
def test_wrong_download_is_not_cached(server, tmp_path, served_contents, message):
    served, url = server
    if served_contents is not None:
        (served / "file.txt").write_bytes(served_contents)
    path = tmp_path / "cache" / "file.txt"
    with pytest.raises(DatasetError, match=message):
        files.fetch("Text", path, url + "file.txt", "md5:" + "0" * 32, True)
    assert list(path.parent.iterdir()) == []


def test_mnist_download_accepts_any_gzip_wrapping(server, tmp_path, monkeypatch):
    served, url = server
    images = {"train": np.ones((2, 28, 28)), "t10k": np.full((1, 28, 28), 255)}
    digests = {}
    for part, array in images.items():
        for name, values in (("images-idx3", array), ("labels-idx1", np.zeros(len(array)))):
            contents = idx(values)
            digests[f"{part}-{name}-ubyte"] = "md5:" + hashlib.md5(contents).hexdigest()
            (served / f"{part}-{name}-ubyte.gz").write_bytes(gzip.compress(contents, 1))
    monkeypatch.setattr(digits, "_URL", url)
    monkeypatch.setattr(digits, "_FILES", digests)
    monkeypatch.setenv("MANIFOLDMUON_DATA", str(tmp_path / "cache"))
    found = datasets.load_mnist()
    assert found.train_x.shape == (2, 28, 28)
    assert (tmp_path / "cache" / "mnist" / "t10k-labels-idx1-ubyte.gz").is_file()
    assert found.test_x.min() == 1


def test_data_home_is_variable_or_user_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("MANIFOLDMUON_DATA", str(tmp_path))
    assert datasets.data_home() == tmp_path
    monkeypatch.delenv("MANIFOLDMUON_DATA")
    assert datasets.data_home().name == "manifoldmuon"
