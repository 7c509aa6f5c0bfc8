"""The text of the character GPT."""

from pathlib import Path

from studies.datasets import Text, load_pydoc_topics, load_shakespeare, split_text


def load(folder: Path | None) -> Text:
    """Load tiny Shakespeare from a folder, or Python's own help topics if `folder` is None.

    Raises:
      DatasetError: the folder lacks the file.
    """
    if folder is None:
        return split_text("Python's help topics", load_pydoc_topics())
    return split_text("tiny Shakespeare", load_shakespeare(folder))
