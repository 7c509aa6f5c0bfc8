"""Limits on the work for a certificate, estimated from sizes before the work starts.

Estimates are for a single core of a modest computer. They depend only on the files, so that every
computer accepts or refuses the same certificates.
"""

from __future__ import annotations

import math

from manifoldmuon_verify._refusal import Refused

SECONDS, GIBIBYTES = 10.0, 1.0
MOST_LAYERS, DEEPEST, MOST_AXES, MOST_ARRAYS = 10_000, 32, 16, 10_000

# Seconds to parse a byte of JSON; to hash and check a byte of arrays; to multiply and add; to call
# a layer.
JSON_BYTE, DATA_BYTE, PRODUCT, CALL = 2e-7, 6e-9, 6e-11, 2e-4
# Numbers that fit in a cache; seconds to touch a number, in arrays that fit and in larger arrays.
IN_CACHE, TOUCH, TOUCH_LARGE = 2**18, 2e-9, 1e-8
# Seconds to enclose the singular values of a matrix `(m, n)` with `m >= n`: factor of `m n^2`, and
# overhead.
DECOMPOSE, DECOMPOSE_CALL = 1.5e-9, 1e-3
# Bytes of Python objects per byte of JSON; bytes of the interpreter and NumPy.
JSON_OBJECTS, BASE = 30, 2**28


def touch(numbers: int) -> float:
    """Return the time to touch each number of an array once."""
    return numbers * (TOUCH if numbers <= IN_CACHE else TOUCH_LARGE)


class Budget:
    """Remaining budget of time and memory.

    Attributes:
      seconds: total time allowed.
      gibibytes: peak memory allowed.
    """

    def __init__(self, seconds: float = SECONDS, gibibytes: float = GIBIBYTES):
        if not (seconds > 0 and gibibytes > 0):
            raise ValueError(f"limits must be positive; got {seconds!r} s and {gibibytes!r} GiB")
        self.seconds, self.gibibytes = seconds, gibibytes
        self._seconds, self._bytes = 0.0, float(BASE)

    def spend(self, where: str, seconds: float, memory: float) -> None:
        """Add work to the total, and refuse it if the total exceeds a limit.

        Args:
          where: cause of the work, for refusals.
          seconds: estimated time.
          memory: bytes allocated and kept.
        """
        self._seconds += seconds
        self._bytes += memory
        for option, unit, found, allowed in (
            ("seconds", "s", self._seconds, self.seconds),
            ("gibibytes", "GiB", self._bytes / 2**30, self.gibibytes),
        ):
            if not found <= allowed:
                raise Refused(
                    where,
                    f"would take about {found:.3g} {unit}, and {allowed:g} {unit} are allowed; "
                    f"--{option} {_above(found)} allows it",
                )

    def most_bytes(self, json: bool) -> int:
        """Return the size limit in bytes, for JSON or array files."""
        return int(self.gibibytes * 2**30) // (128 if json else 8)


def _above(value: float) -> str:
    """Format with two digits, rounded up."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return f"{math.ceil(1.01 * value / unit) * unit:g}"
