"""A mean over seeds with its standard error."""

import dataclasses
from collections.abc import Iterable

from manifoldmuon.lab import mean_and_standard_error


@dataclasses.dataclass(frozen=True)
class Mean:
    """A mean over seeds and its standard error, which is None for a single seed."""

    mean: float
    error: float | None

    @classmethod
    def of(cls, values: Iterable[float]) -> "Mean":
        return cls(*mean_and_standard_error(list(values)))

    def text(self, form: str) -> str:
        """Both numbers in this format, or the mean alone; a sign is for the mean."""
        error = "" if self.error is None else f" ± {self.error:{form.lstrip('+')}}"
        return f"{self.mean:{form}}{error}"
