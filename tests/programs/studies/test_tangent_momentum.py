"""The study of tangent momentum: its variants and their limits."""

import jax
import jax.numpy as jnp
import pytest

from manifoldmuon.manifolds import Stiefel
from studies import TangentMomentum, run_study
from studies.tangent_momentum import CARRIED, PROJECTED, WHOLE, carried_momentum


def test_carried_momentum_is_tangent():
    manifold = Stiefel()
    link = carried_momentum(manifold, 0.9)
    state = link.init(jnp.zeros((6, 2)))
    for seed in range(3):
        key, other = jax.random.split(jax.random.key(seed))
        point = manifold.random_point(key, (6, 2), jnp.float32)
        update, state = link.update(jax.random.normal(other, (6, 2)), state, point)
        for vector in map(jnp.asarray, (update, state)):
            assert jnp.linalg.norm(vector) > 0.1
            assert jnp.allclose(manifold.project_tangent(point, vector), vector, atol=1e-5)


@pytest.mark.slow
def test_only_projected_gradients_converge(tmp_path):
    study = TangentMomentum(tasks=("independent components",), momenta=(0.0, 0.95), seeds=(0,))
    record = run_study(study, tmp_path / "record.json", jobs=1)
    found = dict(record["summary"]["independent components"])
    assert list(found) == ["none", *(f"0.95, {name}" for name in (WHOLE, PROJECTED, CARRIED))]
    whole = found.pop(f"0.95, {WHOLE}")
    assert whole["above"] > 1e-2
    for values in found.values():
        assert 0 <= values["above"] < 1e-6
        assert values["gradient"] < whole["gradient"] / 100
    assert f"0.95, {PROJECTED}" in study.table(record)
    assert len(study.plot(record).axes) == 1


def test_invalid_settings_raise():
    with pytest.raises(ValueError, match="at least one task"):
        TangentMomentum(seeds=())
    with pytest.raises(ValueError, match="momenta must be in"):
        TangentMomentum(momenta=(1.0,))
