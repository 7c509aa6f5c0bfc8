"""The verifier's only exception, and the formatting of its messages."""

import reprlib

import numpy as np

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxlong, _SHORT.maxother = 2, 80, 80, 80


class Refused(Exception):
    """Raised if a certificate is not accepted; a one-line message says where and why.

    Attributes:
      radii: `(n,)`, as in `Report`: the radii that are proved, if only claims are refused; else
        None.
    """

    def __init__(self, where: str, what: str, radii: np.ndarray | None = None):
        super().__init__(" ".join(f"{where}: {what}".split()))
        self.radii = radii


def short(value: object) -> str:
    """Format a value for a refusal: printable, short, and cheap for values of any size."""
    text = _SHORT.repr(value).encode("ascii", "backslashreplace").decode()
    return text if len(text) <= 80 else f"{text[:60]}...{text[-15:]}"
