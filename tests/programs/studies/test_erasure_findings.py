"""Findings of weight erasure from rows: three published claims, speed-ups and verdicts."""

import math

import numpy as np
import pytest
from scipy import stats

from studies import WeightErasure
from studies.erasure.findings import PUBLISHED, findings
from studies.estimates import estimate

STEPS = 1000


def run_row(method, rate, auc, accuracy=0.5, seed=0):
    """Return the row of a run with a single measurement after the start."""
    ends = {"train_accuracy": accuracy, "test_accuracy": 0.5, "ratio": 0.5, "update_rank": 1.0}
    return {"part": "run", "method": method, "rate": rate, "seed": seed, "step": [0, STEPS]} | {
        "auc": [1.0, auc], "distance": [None, None]
    } | {what: [value, value] for what, value in ends.items()}  # fmt: skip


def ending(half):
    """Return the final AUC of a run with half-life `half`, in steps.

    The AUC falls from 1 on a straight line in log(1 + step).
    """
    return 1 - 0.25 * math.log1p(STEPS) / math.log1p(half)


def rank_row(width, six_steps, seed=0):
    ranks = {"gradient": 1.0, "six_steps": six_steps, "exact": 120.0}
    return {"part": "ranks", "width": width, "seed": seed} | ranks


def published_rows(gradient_auc=0.95, middle=57.7, seed=0):
    """Return rows that agree with the published results."""
    dualized = ((0.25, 0.8), (0.5, 0.55))
    return [
        rank_row(128, middle, seed),
        *(run_row("dualized:six-steps", rate, auc, 1.0, seed) for rate, auc in dualized),
        *(run_row("normalized", r, gradient_auc, a, seed) for r, a in ((0.25, 0.6), (0.5, 0.7))),
    ]


def found_in(rows, **protocol):
    return findings(rows, PUBLISHED | {"seeds": (0, 1, 2)} | protocol)


def test_claims_hold_for_published_results():
    """Each claim fails if the numbers behind it change."""
    claims = found_in(published_rows())["claims"]
    assert [claim["holds"] for claim in claims] == [True] * 3
    erased = found_in(published_rows(gradient_auc=0.55))["claims"]
    assert [claim["holds"] for claim in erased] == [True, False, True]
    assert {name: part["holds"] for name, part in erased[1]["parts"].items()} == {
        "fades_at_a_quarter": True,
        "gone_from_a_half": True,
        "never_gone_without": False,
    }
    assert found_in(published_rows(middle=20.0))["claims"][2]["holds"] is False
    assert [claim["holds"] for claim in found_in([])["claims"]] == [None] * 3


def test_claims_use_means_and_report_worst_seed():
    """Seed 1 alone would fail; the mean of both seeds passes."""
    rows = [*published_rows(0.95), *published_rows(0.58, middle=70.0, seed=1)]
    _, letter, ranks = found_in(rows)["claims"]
    part = letter["parts"]["never_gone_without"]
    assert part["holds"]
    assert part["closest"] == {"rate": 0.25, "mean": pytest.approx((0.95 + 0.58) / 2)}
    assert part["worst_seed"] == {"rate": 0.25, "seed": 1, "value": 0.58, "holds": False}
    part = ranks["parts"]["six_steps_as_published"]
    assert part["holds"]
    assert part["worst_seed"]["value"] == pytest.approx(70 / 57.7)
    assert not part["worst_seed"]["holds"]
    slow = [*published_rows(), run_row("dualized:six-steps", 0.125, 0.8, 0.95)]
    part = found_in(slow)["claims"][0]["parts"]["dualized_learns"]
    assert not part["holds"]
    assert part["closest"] == {"rate": 0.125, "mean": 0.95}
    # A diverged run has no AUC: some parts of the claim fail, others hold.
    lost = [row | {"auc": [1.0, None]} if "auc" in row else row for row in published_rows()]
    parts = found_in(lost)["claims"][1]["parts"]
    assert [part["holds"] for part in parts.values()] == [False, True, None]


def test_published_sizes_are_detected():
    def sizes(**protocol):
        found = found_in(published_rows(), **protocol)
        claims = [claim["published_size"] for claim in found["claims"]]
        assert claims[0] == claims[1] == found["protocol"]["published_size"]
        return claims[1:]

    assert sizes() == [True, True]
    assert sizes(steps=301) == [False, True]  # a first update has no later steps
    assert sizes(widths=(64, 64)) == [False, True]
    assert sizes(batch=256) == [False, False]
    assert sizes(data="digits") == [False, False]
    study = WeightErasure(data="cifar10", width=1024, steps=1001, batch=1024)
    assert study.summarise([])["protocol"]["published_size"]
    assert not WeightErasure(data="cifar10").summarise([])["protocol"]["published_size"]


