"""A few of the random cases of `python -m benchmarks reliability`, always the same."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks import reliability

few = settings(
    max_examples=40,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@few
@given(
    reliability.cases(
        ("Stiefel", "Stiefel, FAST", "EmbeddingRows"), ((3, 7, 4),), ("float32", "bfloat16")
    )
)
def test_directions(case):
    reliability.check(case)


@pytest.mark.parametrize("name", reliability.LINKS)
def test_trainings(name):
    @few
    @given(reliability.runs, st.integers(0, 2**31))
    def train(scales, draws):
        reliability.check_training(name, scales, draws)

    train()


def test_a_broken_bound_is_found(monkeypatch):
    """A certificate that promises too much: the optimum for whatever was found."""
    promised = reliability.ask

    def too_good(*arguments):
        direction, gap, *rest = promised(*arguments)
        return direction / 2, 0 * gap, *rest

    monkeypatch.setattr(reliability, "ask", too_good)
    case = reliability.Case("Stiefel", (3, 7, 4), "float32", 0, -2, 1.0, "normal", 0)
    with pytest.raises(AssertionError, match="gap under the true one: 0.5"):
        reliability.check(case)
