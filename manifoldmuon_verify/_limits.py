"""Limits on the sizes in a certificate, checked before anything of such a size is computed.

They are the same on every computer, so that every computer accepts or refuses the same
certificates.
"""

from manifoldmuon_verify._refusal import Refused

# Bytes of a file of arrays, and of JSON, which takes thirty times as much memory once parsed.
MOST_BYTES, MOST_JSON_BYTES = 2**27, 2**22
MOST_ARRAYS, MOST_AXES, MOST_LAYERS, DEEPEST = 10_000, 16, 10_000, 16
# Numbers in a matrix, and in an array of one image in the network.
MOST_NUMBERS = 2**22
# Multiplications, about 15 seconds of one core. A number touched once, or a matrix, costs as much
# as some multiplications more; a singular value decomposition 32 m n min(m, n).
MOST_WORK, TOUCH, MATRIX, DECOMPOSE = 2**38, 200, 2**24, 32


def check_limit(where: str, what: str, count: int, most: int) -> None:
    """Refuse a count above its limit."""
    if count > most:
        raise Refused(where, f"{count} {what}; at most {most} are accepted")
