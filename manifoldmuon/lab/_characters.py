"""Characters as whole numbers: the two parts of a text, and windows of them."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int


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


def split(name: str, text: str) -> Text:
    """The first nine tenths, and the rest."""
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
    """The tokens from each start on, and the ones that follow each of them."""
    window = jnp.asarray(tokens)[starts[..., None] + jnp.arange(context + 1)]
    return window[..., :-1], window[..., 1:]
