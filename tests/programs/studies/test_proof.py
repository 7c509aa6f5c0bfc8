"""The classifier with a proof, from training to the verifier, in a short run."""

import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.image import imread

from manifoldmuon_verify import verify
from studies import proof
from studies.records import WriteError

SMALL = proof.Settings(16, 2, 4, 100, 0.3, 0.3, 0.1, (0.05, 0.1), 40)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(proof.SETTINGS, "digits", SMALL)


@pytest.mark.slow
def test_run_writes_table_plot_and_proof(small, tmp_path, capfd):
    out = tmp_path / "run.json"
    assert proof.main(["--out", str(out)]) == 0
    record, told = json.loads(out.read_text()), capfd.readouterr().out
    assert record["verified"] is True
    assert record["settings"]["epochs"] == SMALL.epochs
    assert record["clean"] > 0.5
    for row in record["rows"]:
        assert 0 < row["certified among attacked"] <= row["all attacks"] <= row["pgd"] <= 1
    assert f"clean accuracy {record['clean']:.1%}" in told
    assert "verified, in real arithmetic: 359 images" in told
    assert imread(out.with_suffix(".png")).shape[0] > 300
    # The proof verifies in a separate process, until a weight is changed.
    check = [sys.executable, "-m", "manifoldmuon_verify", str(tmp_path / "run")]
    assert subprocess.run(check, capture_output=True).returncode == 0
    weights = tmp_path / "run" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    refused = subprocess.run(check, capture_output=True, text=True)
    assert refused.returncode == 1
    assert refused.stderr.startswith("refused: ")
    with pytest.raises(SystemExit):  # existing files are not overwritten
        proof.main(["--out", str(out)])
    assert "pass --overwrite" in capfd.readouterr().err


def test_new_certificate_keeps_other_files(tmp_path):
    net = proof.network(64, SMALL)
    x = np.random.default_rng(0).uniform(size=(20, 64)).astype(np.float32)
    data = proof.Images(x, np.zeros(20, int), x, np.zeros(20, int))
    folder = tmp_path / "run"
    told = set()
    for seed in (0, 1):
        params = net.init(jax.random.key(seed))
        found = proof.certify(net, params, data.test_x, data.test_y)
        proof.prove(folder, found, at=())
        told.add((folder / "certificate.json").read_text())
        (folder / "notes.txt").write_text("mine")
    assert len(told) == 2
    assert len(list(folder.iterdir())) == 4
    assert (folder / "notes.txt").read_text() == "mine"
    assert len(verify(folder).radii) == 20
    assert list(tmp_path.iterdir()) == [folder]
    with pytest.raises(WriteError, match="cannot write"):
        proof.prove(folder / "notes.txt", found, at=())


def test_file_at_folder_path_raises_before_training(tmp_path, capfd):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(SystemExit):
        proof.main(["--out", str(tmp_path / "run.json"), "--overwrite"])
    assert "is a file" in capfd.readouterr().err


@pytest.mark.slow
def test_broken_certificate_ends_the_run(monkeypatch):
    """The radii are doubled, as by a wrong Lipschitz constant."""
    data = np.random.default_rng(0).uniform(size=(200, 64)).astype(np.float32)
    net = proof.network(64, SMALL)
    params = net.init(jax.random.key(0))
    labels = np.asarray(net.apply(params, jnp.asarray(data))).argmax(-1)
    images = proof.Images(data, labels, data, labels)
    honest = proof.certify

    def doubled(*args):
        found = honest(*args)
        return dataclasses.replace(found, radii=2 * found.radii)

    monkeypatch.setattr(proof, "certify", doubled)
    settings = dataclasses.replace(SMALL, radii=(0.1,), attacked=200)
    with proof.progress(1) as bar, pytest.raises(AssertionError, match="broke an image"):
        proof.measure(net, params, images, settings, 0, bar)
