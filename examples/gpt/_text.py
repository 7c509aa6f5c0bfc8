"""The text of the character GPT."""

from pathlib import Path

from manifoldmuon.lab._characters import Text, split
from manifoldmuon.lab.datasets import load_pydoc_topics, load_shakespeare


def load(folder: Path | None) -> Text:
    """Tiny Shakespeare from a folder, or without one the help topics that ship in Python.

    Raises:
      DatasetError: the folder does not have the file.
    """
    if folder is None:
        return split("Python's help topics", load_pydoc_topics())
    return split("tiny Shakespeare", load_shakespeare(folder))
