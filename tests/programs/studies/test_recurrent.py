"""Recurrent matrices: tasks, networks by plain loops, findings on known losses, and settings."""

import dataclasses

import jax
import numpy as np
import pytest

from studies import run_study
from studies.recurrent.networks import METHODS
from studies.recurrent.study import MEASURED, Recurrent, lowest, rivals, rule
from studies.recurrent.tasks import RIVAL_TASKS, TASKS, adding, copy, recall

TINY = Recurrent(
    tasks=("recall",),
    uses=(16, 32),
    octaves=(-5, -4),
    seeds=(0, 1),
    width=4,
    steps=2,
    batch=2,
    rival_tasks=("digits",),
    methods=("Adam", "Orthogonal"),
    rival_seeds=(0, 1),
    rival_width=4,
    reading_steps=50,
    rival_batch=2,
)


def test_copy_returns_letters_after_signal():
    inputs, labels = map(np.asarray, copy(15).draw(0, jax.random.key(0), 3))
    symbols = inputs.argmax(-1)
    assert inputs.shape == (35, 3, 10)
    np.testing.assert_array_equal(symbols[:10], labels[25:])
    assert set(symbols[:10].flat) <= set(range(1, 9))
    assert np.all(symbols[24] == 9)
    assert not symbols[10:24].any()
    assert not symbols[25:].any()
    assert not labels[:25].any()


def test_recall_signals_last_five_steps():
    inputs, labels = map(np.asarray, recall(16).draw(0, jax.random.key(0), 3))
    np.testing.assert_array_equal(inputs[:5].argmax(-1), labels)
    assert not inputs[5:11].any()
    assert np.all(inputs[11:] == np.eye(9)[8])


def test_adding_marks_a_number_in_each_half():
    task = adding(20)
    inputs, labels = map(np.asarray, task.draw(0, jax.random.key(0), 500))
    numbers, marks = inputs[..., 0], inputs[..., 1]
    np.testing.assert_array_equal(marks[:10].sum(0), 1)
    np.testing.assert_array_equal(marks[10:].sum(0), 1)
    np.testing.assert_array_equal(marks, marks**2)
    np.testing.assert_allclose(labels[0], (numbers * marks).sum(0), rtol=1e-6)
    # Five standard errors of the variance of a sum of two uniform numbers.
    assert labels.var() == pytest.approx(task.baseline, abs=0.045)
    losses, right = task.judge(np.array([[1.0], [1.2]]), np.array([1.05, 1.0]))
    np.testing.assert_allclose(losses, [0.0025, 0.04], rtol=1e-5)
    assert right.tolist() == [True, False]


def test_pixels_are_followed_by_blanks():
    inputs, labels = map(np.asarray, TASKS["digits"](48).draw(0, jax.random.key(0), 5))
    assert inputs.shape == (48, 5, 1)
    assert labels.shape == (1, 5)
    assert not inputs.reshape(16, 3, 5)[:, 1:].any()
    assert np.all(inputs[::3].std(axis=(0, 2)) > 0.1)


@pytest.mark.parametrize("seed", [0, 1])
def test_held_out_images_are_never_drawn(seed):
    task = RIVAL_TASKS["digits"]()
    held = np.asarray(task.draw(seed, None, 512)[0])[..., 0].T
    drawn = np.asarray(task.draw(seed, jax.random.key(0), 4000)[0])[..., 0].T
    # Few of scikit-learn's images occur twice.
    assert not {image.tobytes() for image in held} & {image.tobytes() for image in drawn}
    assert len(held) > 300


