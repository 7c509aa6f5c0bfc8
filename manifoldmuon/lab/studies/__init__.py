"""The studies: each answers one question, in numbers and a picture."""

from manifoldmuon.lab._study import Study
from manifoldmuon.lab.studies._ablation import Ablation
from manifoldmuon.lab.studies._designer import NewtonSchulzDesigner
from manifoldmuon.lab.studies._erasure import WeightErasure
from manifoldmuon.lab.studies._retractions import RetractionLaboratory
from manifoldmuon.lab.studies._shootout import SolverShootOut
from manifoldmuon.lab.studies._transfer import LearningRateTransfer

_ALL: tuple[type[Study], ...] = (
    RetractionLaboratory,
    WeightErasure,
    LearningRateTransfer,
    SolverShootOut,
    Ablation,
    NewtonSchulzDesigner,
)

STUDIES: dict[str, type[Study]] = {study.name: study for study in _ALL}
"""Every study by the name of its command."""

__all__ = [
    "STUDIES",
    "Ablation",
    "LearningRateTransfer",
    "NewtonSchulzDesigner",
    "RetractionLaboratory",
    "SolverShootOut",
    "WeightErasure",
]
