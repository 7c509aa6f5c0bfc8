"""Scripts of the gallery: short, listed on their page, and correct in short runs."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples import (
    certified,
    digits,
    gpt,
    hello_world,
    learning_rate_transfer,
    retractions,
    rotate_and_quantize,
    weight_erasure,
)
from studies.quantization import start_of

ROOT = Path(__file__).parents[3]
SCRIPTS = sorted((ROOT / "examples").rglob("[!_]*.py"))


def test_scripts_are_short_and_listed():
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    for path in SCRIPTS:
        most = 200 if path.parent.name == "trainers" else 100  # loops of whole trainers
        assert len(path.read_text(encoding="utf-8").splitlines()) < most, path
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        assert f"`{name}`" in page or path.stem == "digits"


@pytest.mark.slow
def test_hello_world_loss_falls():
    losses = hello_world.main(steps=60)
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.slow
def test_gpt_loss_falls_and_text_is_printed(capsys):
    losses = gpt.main(steps=20, width=16)
    assert losses[-1] < losses[0]
    assert len(capsys.readouterr().out) > 300


@pytest.mark.slow
def test_digits_optimizers_classify_and_picture_is_written(tmp_path, capsys):
    correct = digits.main(150, tmp_path / "digits.png")
    assert min(correct.values()) > 0.8
    assert "1.000 to 1.000" in capsys.readouterr().out.splitlines()[-1]
    assert (tmp_path / "digits.png").exists()


@pytest.mark.slow
def test_certified_accuracy_is_verified(capsys):
    assert certified.main(steps=60, width=16) > 0.5
    assert "verified: 359 images" in capsys.readouterr().out


@pytest.mark.slow
def test_dualized_updates_erase_more(tmp_path):
    readable = weight_erasure.main(120, 64, tmp_path / "erasure.png")
    assert readable["dualized"] < readable["gradient"]
    assert (tmp_path / "erasure.png").exists()


@pytest.mark.slow
def test_retractions_keep_weights_on_manifold(tmp_path):
    assert max(retractions.main(20, tmp_path / "drift.png").values()) < 1e-5
    assert (tmp_path / "drift.png").exists()


@pytest.mark.slow
def test_learning_rate_transfer_runs_per_width():
    assert list(learning_rate_transfer.main(widths=(16,), steps=40)) == [16]


@pytest.mark.slow
def test_rotations_fold_into_model():
    """With gains other than 1, which a start does not have."""
    model, tokens = rotate_and_quantize.gpt(7), jnp.arange(12).reshape(2, 6) % 7
    keys = iter(jax.random.split(jax.random.key(67), 9))
    for _, norm in nnx.iter_graph(model):
        if isinstance(norm, nnx.RMSNorm):
            scale: Any = norm.scale
            scale[...] = jax.random.uniform(next(keys), scale.shape, minval=0.5)
    folded = rotate_and_quantize.fold(model, start_of("random", jax.random.key(68), 64))
    scores = np.asarray(model(tokens))
    np.testing.assert_allclose(folded(tokens), scores, atol=1e-5 * np.abs(scores).max())
    assert (
        float(jnp.abs(folded.layers[0].embedding[...] - model.layers[0].embedding[...]).max()) > 1
    )


@pytest.mark.slow
def test_rotations_leave_model_unchanged():
    losses = rotate_and_quantize.main(steps=60, learning_steps=5)
    assert losses["error of the fold"] < 1e-5
    assert losses["full precision"] < np.log(100)
