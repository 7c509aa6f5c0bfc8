"""Data sets in their official formats, as plain NumPy arrays and strings.

Loaders look in the folder given, or else in `data_home()`, where they also store downloads.
Downloads and `load_digits` need the `studies` extra. Also provides standardised images, batches,
and windows of a text.
"""

from studies.datasets.cifar import load_cifar10
from studies.datasets.digits import load_digits, load_mnist
from studies.datasets.files import DatasetError, data_home
from studies.datasets.images import Dataset, FlatImages, batches, standardise
from studies.datasets.text import (
    TEXTS,
    Text,
    load_pydoc_topics,
    load_shakespeare,
    load_text,
    split_text,
    windows,
)

__all__ = [
    "TEXTS",
    "Dataset",
    "DatasetError",
    "FlatImages",
    "Text",
    "batches",
    "data_home",
    "load_cifar10",
    "load_digits",
    "load_mnist",
    "load_pydoc_topics",
    "load_shakespeare",
    "load_text",
    "split_text",
    "standardise",
    "windows",
]
