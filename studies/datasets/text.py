"""Texts for character-level language models, and their characters as whole numbers."""

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


class Text(NamedTuple):
    """A text, split: the first nine tenths to train on, the rest to validate.

    Attributes:
      name: what the text is.
      characters: every character that occurs, in order; a token is a position in it.
      train: tokens.
      validation: tokens.
    """

    name: str
    characters: str
    train: Int[np.ndarray, " characters"]
    validation: Int[np.ndarray, " characters"]

    def decode(self, tokens: Int[np.ndarray, " length"]) -> str:
        """The characters of the tokens."""
        return "".join(self.characters[int(token)] for token in tokens)


def split_text(name: str, text: str) -> Text:
    """A text as numbers, in its two parts.

    Args:
      name: what the text is.
      text: its characters.
    """
    characters = "".join(sorted(set(text)))
    number = {c: i for i, c in enumerate(characters)}
    tokens = np.array([number[c] for c in text], np.int32)
    cut = int(0.9 * len(tokens))
    return Text(name, characters, tokens[:cut], tokens[cut:])


def windows(
    tokens: Int[Array | np.ndarray, " characters"],
    starts: Int[Array | np.ndarray, "*batch"],
    context: int,
) -> tuple[Int[Array, "*batch context"], Int[Array, "*batch context"]]:
    """The tokens from each start on, and the ones that follow each of them.

    Args:
      tokens: of a text.
      starts: where the windows begin.
      context: how long they are.
    """
    window = jnp.asarray(tokens)[starts[..., None] + jnp.arange(context + 1)]
    return window[..., :-1], window[..., 1:]
