"""Every transformation of `instances.py` under Optax's wrappers and JAX's transformations."""

import pytest

from manifoldmuon.testing import check_transformation
from tests.optim.instances import INSTANCES


@pytest.mark.slow_except("muon")
@pytest.mark.parametrize("name", INSTANCES)
def test_works_with_optax_wrappers(name):
    instance = INSTANCES[name]
    check_transformation(
        instance.make_tx,
        instance.params(),
        instance.hyperparams(),
        static_args="geometry" if callable(instance.geometry) else (),
        scale_free=instance.scale_free,
        still=instance.still,
        needs_params=instance.needs_params,
        wrappers=instance.wrappers,
        descends=instance.descends,
    )
