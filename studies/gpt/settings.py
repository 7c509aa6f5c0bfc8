"""Settings of the character GPT, as one frozen value."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options of `studies.gpt`; the defaults are the published protocol.

    Attributes:
      optimizer: a name in METHODS.
      learning_rate: the peak, which falls linearly to zero; None: the method's own.
      steps: how many updates.
      batch: windows per update.
      context: characters per window.
      width: entries of the residual stream.
      heads: of attention.
      blocks: pairs of an attention block and an MLP block.
      seeds: each draws initial weights and the order of the windows.
    """

    optimizer: str = "published"
    learning_rate: float | None = None
    steps: int = 2001
    batch: int = 12
    context: int = 64
    width: int = 128
    heads: int = 4
    blocks: int = 4
    seeds: tuple[int, ...] = (0, 1, 2)

    def as_record(self) -> dict[str, Any]:
        """The settings in the types of JSON."""
        return dataclasses.asdict(self) | {"seeds": list(self.seeds)}
