"""Settings of the character GPT."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Settings:
    """Options of `studies.gpt`; the defaults are the published protocol.

    Attributes:
      optimizer: name in METHODS.
      learning_rate: peak learning rate, decaying linearly to zero; None for the method's default.
      steps: number of updates.
      batch: windows per update.
      context: characters per window.
      width: width of the residual stream.
      heads: number of attention heads.
      blocks: number of pairs of an attention block and an MLP block.
      seeds: seeds of the initial weights and of the order of the windows.
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
        """Return the settings as JSON types."""
        return dataclasses.asdict(self) | {"seeds": list(self.seeds)}
