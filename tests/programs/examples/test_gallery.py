"""Scripts of the gallery: short, listed on their page, and correct in short runs."""

import importlib
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples import rotate_and_quantize
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


# Arguments of `main`, what holds of its result, and what it prints.
RUNS = {
    "hello_world": ({"steps": 60}, lambda losses: losses[-1] < 0.1 * losses[0], ""),
    "gpt": ({"steps": 20, "width": 16}, lambda losses: losses[-1] < losses[0], ".{300}"),
    "digits": ({"steps": 150}, lambda right: min(right.values()) > 0.8, r"1.000 to 1.000 +\S+\n$"),
    "certified": ({"steps": 60, "width": 16}, lambda x: x > 0.5, "verified: 359 images"),
    "weight_erasure": ({"steps": 120, "width": 64}, lambda x: x["dualized"] < x["gradient"], ""),
    "retractions": ({"steps": 20}, lambda distances: max(distances.values()) < 1e-5, ""),
    "learning_rate_transfer": ({"widths": (16,), "steps": 40}, lambda best: [*best] == [16], ""),
    "rotate_and_quantize": (
        {"steps": 60, "learning_steps": 5},
        lambda x: x["error of the fold"] < 1e-5 and x["full precision"] < np.log(100), "",
    ),
}  # fmt: skip
DRAWN = {"digits", "weight_erasure", "retractions"}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_short_run_has_expected_result(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments, holds, printed = RUNS[name]
    assert holds(importlib.import_module(f"examples.{name}").main(**arguments))
    assert re.search(printed, capsys.readouterr().out, re.DOTALL)
    assert (tmp_path / "runs" / f"{name}.png").exists() == (name in DRAWN)


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
    table, turned = (x.layers[0].embedding[...] for x in (model, folded))
    assert float(jnp.abs(turned - table).max()) > 1


# Steps, and a bound on the mean loss of the last ten. Chance is ln 10 = 2.30, and ln 17 = 2.83 for
# the pixels.
FRAMEWORKS = [("nnx", 50, 0.6), ("linen", 30, 1.9), ("equinox", 50, 0.6), ("plain", 60, 0.2)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "steps", "below"), FRAMEWORKS)
def test_framework_program_trains_on_manifold(name, steps, below):
    trained = importlib.import_module(f"examples.frameworks.{name}").train(steps)
    assert len(trained.losses) == steps
    assert np.mean(trained.losses[-10:]) < below < trained.losses[0]
    assert set(trained.distances) == {row.path for row in trained.table.rows if row.manifold}
    # A single rounding of the entries, in bfloat16 for equinox and in float32 for the others.
    assert max(map(float, trained.distances.values())) < (0.01 if name == "equinox" else 1e-5)
