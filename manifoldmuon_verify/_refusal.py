"""The one way in which the verifier says no."""

import reprlib

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxlong, _SHORT.maxother = 2, 80, 80, 80


class Refused(Exception):
    """A certificate that is not accepted: one line that says what was refused, and where."""

    def __init__(self, where: str, what: str):
        super().__init__(" ".join(f"{where}: {what}".split()))


def short(value: object) -> str:
    """Return a value as a refusal shows it: printable, short, and cheap for values of any size."""
    text = _SHORT.repr(value).encode("ascii", "backslashreplace").decode()
    return text if len(text) <= 80 else f"{text[:60]}...{text[-15:]}"
