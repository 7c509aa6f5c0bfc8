"""Programs for third-party trainers; each needs its trainer installed."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers

import manifoldmuon as mm
from examples.trainers import maxtext, runs
from manifoldmuon.manifolds import Stiefel
from studies import claims

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "trainers.md").read_text(encoding="utf-8")
NEEDS = {
    "easydel": "easydel",
    "kauldron": "kauldron.kd",
    "levanter": "levanter.main.train_lm",
    "maxtext": "maxtext.trainers.pre_train.train",
    "nnx": "grain",
    "tunix": "tunix.sft.peft_trainer",
}


def test_every_trainer_has_one_install_line():
    """On the page, in the weekly workflow, and in its program."""
    files = {x.stem for x in (ROOT / "examples" / "trainers").glob("*.py")}
    assert files - {"__init__", "runs"} == NEEDS.keys() == runs.DISTRIBUTIONS.keys()
    workflow = (ROOT / ".github" / "workflows" / "trainers.yml").read_text(encoding="utf-8")
    lines = dict(re.findall(r'\{name: (\w+), install: "?(.*?)"?\}', workflow))
    assert lines.keys() == NEEDS.keys()
    for name, line in lines.items():
        assert f"| `pip install {line} .` | `python -m examples.trainers.{name}` |" in PAGE
        program = (ROOT / "examples" / "trainers" / f"{name}.py").read_text(encoding="utf-8")
        assert f"\npython -m examples.trainers.{name}    # after pip install {line}\n" in program


def figures(name: str) -> list[str]:
    """Return the versions, losses and differences of a trainer's record, as on the page."""
    path = ROOT / "examples" / "trainers" / "results" / f"{name}.json"
    record = json.loads(path.read_bytes())
    versions = ", ".join(" ".join(x) for x in record["versions"].items() if x[0] != "manifoldmuon")
    (trainer,) = re.findall(rf"^\| ([\w ]+) \|.*examples\.trainers\.{name}`", PAGE, re.MULTILINE)
    _, *ours = record["optimizers"].values()
    cells = [
        trainer,
        *(f"{row['first']:.2f} to {row['last']:.3g}" for row in record["optimizers"].values()),
        f"{ours[0]['optax']:.0e}",
        "different" if any(row["resumed"] for row in ours) else "the same",
        ", ".join(f"{row['devices']:.0e}" for row in ours),
        f"{ours[2]['distance']:.0e}",
    ]
    row = f"| {' | '.join(cells)} |".replace("e-0", "e-")
    return [f"| `python -m examples.trainers.{name}` | {versions} |", row]


def test_page_matches_its_records():
    held = {"docs/trainers.md": [line for name in NEEDS for line in figures(name)]}
    assert list(claims.unproved({"docs/trainers.md": PAGE}, held)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS)
def test_trainer_equals_optax_and_resumes(name):
    pytest.importorskip(NEEDS[name], exc_type=ImportError)
    assert runs.main(importlib.import_module(f"examples.trainers.{name}").train, []) == 0


def test_report_kills_the_process_at_its_step(tmp_path):
    program = "from examples.trainers.runs import Run; from pathlib import Path; import sys\n"
    program += "run = Run('optax', Path(sys.argv[1]), kill_at=2)\n"
    program += "for step in range(4): run.report(step, 1 / (step + 1))"
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, check=False)
    assert done.returncode == -9
    lines = (tmp_path / "losses.jsonl").read_text(encoding="utf-8")
    assert lines == f"[0, 1.0]\n[1, 0.5]\n[2, {1 / 3}]\n"


@pytest.mark.parametrize("option", ["--steps=0", "--devices=-1", "--save=/no/such/folder/a.json"])
def test_impossible_option_ends_before_training(option, capsys):
    with pytest.raises(SystemExit) as ended:
        runs.main(maxtext.train, [option])
    assert ended.value.code == 2
    assert option.partition("=")[0] in capsys.readouterr().err.splitlines()[-1]


