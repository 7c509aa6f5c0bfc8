"""Texts for character-level language models, tokenised by character."""

import functools
import os
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from studies.datasets.files import DatasetError, data_home, fetch, find

_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
_DIGEST = "sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
_NAME = "tinyshakespeare.txt"


def load_shakespeare(directory: str | os.PathLike[str] | None = None, download: bool = True) -> str:
    """Load tiny Shakespeare: 1,115,394 characters from the plays, 65 of them distinct.

    Args:
      directory: folder with `tinyshakespeare.txt` or `input.txt`, which may hold any text. The
        default is `data_home()`, where the contents must be the official text.
      download: whether to download a file missing from `data_home()` (1 MiB).

    Raises:
      DatasetError: the file is missing, empty, damaged or cannot be downloaded.
    """
    if directory is None:
        path = fetch("Shakespeare", data_home() / _NAME, _URL, _DIGEST, download)
    else:
        path = find("Shakespeare", Path(directory), (_NAME, "input.txt"))
    try:
        # Read bytes: text mode would turn \r\n into \n.
        contents = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path} is not a text in UTF-8: {error}") from None
    if not contents:
        raise DatasetError(f"{path} is empty")
    return contents


def load_pydoc_topics() -> str:
    """Load the help topics that ship with Python (`help("topics")`): half a million characters.

    The text differs a little between Python versions.
    """
    # Imported here: the module is a large literal that only this function needs.
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


TEXTS = ("pydoc", "shakespeare")
"""Names of the texts that `load_text` knows."""


class Text(NamedTuple):
    """Tokenised text, split: the first nine tenths for training, the rest for validation.

    Attributes:
      name: name of the text.
      characters: all distinct characters, sorted; a token is an index into this string.
      train: training tokens.
      validation: validation tokens.
    """

    name: str
    characters: str
    train: Int[np.ndarray, " characters"]
    validation: Int[np.ndarray, " characters"]

    def decode(self, tokens: Int[np.ndarray, " length"]) -> str:
        """Return the characters of the tokens."""
        return "".join(self.characters[int(token)] for token in tokens)


def split_text(name: str, text: str) -> Text:
    """Tokenise a text and split it.

    Args:
      name: name of the text.
      text: the text.
    """
    characters = "".join(sorted(set(text)))
    number = {c: i for i, c in enumerate(characters)}
    tokens = np.array([number[c] for c in text], np.int32)
    cut = int(0.9 * len(tokens))
    return Text(name, characters, tokens[:cut], tokens[cut:])


@functools.lru_cache(maxsize=2)
def load_text(name: str, folder: Path | None) -> Text:
    """Load a text of `TEXTS` from a folder, tokenised and split.

    Raises:
      DatasetError: the file is missing.
    """
    return split_text(name, load_pydoc_topics() if name == "pydoc" else load_shakespeare(folder))


def windows(
    tokens: Int[Array | np.ndarray, " characters"],
    starts: Int[Array | np.ndarray, "*batch"],
    context: int,
) -> tuple[Int[Array, "*batch context"], Int[Array, "*batch context"]]:
    """Return windows of tokens from each start, and the same windows shifted by one token.

    Args:
      tokens: tokens of a text.
      starts: start indices of the windows.
      context: length of the windows.
    """
    window = jnp.asarray(tokens)[starts[..., None] + jnp.arange(context + 1)]
    return window[..., :-1], window[..., 1:]
