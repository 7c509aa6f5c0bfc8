"""The text of the character GPT."""

from pathlib import Path

from studies.datasets import Text, load_pydoc_topics, load_shakespeare, split_text


def load(folder: Path | None) -> Text:
    """Tiny Shakespeare from a folder, or without one the help topics that ship in Python.

    Raises:
      DatasetError: the folder does not have the file.
    """
    if folder is None:
        return split_text("Python's help topics", load_pydoc_topics())
    return split_text("tiny Shakespeare", load_shakespeare(folder))
