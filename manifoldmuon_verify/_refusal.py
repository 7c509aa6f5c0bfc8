"""The one way in which the verifier says no."""


class Refused(Exception):
    """A certificate that is not accepted: one line that says what was refused, and where."""

    def __init__(self, where: str, what: str):
        super().__init__(" ".join(f"{where}: {what}".split()))


def short(value: object) -> str:
    """A value as it is shown in a refusal: on one line, printable, and not long."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:60]}...{text[-15:]}"
