"""Studies: each answers a question about constrained training, in numbers and a picture.

`python -m studies` lists them, `python -m studies NAME --help` explains a study; scripts call
`run_study`. Some measurements are functions of `manifoldmuon.lab`. A study is a file, or a folder
with a `study.py`; `studies.study` explains how to add a study.
"""

import ast
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from studies.run import run_study
from studies.study import Study, option

_CLASSES = {
    "digits": "digits.study:Digits",
    "retractions": "retractions.study:RetractionLaboratory",
    "newton-schulz": "newton_schulz:NewtonSchulzDesigner",
    "transfer": "transfer.study:LearningRateTransfer",
    "transformers": "transformers.study:Transformers",
    "plasticity": "plasticity:Plasticity",
    "certified": "certified.study:CertifiedNetworks",
    "fine-tuning": "fine_tuning:FineTuning",
    "critics": "critics.study:Critics",
    "flows": "flows:Flows",
    "hello-world": "reproduction.hello_world:HelloWorld",
    "hello-mnist": "reproduction.hello_mnist:HelloMNIST",
    "quantization": "quantization:Quantization",
    "gpt": "gpt.study:CharacterGPT",
    "manifold-cifar": "reproduction.manifold_cifar:ManifoldCIFAR",
    "agd": "agd:AutomaticDescent",
    "weight-erasure": "reproduction.weight_erasure:WeightErasure",
}


class _Studies(Mapping[str, type[Study]]):
    """The studies by command name; a study is imported when it is looked up."""

    def __getitem__(self, name: str) -> type[Study]:
        module, _, cls = _CLASSES[name].partition(":")
        return getattr(importlib.import_module(f"studies.{module}"), cls)

    def __iter__(self) -> Iterator[str]:
        return iter(_CLASSES)

    def __len__(self) -> int:
        return len(_CLASSES)

    def question(self, name: str) -> str:
        """Return the first line of a study's docstring, read from its source without an import."""
        module, _, cls = _CLASSES[name].partition(":")
        path = Path(__file__).parent.joinpath(*module.split(".")).with_suffix(".py")
        found = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        (node,) = (x for x in found if isinstance(x, ast.ClassDef) and x.name == cls)
        return (ast.get_docstring(node) or "").partition("\n")[0]


STUDIES = _Studies()
"""All studies by command name."""

__all__ = ["STUDIES", "Study", "option", "run_study"]
