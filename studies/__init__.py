"""Studies: each answers a question about constrained training, in numbers and a picture.

`python -m studies` lists them, `python -m studies NAME --help` explains a study; scripts call
`run_study`. Some measurements are functions of `manifoldmuon.lab`. A study is a file, or a folder
with a `study.py`; `studies.study` explains how to add a study.
"""

from studies.certified.study import CertifiedNetworks
from studies.fine_tuning import FineTuning
from studies.momentum_bits import MomentumBits
from studies.newton_schulz import NewtonSchulzDesigner
from studies.plasticity import Plasticity
from studies.retractions.study import RetractionLaboratory
from studies.run import run_study
from studies.solvers import SolverShootOut
from studies.study import Study, option
from studies.transfer.study import LearningRateTransfer
from studies.transformers.study import Transformers

_ALL: tuple[type[Study], ...] = (
    RetractionLaboratory,
    LearningRateTransfer,
    SolverShootOut,
    Transformers,
    MomentumBits,
    CertifiedNetworks,
    NewtonSchulzDesigner,
    FineTuning,
    Plasticity,
)

STUDIES: dict[str, type[Study]] = {study.name: study for study in _ALL}
"""All studies by command name."""

__all__ = [
    "STUDIES",
    "CertifiedNetworks",
    "FineTuning",
    "LearningRateTransfer",
    "MomentumBits",
    "NewtonSchulzDesigner",
    "Plasticity",
    "RetractionLaboratory",
    "SolverShootOut",
    "Study",
    "option",
    "run_study",
]
