"""The data of one seed: the laboratory's images, chosen by the settings of the main job."""

from examples._settings import Settings
from manifoldmuon.lab import datasets
from manifoldmuon.lab._images import Data, batches, standardise

__all__ = ["Data", "batches", "load", "standardise"]


def load(settings: Settings, seed: int) -> Data:
    """The data set; of the digits, the split of this seed.

    Raises:
      DatasetError: if it is not to be had; one line that says what to do.
    """
    if settings.data == "mnist":
        return standardise(datasets.load_mnist(settings.data_dir))
    if settings.data == "cifar10":
        return standardise(datasets.load_cifar10(settings.data_dir))
    return standardise(datasets.load_digits(seed))
