"""A measure of weight erasure in addition to `manifoldmuon.lab.erasure_auc`."""

import numpy as np
from jaxtyping import Float


def erasure_ratio(weight: Float[np.ndarray, "..."], mask: Float[np.ndarray, "..."]) -> float:
    """Return the RMS of the weights inside the letter divided by the RMS outside.

    0 right after masking, about 1 when the letter is gone; NaN if the weights outside are 0.
    """
    squares = np.square(weight, dtype=np.float64)
    outside = float(np.mean(squares[mask != 0]))
    return float(np.sqrt(np.mean(squares[mask == 0]) / outside)) if outside else float("nan")
