"""Invalid settings of studies raise before any work, in one line."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from studies.certified.study import CertifiedNetworks
from studies.critics.study import Critics
from studies.digits.study import Digits
from studies.fine_tuning import FineTuning
from studies.flows import Flows
from studies.gpt.study import CharacterGPT
from studies.newton_schulz import NewtonSchulzDesigner
from studies.plasticity import Plasticity
from studies.quantization import Quantization
from studies.reproduction.weight_erasure import WeightErasure
from studies.retractions.study import RetractionLaboratory
from studies.transfer.study import LearningRateTransfer
from studies.transformers.study import Transformers

# Calls, and a part of their messages.
# fmt: off
INVALID: tuple[tuple[Callable[[], Any], str], ...] = (
    (lambda: CertifiedNetworks(batch=0), "batch, attacked and trials"),
    (lambda: CertifiedNetworks(epochs=0.0), "epochs must be positive"),
    (lambda: CertifiedNetworks(held_out=1.0), "held_out between"),
    (lambda: CertifiedNetworks(methods=()), "networks and methods must not be empty"),
    (lambda: CertifiedNetworks(networks=()), "networks and methods must not be empty"),
    (lambda: CertifiedNetworks(seconds=-1.0), "seconds and tuning_epochs not negative"),
    (lambda: CertifiedNetworks(seeds=(1, 1)), "seeds must be different"),
    (lambda: CertifiedNetworks(trials=0), "trials must be at least 1"),
    (lambda: CharacterGPT(learning_rate=-1.0), "sizes, rate and temperature must be positive"),
    (lambda: CharacterGPT(seeds=()), "seeds not empty"),
    (lambda: CharacterGPT(steps=0), "sizes, rate and temperature must be positive"),
    (lambda: CharacterGPT(width=10, heads=4), "even multiple of the 4 heads; got 10"),
    (lambda: Critics(dims=(3,)), "dims and width must be even"),
    (lambda: Critics(methods=("Björck",)), "methods must include"),
    (lambda: Critics(seeds=(0,)), "seeds be two or more different"),
    (lambda: Critics(steps=0), "steps, batch and octaves at least 1"),
    (lambda: Critics(width=5), "dims and width must be even"),
    (lambda: Digits(batch_size=5000).load(0), "batch_size must be at most 1438"),
    (lambda: Digits(data_dir=Path()), "data_dir is for mnist and cifar10"),
    (lambda: Digits(learning_rates=(0.1,)), "as many as optimizers"),
    (lambda: Digits(seeds=(1, 1)), "seeds must be different, and not empty"),
    (lambda: Digits(steps=0), "must be positive"),
    (lambda: Digits(widths=(128, 0)), "must be positive"),
    (lambda: FineTuning(methods=("OFT",)), "must"),
    (lambda: FineTuning(rank=0), "must"),
    (lambda: FineTuning(seeds=(0,)), "must"),
    (lambda: FineTuning(tasks=("nothing",)), "must"),
    (lambda: Flows(coefficient=1.0), "coefficient between 0 and 1"),
    (lambda: Flows(methods=("Stiefel, Muon",)), "methods must include"),
    (lambda: Flows(seeds=(0,)), "seeds be two or more different"),
    (lambda: Flows(steps=70), "steps must be a multiple of 50"),
    (lambda: LearningRateTransfer(early=200), "early at most steps"),
    (lambda: LearningRateTransfer(masses=(0.0,)), "masses must be positive"),
    (lambda: LearningRateTransfer(methods=()), "sweeps, methods and seeds must not be empty"),
    (lambda: LearningRateTransfer(seeds=(1, 1)), "seeds must differ"),
    (lambda: LearningRateTransfer(sizes=(32,)), "two or more, ascending"),
    (lambda: LearningRateTransfer(sizes=(64, 32)), "two or more, ascending"),
    (lambda: LearningRateTransfer(steps=0), "at least 1"),
    (lambda: LearningRateTransfer(sweeps=("gpt-width",), sizes=(18, 32)),
     "gpt-width must be a multiple of 4"),
    (lambda: LearningRateTransfer(sweeps=("mlp-depth",), sizes=(1, 2)),
     "mlp-depth must be at least 2"),
    (lambda: NewtonSchulzDesigner(bounds=(0.1, 1.0)), "bounds must be between 0 and 1"),
    (lambda: NewtonSchulzDesigner(degree=4), "degree must be odd"),
    (lambda: NewtonSchulzDesigner(lower=1.5), "lower must be"),
    (lambda: NewtonSchulzDesigner(seeds=()), "seeds not empty"),
    (lambda: NewtonSchulzDesigner(steps=0), "steps must be a whole number in [1, inf)"),
    (lambda: Plasticity(methods=("MuonH",)), "must include"),
    (lambda: Plasticity(seeds=(0,)), "two or more different"),
    (lambda: Plasticity(tasks=3, parts=2), "parts divide tasks"),
    (lambda: Quantization(methods=("none",)), "methods must include"),
    (lambda: Quantization(seeds=(10,)), "two or more different"),
    (lambda: Quantization(seeds=(1, 10)), "tuning_seeds must differ from seeds"),
    (lambda: Quantization(width=48), "width 32, 64 or 128; got"),
    (lambda: RetractionLaboratory(manifolds=("rows",), retractions=("none", "QR")),
     "QR is a retraction of none of"),
    (lambda: RetractionLaboratory(rates=(0.1, -1.0)), "rates must be positive"),
    (lambda: RetractionLaboratory(retractions=("polar",)),
     "must include a retraction of hypersphere ("),
    (lambda: RetractionLaboratory(seeds=()), "seeds must not be empty"),
    (lambda: RetractionLaboratory(walk_steps=0), "steps must be at least 1"),
    (lambda: Transformers(later_tries=-1), "at least 0"),
    (lambda: Transformers(methods=("AdamH",)), "methods must include 'Muon'"),
    (lambda: Transformers(seeds=(0, 100)), "must all be different, and not empty"),
    (lambda: Transformers(tries=0), "at least 1"),
    (lambda: Transformers(widths=(33,)), "multiples of 32"),
    (lambda: WeightErasure(runs=("dualized:0",)), "runs must be dualized:RATE or"),
    (lambda: WeightErasure(runs=("dualized:1:some",)), "runs must be dualized:RATE or"),
    (lambda: WeightErasure(runs=("sgd:1",)), "runs must be dualized:RATE or"),
)
# fmt: on


@pytest.mark.parametrize(("call", "message"), INVALID, ids=[message for _, message in INVALID])
def test_invalid_settings_raise(call, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        call()
    assert "\n" not in str(error.value)
