"""Data sets in their official formats, as plain NumPy arrays and strings.

A loader looks in the folder that it is given, or else in `data_home()`, where it also puts what
it downloads. Downloads need the `examples` extra, as does `load_digits`.
"""

from manifoldmuon.lab.datasets._cifar import load_cifar10
from manifoldmuon.lab.datasets._dataset import Dataset, DatasetError
from manifoldmuon.lab.datasets._digits import load_digits
from manifoldmuon.lab.datasets._files import data_home
from manifoldmuon.lab.datasets._mnist import load_mnist
from manifoldmuon.lab.datasets._text import load_pydoc_topics, load_shakespeare

__all__ = [
    "Dataset",
    "DatasetError",
    "data_home",
    "load_cifar10",
    "load_digits",
    "load_mnist",
    "load_pydoc_topics",
    "load_shakespeare",
]
