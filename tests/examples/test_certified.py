"""The classifier with a proof, from training to the verifier, on few epochs."""

import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.image import imread

from examples import certified

SMALL = certified.Settings(16, 2, 4, 100, 0.3, 0.3, 0.1, (0.05, 0.1), 40)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(certified.SETTINGS, "digits", SMALL)


def test_a_run_ends_with_a_table_a_picture_and_a_proof(small, tmp_path, capfd):
    out = tmp_path / "run.json"
    assert certified.main(["--out", str(out)]) == 0
    record, told = json.loads(out.read_text()), capfd.readouterr().out
    assert record["verified"] is True
    assert record["settings"]["epochs"] == SMALL.epochs
    assert record["clean"] > 0.5
    for row in record["rows"]:
        assert 0 < row["certified among attacked"] <= row["all attacks"] <= row["pgd"] <= 1
    assert f"clean accuracy {record['clean']:.1%}" in told
    assert "verified, in real arithmetic: 359 images" in told
    assert imread(out.with_suffix(".png")).shape[0] > 300
    # The proof stands by itself, until a weight is changed.
    check = [sys.executable, "-m", "manifoldmuon_verify", str(tmp_path / "run")]
    assert subprocess.run(check, capture_output=True).returncode == 0
    weights = tmp_path / "run" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    refused = subprocess.run(check, capture_output=True, text=True)
    assert refused.returncode == 1
    assert refused.stderr.startswith("refused: ")
    with pytest.raises(SystemExit):  # what exists is not written over
        certified.main(["--out", str(out)])
    assert "pass --overwrite" in capfd.readouterr().err


def test_other_files_in_the_folder_of_the_proof_are_kept(tmp_path):
    for name in ("certificate.json", "weights.safetensors", "notes.txt"):
        (tmp_path / name).write_text("x")
    certified.clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_an_attack_that_breaks_a_certified_image_ends_the_run(monkeypatch):
    """As it would with a wrong Lipschitz constant: radii twice as large as they are."""
    data = np.random.default_rng(0).uniform(size=(200, 64)).astype(np.float32)
    net = certified.network(64, SMALL)
    params = net.init(jax.random.key(0))
    labels = np.asarray(net.apply(params, jnp.asarray(data))).argmax(-1)
    images = certified.Images(data, labels, data, labels)
    honest = certified.certify

    def doubled(*args):
        found = honest(*args)
        return dataclasses.replace(found, radii=2 * found.radii)

    monkeypatch.setattr(certified, "certify", doubled)
    settings = dataclasses.replace(SMALL, radii=(0.1,), attacked=200)
    with certified.progress(1) as bar, pytest.raises(AssertionError, match="broke an image"):
        certified.measure(net, params, images, settings, 0, bar)
