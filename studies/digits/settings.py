"""Settings of the main job."""

import dataclasses
from pathlib import Path
from typing import Any

from studies import datasets
from studies.digits.methods import METHODS


@dataclasses.dataclass(frozen=True)
class Settings:
    """Options of `studies.digits`; the defaults are the job of `make train`.

    Attributes:
      data: data set: "digits", "mnist" or "cifar10".
      data_dir: folder of its files; None for files that ship with scikit-learn or are downloaded.
      widths: widths of the hidden layers; the data set determines the first and last width.
      steps: number of updates.
      batch_size: images per update.
      optimizers: names in METHODS.
      learning_rates: peak learning rates by optimizer; they decay linearly to zero.
      seeds: seeds of the split, the initial weights and the order of the data, shared by all
        optimizers.
      preset: solver of manifold Muon, "accurate" or "fast".
      multiplier: fixed factor of the network's last layer.
    """

    data: str = "digits"
    data_dir: Path | None = None
    widths: tuple[int, ...] = (128, 64)
    steps: int = 500
    batch_size: int = 128
    optimizers: tuple[str, ...] = tuple(METHODS)
    learning_rates: tuple[tuple[str, float], ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)
    preset: str = "accurate"
    multiplier: float = 4.0

    def learning_rate(self, optimizer: str) -> float:
        """Return the peak rate of an optimizer: the given rate, or else the tuned rate."""
        return dict(self.learning_rates).get(optimizer, METHODS[optimizer].learning_rate)

    def load(self, seed: int) -> datasets.FlatImages:
        """Load the data set; for the digits, with the split of this seed.

        Raises:
          DatasetError: the data set is unavailable; the message is a single line with a remedy.
        """
        if self.data == "mnist":
            return datasets.standardise(datasets.load_mnist(self.data_dir))
        if self.data == "cifar10":
            return datasets.standardise(datasets.load_cifar10(self.data_dir))
        return datasets.standardise(datasets.load_digits(seed))

    def as_record(self) -> dict[str, Any]:
        """Return the settings as JSON types, without the data folder, which is local."""
        plain = dataclasses.asdict(self)
        del plain["data_dir"]
        rates = {name: self.learning_rate(name) for name in self.optimizers}
        return plain | {"learning_rates": rates}
