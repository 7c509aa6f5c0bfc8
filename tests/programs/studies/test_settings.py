"""Invalid settings of studies raise before any work, in one line."""

import re
from pathlib import Path
from typing import Any

import pytest

from studies import STUDIES
from studies.digits.study import Digits

# Settings, and a part of the message.
# fmt: off
INVALID: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("certified", {"batch": 0}, "batch, attacked and trials"),
    ("certified", {"epochs": 0.0}, "epochs must be positive"),
    ("certified", {"held_out": 1.0}, "held_out between"),
    ("certified", {"methods": ()}, "networks and methods must not be empty"),
    ("certified", {"networks": ()}, "networks and methods must not be empty"),
    ("certified", {"seconds": -1.0}, "seconds and tuning_epochs not negative"),
    ("certified", {"seeds": (1, 1)}, "seeds must be different"),
    ("certified", {"trials": 0}, "trials must be at least 1"),
    ("gpt", {"learning_rate": -1.0}, "sizes, rate and temperature must be positive"),
    ("gpt", {"seeds": ()}, "seeds not empty"),
    ("gpt", {"steps": 0}, "sizes, rate and temperature must be positive"),
    ("gpt", {"width": 10, "heads": 4}, "even multiple of the 4 heads; got 10"),
    ("critics", {"dims": (3,)}, "dims and width must be even"),
    ("critics", {"methods": ("Björck",)}, "methods must include"),
    ("critics", {"seeds": (0,)}, "seeds be two or more different"),
    ("critics", {"steps": 0}, "steps, batch and octaves at least 1"),
    ("critics", {"width": 5}, "dims and width must be even"),
    ("digits", {"data_dir": Path()}, "data_dir is for mnist and cifar10"),
    ("digits", {"learning_rates": (0.1,)}, "as many as optimizers"),
    ("digits", {"seeds": (1, 1)}, "seeds must be different, and not empty"),
    ("digits", {"steps": 0}, "must be positive"),
    ("digits", {"widths": (128, 0)}, "must be positive"),
    ("fine-tuning", {"methods": ("OFT",)}, "must"),
    ("fine-tuning", {"rank": 0}, "must"),
    ("fine-tuning", {"seeds": (0,)}, "must"),
    ("fine-tuning", {"tasks": ("nothing",)}, "must"),
    ("flows", {"coefficient": 1.0}, "coefficient between 0 and 1"),
    ("flows", {"methods": ("Stiefel, Muon",)}, "methods must include"),
    ("flows", {"seeds": (0,)}, "seeds be two or more different"),
    ("flows", {"steps": 70}, "steps must be a multiple of 50"),
    ("transfer", {"early": 200}, "early at most steps"),
    ("transfer", {"masses": (0.0,)}, "masses must be positive"),
    ("transfer", {"methods": ()}, "sweeps, methods and seeds must not be empty"),
    ("transfer", {"seeds": (1, 1)}, "seeds must differ"),
    ("transfer", {"sizes": (32,)}, "two or more, ascending"),
    ("transfer", {"sizes": (64, 32)}, "two or more, ascending"),
    ("transfer", {"steps": 0}, "at least 1"),
    ("transfer", {"sweeps": ("gpt-width",), "sizes": (18, 32)},
     "gpt-width must be a multiple of 4"),
    ("transfer", {"sweeps": ("mlp-depth",), "sizes": (1, 2)}, "mlp-depth must be at least 2"),
    ("newton-schulz", {"bounds": (0.1, 1.0)}, "bounds must be between 0 and 1"),
    ("newton-schulz", {"degree": 4}, "degree must be odd"),
    ("newton-schulz", {"lower": 1.5}, "lower must be"),
    ("newton-schulz", {"seeds": ()}, "seeds not empty"),
    ("newton-schulz", {"steps": 0}, "steps must be a whole number in [1, inf)"),
    ("plasticity", {"methods": ("MuonH",)}, "must include"),
    ("plasticity", {"seeds": (0,)}, "two or more different"),
    ("plasticity", {"tasks": 3, "parts": 2}, "parts divide tasks"),
    ("quantization", {"methods": ("none",)}, "methods must include"),
    ("quantization", {"seeds": (10,)}, "two or more different"),
    ("quantization", {"seeds": (1, 10)}, "tuning_seeds must differ from seeds"),
    ("quantization", {"width": 48}, "width 32, 64 or 128; got"),
    ("retractions", {"manifolds": ("rows",), "retractions": ("none", "QR")},
     "QR is a retraction of none of"),
    ("retractions", {"rates": (0.1, -1.0)}, "rates must be positive"),
    ("retractions", {"retractions": ("polar",)}, "must include a retraction of hypersphere ("),
    ("retractions", {"seeds": ()}, "seeds must not be empty"),
    ("retractions", {"walk_steps": 0}, "steps must be at least 1"),
    ("transformers", {"later_tries": -1}, "at least 0"),
    ("transformers", {"methods": ("AdamH",)}, "methods must include 'Muon'"),
    ("transformers", {"seeds": (0, 100)}, "must all be different, and not empty"),
    ("transformers", {"tries": 0}, "at least 1"),
    ("transformers", {"widths": (33,)}, "multiples of 32"),
    ("weight-erasure", {"runs": ("dualized:0",)}, "runs must be dualized:RATE or"),
    ("weight-erasure", {"runs": ("dualized:1:some",)}, "runs must be dualized:RATE or"),
    ("weight-erasure", {"runs": ("sgd:1",)}, "runs must be dualized:RATE or"),
)
# fmt: on


@pytest.mark.parametrize(("study", "settings", "message"), INVALID, ids=[x[2] for x in INVALID])
def test_invalid_settings_raise(study, settings, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        STUDIES[study](**settings)
    assert "\n" not in str(error.value)


def test_batch_above_data_set_raises():
    with pytest.raises(ValueError, match="batch_size must be at most 1438"):
        Digits(batch_size=5000).load(0)