def test_speedup_of_two_matches_scipy_interval():
    """Half-lives with noise; a rate does not count if a seed has no half-life."""
    rng = np.random.default_rng(3)
    own = rng.uniform(20, 60, (2, 4))
    twin = own * 2 * np.exp(rng.normal(0, 0.05, own.shape))
    rows = [
        run_row(method, rate, ending(halves[i, seed]), seed=seed)
        for method, halves in (("stiefel:flat", twin), ("stiefel:polar", own))
        for i, rate in enumerate((0.25, 0.5))
        for seed in range(4)
    ]
    for seed in range(4):
        rows += [run_row("stiefel:flat", 1.0, 0.5 if seed else 0.9, seed=seed)]
        rows += [run_row("stiefel:polar", 1.0, 0.5, seed=seed)]
    found = found_in(rows)
    answer = found["answer"]["stiefel:polar"]
    logs = np.log(twin / own)
    for estimated, ratios in (
        (answer["speedup"], logs.mean(axis=0)),
        (found["constraints"][0]["speedup"], logs[0]),
    ):
        expected = np.exp(stats.ttest_1samp(ratios, 0).confidence_interval(0.95))
        assert estimated["mean"] == pytest.approx(np.exp(ratios.mean()))
        assert estimated["interval"] == pytest.approx(tuple(expected), rel=1e-6)
    assert 1.8 < answer["speedup"]["mean"] < 2.2
    assert answer["rates"] == [0.25, 0.5]
    assert (answer["speeds_up"], answer["slows_down"]) == (True, False)
    assert found["constraints"][2]["speedup"] == {"mean": None, "interval": None}
    ends = np.array([[r["auc"][-1] for r in rows if r["method"] == m] for m in (
        "stiefel:polar", "stiefel:flat")]).reshape(2, 3, 4)  # fmt: skip
    difference = stats.ttest_rel(*ends.mean(axis=1)).confidence_interval(0.95)
    assert answer["auc_difference"]["interval"] == pytest.approx(tuple(difference), rel=1e-6)


def test_identical_curves_have_no_speedup():
    """The comparison is paired, so differences between seeds do not matter."""
    rows = [
        run_row(method, 0.25, auc, seed=seed)
        for method in ("rows:flat", "rows:normalize")
        for seed, auc in enumerate((0.5, 0.6, 0.7))
    ]
    answer = found_in(rows)["answer"]["rows:normalize"]
    assert answer["speedup"] == {"mean": 1.0, "interval": (1.0, 1.0)}
    assert answer["auc_difference"] == {"mean": 0.0, "interval": (0.0, 0.0)}
    assert (answer["speeds_up"], answer["slows_down"]) == (False, False)


@pytest.mark.parametrize(
    ("ratios", "verdicts"),
    [((0.7, 2.0, 3.0), (False, False)), ((0.5, 0.6, 0.5), (False, True)),
     ((2.0, 1.8, 1.9), (True, False))],
)  # fmt: skip
def test_verdict_needs_whole_interval(ratios, verdicts):
    rows = [run_row("stiefel:flat", 0.5, ending(30), seed=seed) for seed in range(3)]
    rows += [
        run_row("stiefel:QR", 0.5, ending(30 / ratio), seed=seed)
        for seed, ratio in enumerate(ratios)
    ]
    found = found_in(rows)["answer"]["stiefel:QR"]
    assert (found["speeds_up"], found["slows_down"]) == verdicts


def test_single_seed_gives_no_interval():
    rows = [run_row("stiefel:flat", 0.25, 0.5), run_row("stiefel:polar", 0.25, 0.3)]
    found = found_in(rows)["answer"]["stiefel:polar"]
    assert found["speedup"]["mean"] > 1
    assert found["speedup"]["interval"] is found["auc_difference"]["interval"] is None
    assert found["speeds_up"] is found["slows_down"] is None


def test_prevention_compares_means_with_twin():
    """A method prevents erasure if only the twin's letter is gone, in the mean over seeds."""
    twins = [run_row("stiefel:flat", 0.5, 0.55, seed=seed) for seed in (0, 1)]
    aucs = {"polar": (0.58, 0.9), "QR": (0.7, 0.85), "none": (0.9, None)}
    rows = twins + [
        run_row(f"stiefel:{name}", 0.5, auc, seed=seed)
        for name, pair in aucs.items()
        for seed, auc in enumerate(pair)
    ]
    answer = found_in(rows)["answer"]
    assert {name: found["prevents"] for name, found in answer.items()} == {
        "stiefel:polar": False,
        "stiefel:QR": True,
        "stiefel:none": None,
    }
    assert answer["stiefel:polar"]["speedup"]["mean"] is None


def test_estimate_needs_every_seed():
    assert estimate([0.5, None, 0.7]) == estimate([]) == {"mean": None, "interval": None}
    assert estimate([0.5]) == {"mean": 0.5, "interval": None}
    found = estimate([0.5, 0.6, 0.8])
    expected = stats.t.interval(0.95, 2, np.mean([0.5, 0.6, 0.8]), stats.sem([0.5, 0.6, 0.8]))
    assert found["interval"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("methods", "seeds", "panels"),
    [(("dualized:six-steps", "normalized"), (0, 1, 2), 3), (("stiefel:polar",), (0,), 2)],
)
def test_missing_measurements_are_skipped(methods, seeds, panels):
    """The published experiment has no constraints; a constrained method alone has no twin."""
    study = WeightErasure(methods=methods, seeds=seeds)
    rows = [row for seed in seeds for row in published_rows(seed=seed)]
    rows = [row for row in rows if row["part"] == "ranks" or row["method"] in methods]
    if "stiefel:polar" in methods:
        rows.append(run_row("stiefel:polar", 0.5, None))
    record = {"summary": study.summarise(rows), "rows": rows}
    drawn = [axes for axes in study.plot(record).axes if axes.get_visible()]
    assert [bool(axes.lines) for axes in drawn] == [True] * panels
    assert record["summary"]["answer"] == {}
    assert methods[0] in study.table(record)