@pytest.mark.parametrize("name", list(METHODS))
def test_loss_matches_plain_loop(name):
    method, task = METHODS[name], recall(16)
    params = method.init(task, 4, jax.random.key(1))
    batch = task.draw(1, jax.random.key(2), 3)
    inputs, labels = map(np.asarray, batch)
    w = {key: np.asarray(value, np.float64) for key, value in params.items()}
    key, shape = jax.random.split(jax.random.key(1), 3)[0], (method.gates, 2)
    angles = np.pi * np.asarray(jax.random.uniform(key, shape, minval=-1))
    turns = []
    for own in angles:
        matrix = np.zeros((4, 4))
        for k, angle in enumerate(own):
            c, s = np.cos(angle), np.sin(angle)
            matrix[2 * k : 2 * k + 2, 2 * k : 2 * k + 2] = [[c, s], [-s, c]]
        turns.append(matrix)
    state, losses = np.zeros((3, 4)), []
    for t, x in enumerate(inputs):
        driven = x @ w["input"]
        if name == "GRU":
            r, z, n = np.split(driven, 3, axis=1)
            r = 1 / (1 + np.exp(-r - state @ turns[0]))
            z = 1 / (1 + np.exp(-z - state @ turns[1]))
            state = z * state + (1 - z) * np.tanh(n + r * (state @ turns[2]))
        else:
            state = state @ turns[0] + driven  # modReLU with a bias of zero
        if t >= 11:
            logits = state @ w["output"]
            chosen = logits[np.arange(3), labels[t - 11]]
            losses.append(np.log(np.exp(logits).sum(axis=1)) - chosen)
    found = float(method.loss(task, params, batch)[0])
    assert found == pytest.approx(np.mean(losses), rel=1e-4)


def test_lowest_point_of_parabola():
    grid = np.arange(-10, -2) / 2
    losses = np.exp(0.3 * (grid + 2.8) ** 2)
    assert lowest(grid.tolist(), losses.tolist(), 8) == pytest.approx(-2.8)
    assert lowest([-2.0, -1.0, 0.0], [1.0, 2.0, 3.0], 8) is None
    assert lowest([-2.0, -1.0, 0.0], [2.0, 1.0, None], 8) == pytest.approx(-1)
    # Guessing among eight letters has the loss 2.08: nothing is learnt.
    assert lowest([-2.0, -1.0, 0.0], [2.1, 1.9, 2.1], 8) is None


def test_rule_recovers_known_slope():
    grid = (np.arange(-28, -5) / 2).tolist()
    rows = [
        {"uses": uses, "seed": seed, "log2_rates": grid,
         "losses": np.exp(0.1 * np.subtract(grid, slope * np.log2(uses) - 1) ** 2).tolist()}
        for seed, slope in enumerate((-1.1, -0.9))
        for uses in (16, 64, 256)
    ]  # fmt: skip
    found = rule(rows, 20)
    assert found["slope"]["mean"] == pytest.approx(-1)
    assert found["slope"]["interval"] == pytest.approx([-1 - 1.27062, -1 + 1.27062], rel=1e-5)
    assert found["log2_product"]["mean"] == pytest.approx(-1)
    assert found["log2_rates"]["64"]["mean"] == pytest.approx(-7)
    assert found["outside"] == 0


def test_rivals_are_paired_with_adam():
    def row(method, seed, solved):
        return {"method": method, "seed": seed, "rate": 3e-4, "solved_steps": solved,
                "tried": {"rates": [3e-4, 1e-3] if method == "GRU" else [1e-4, 3e-4, 1e-3]},
                "seconds": 1.0, "held_out": 0.1, "accuracy": 0.5, "losses": [0.2, 0.1]}  # fmt: skip

    steps = {"Adam": (500, 600), "GRU": (None, 900), "Orthogonal": (450, 500)}
    found = rivals([row(name, k, n) for name, own in steps.items() for k, n in enumerate(own)])
    assert found["Orthogonal"]["beyond_adam"]["solved_steps"]["mean"] == -75
    assert found["Adam"]["solved_steps"]["mean"] == 550
    assert found["GRU"]["solved_steps"]["mean"] is None
    assert (found["GRU"]["solved"], found["GRU"]["edge"], found["Adam"]["edge"]) == (1, True, False)
    assert found["Adam"]["milliseconds"]["mean"] == 10


def test_record_has_table_and_plot():
    record = run_study(TINY)
    assert "Orthogonal" in TINY.table(record)
    assert len(TINY.plot(record).axes) == 1
    last = record["rows"][-1]
    assert last["rate"] in last["tried"]["rates"]
    assert last["tried"]["rates"] == [4 * rate for rate in METHODS["Orthogonal"].rates]
    assert last["tried"].keys() == {"rates", *MEASURED}
    assert np.all(np.isfinite(record["rows"][0]["losses"]))


def test_copying_without_solution_takes_all_steps():
    study = dataclasses.replace(TINY, rival_tasks=("copy-100",), solving_steps=50)
    found = study.run({"part": "rivals", "task": "copy-100", "method": "Adam", "seed": 1})
    assert found["solved_steps"] is None
    assert len(found["losses"]) == 1