def test_different_steps_or_losses_are_apart():
    assert runs._apart({0: 4.0, 1: 2.0}, {1: 1.0, 0: 4.0}) == 0.25
    with pytest.raises(RuntimeError, match="steps \\[1\\] are in one run only"):
        runs._apart({0: 2.0, 1: 1.0}, {0: 2.0})


def test_saved_record_has_losses_and_differences(tmp_path, monkeypatch):
    def losses(command, folder, status=0, devices=1):
        folder.mkdir(exist_ok=True)
        (folder / "losses.jsonl").touch()
        if command[-1] == "optax":
            return dict(enumerate([4.0, 2.0, 1.5, 1.0]))
        if folder.name == "killed" and not status:
            return {2: 2.5, 3: 1.0}
        return dict(enumerate([4.0, 2.5 if devices == 1 else 4.5, 1.5, 1.0]))

    monkeypatch.setattr(runs, "_losses", losses)
    monkeypatch.setattr(runs.metadata, "version", lambda name: f"that of {name}")
    path = tmp_path / "record.json"
    options = ["--steps", "4", "--only", "optax", "drop-in", "--save", str(path)]
    assert runs.main(maxtext.train, options) == 1
    record = json.loads(path.read_bytes())
    assert record["versions"]["maxtext"] == "that of maxtext"
    assert (record["steps"], record["devices"]) == (4, 8)
    assert record["optimizers"] == {
        "optax": {"first": 4.0, "last": 1.0},
        "drop-in": {"first": 4.0, "last": 1.0, "resumed": 0.25, "devices": 0.5, "optax": 0.125},
    }


@pytest.mark.slow
def test_optimizers_share_one_start():
    """The drop-in's first update is Optax's; the constrained one ends on the manifold."""
    params = {"kernel": jax.random.normal(jax.random.key(60), (6, 4)), "bias": jnp.ones(4)}
    grads = jax.tree.map(jnp.sin, params)

    def geometry(matrix):
        return {"kernel": matrix.transposed(), "bias": None}

    moved = {}
    for name in runs.RATES:
        tx = runs.optimizer(name, 0.1, geometry, optax.adamw(1e-3))
        updates, _ = tx.update(grads, tx.init(params), params)
        moved[name] = optax.apply_updates(params, updates)
    np.testing.assert_allclose(moved["drop-in"]["kernel"], moved["optax"]["kernel"], atol=1e-6)
    kernel = moved["stiefel"]["kernel"]
    np.testing.assert_allclose(kernel.T @ kernel, jnp.eye(4), atol=1e-5)
    norms = [jnp.linalg.norm(tree["kernel"]) for tree in (moved["muonh"], params)]
    np.testing.assert_allclose(*norms, rtol=1e-6)


def test_maxtext_tables_become_geometry():
    """Scanned layers are in the second axis, and heads are fused with the fan-in or the fan-out."""
    tables = {
        "query": MuonDimensionNumbers((0,), (-2, -1)),  # (in, layers, heads, head_dim)
        "out": MuonDimensionNumbers((0, -2), (-1,)),  # (heads, layers, head_dim, out)
        "wi": MuonDimensionNumbers((0,), (-1,)),  # (in, layers, out)
        "norm": None,
    }
    shapes = {"query": (8, 3, 2, 4), "out": (2, 3, 4, 8), "wi": (8, 3, 16), "norm": (8, 3)}
    params = {k: jax.random.normal(jax.random.key(len(k)), shape) for k, shape in shapes.items()}
    points = mm.optim.project_tree(maxtext.geometry(tables, Stiefel()), params)
    query, out = points["query"][:, 1].reshape(8, 8), points["out"][:, 1].reshape(8, 8)
    np.testing.assert_allclose(query.T @ query, jnp.eye(8), atol=1e-5)
    np.testing.assert_allclose(out.T @ out, jnp.eye(8), atol=1e-5)
    wi = points["wi"][:, 2]  # (in, out): orthonormal rows
    np.testing.assert_allclose(wi @ wi.T, jnp.eye(8), atol=1e-5)
    assert points["norm"] is params["norm"]
