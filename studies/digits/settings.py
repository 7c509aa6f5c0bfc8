"""Settings of the main job, as one frozen value."""

import dataclasses
from pathlib import Path
from typing import Any

from studies import datasets
from studies.digits.methods import METHODS


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options of `studies.digits`; the defaults are the job of `make train`.

    Attributes:
      data: the data set: "digits", "mnist" or "cifar10".
      data_dir: folder of its files; None for those that ship or are downloaded.
      widths: of the hidden layers; the data set gives the first and the last width.
      steps: how many updates.
      batch_size: images per update.
      optimizers: names of METHODS.
      learning_rates: the peak rate of each optimizer, by its name; they fall linearly to zero.
      seeds: each draws its own split, initial weights and order of the data, the same for all
        optimizers.
      preset: the solver of manifold Muon, "accurate" or "fast".
      multiplier: the fixed number by which the network's last layer is multiplied.
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
        """The peak rate of an optimizer: the tuned one unless another was asked for."""
        return dict(self.learning_rates).get(optimizer, METHODS[optimizer].learning_rate)

    def load(self, seed: int) -> datasets.FlatImages:
        """The data set; of the digits, the split of this seed.

        Raises:
          DatasetError: if it is not to be had; one line that says what to do.
        """
        if self.data == "mnist":
            return datasets.standardise(datasets.load_mnist(self.data_dir))
        if self.data == "cifar10":
            return datasets.standardise(datasets.load_cifar10(self.data_dir))
        return datasets.standardise(datasets.load_digits(seed))

    def as_record(self) -> dict[str, Any]:
        """The settings in the types of JSON, without the folder, which is no one else's."""
        plain = dataclasses.asdict(self)
        del plain["data_dir"]
        rates = {name: self.learning_rate(name) for name in self.optimizers}
        return plain | {"learning_rates": rates}
