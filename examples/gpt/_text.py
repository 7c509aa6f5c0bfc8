"""Characters as whole numbers: the two parts of a text, and windows of them."""

from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from manifoldmuon.lab.datasets import load_pydoc_topics, load_shakespeare


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


def load(folder: Path | None) -> Text:
    """Tiny Shakespeare from a folder, or without one the help topics that ship in Python.

    Raises:
      DatasetError: the folder does not have the file.
    """
    if folder is None:
        return split("Python's help topics", load_pydoc_topics())
    return split("tiny Shakespeare", load_shakespeare(folder))


def split(name: str, text: str) -> Text:
    """The first nine tenths, and the rest."""
    characters = "".join(sorted(set(text)))
    number = {c: i for i, c in enumerate(characters)}
    tokens = np.array([number[c] for c in text], np.int32)
    cut = int(0.9 * len(tokens))
    return Text(name, characters, tokens[:cut], tokens[cut:])


def shuffled_starts(
    seed: int, characters: int, context: int, steps: int, batch: int
) -> Int[np.ndarray, "steps batch"]:
    """Where the windows of each step start: every place once, in random order, then again."""
    rng = np.random.default_rng(seed)
    count = characters - context
    epochs = -(-steps * batch // count)
    order = np.concatenate([rng.permutation(count) for _ in range(epochs)])
    return order[: steps * batch].reshape(steps, batch).astype(np.int32)


def windows(
    tokens: Int[Array, " characters"], starts: Int[Array, "*batch"], context: int
) -> tuple[Int[Array, "*batch context"], Int[Array, "*batch context"]]:
    """The tokens from each start on, and the ones that follow each of them."""
    window = jnp.asarray(tokens)[starts[..., None] + jnp.arange(context + 1)]
    return window[..., :-1], window[..., 1:]
