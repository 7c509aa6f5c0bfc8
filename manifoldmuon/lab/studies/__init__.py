"""The studies: each answers one question, in numbers and a picture."""

from manifoldmuon.lab._study import Study
from manifoldmuon.lab.studies._designer import NewtonSchulzDesigner
from manifoldmuon.lab.studies._retractions import RetractionLaboratory

STUDIES: dict[str, type[Study]] = {
    study.name: study for study in (NewtonSchulzDesigner, RetractionLaboratory)
}
"""Every study by the name of its command."""

__all__ = ["STUDIES", "NewtonSchulzDesigner", "RetractionLaboratory"]
