"""Texts for character-level language models."""

import os
from pathlib import Path

from manifoldmuon.lab.datasets._dataset import DatasetError
from manifoldmuon.lab.datasets._files import data_home, fetch, find

_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
_DIGEST = "sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
_NAME = "tinyshakespeare.txt"


def load_shakespeare(directory: str | os.PathLike[str] | None = None, download: bool = True) -> str:
    """Tiny Shakespeare: 1,115,394 characters from the plays, 65 of them distinct.

    Args:
      directory: a folder with `tinyshakespeare.txt` or `input.txt`, which may hold any text. By
        default `data_home()`, where the contents must be the usual ones.
      download: whether a file that is missing from `data_home()` may be downloaded (1 MiB).

    Raises:
      DatasetError: if the file is missing, empty, damaged or cannot be downloaded.
    """
    if directory is None:
        path = fetch("Shakespeare", data_home() / _NAME, _URL, _DIGEST, download)
    else:
        path = find("Shakespeare", Path(directory), (_NAME, "input.txt"))
    try:
        # As bytes, because reading as text would turn \r\n into \n.
        contents = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path} is not a text in UTF-8: {error}") from None
    if not contents:
        raise DatasetError(f"{path} is empty")
    return contents


def load_pydoc_topics() -> str:
    """The help topics that ship inside Python (`help("topics")`): half a million characters.

    The text differs a little from one version of Python to the next.
    """
    # Here and not above: it is one large literal, which only this function needs.
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))
