"""Studies: each answers a question about constrained training, in numbers and a picture.

`python -m studies` lists them, `python -m studies NAME --help` explains a study; scripts call
`run_study`. Some measurements are functions of `manifoldmuon.lab`. A study is a file, or a folder
with a `study.py`; `studies.study` explains how to add a study.
"""

from studies.agd import AutomaticDescent
from studies.certified.study import CertifiedNetworks
from studies.critics import Critics
from studies.digits.study import Digits
from studies.fine_tuning import FineTuning
from studies.flows import Flows
from studies.gpt.study import CharacterGPT
from studies.momentum_bits import MomentumBits
from studies.newton_schulz import NewtonSchulzDesigner
from studies.plasticity import Plasticity
from studies.recurrent.study import Recurrent
from studies.reproduction.hello_mnist import HelloMNIST
from studies.reproduction.hello_world import HelloWorld
from studies.reproduction.manifold_cifar import ManifoldCIFAR
from studies.reproduction.weight_erasure import WeightErasure
from studies.retractions.study import RetractionLaboratory
from studies.run import run_study
from studies.solvers import SolverShootOut
from studies.study import Study, option
from studies.torch_layers import TorchLayers
from studies.transfer.study import LearningRateTransfer
from studies.transformers.study import Transformers

_ALL: tuple[type[Study], ...] = (
    Digits,
    RetractionLaboratory,
    SolverShootOut,
    NewtonSchulzDesigner,
    LearningRateTransfer,
    Transformers,
    MomentumBits,
    Plasticity,
    CertifiedNetworks,
    FineTuning,
    Recurrent,
    Critics,
    Flows,
    TorchLayers,
    HelloWorld,
    HelloMNIST,
    CharacterGPT,
    ManifoldCIFAR,
    AutomaticDescent,
    WeightErasure,
)

STUDIES: dict[str, type[Study]] = {study.name: study for study in _ALL}
"""All studies by command name."""

__all__ = ["STUDIES", "Study", "option", "run_study"]
