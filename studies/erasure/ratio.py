"""The remains of a letter in the weights, beside `manifoldmuon.lab.erasure_auc`."""

import numpy as np
from jaxtyping import Float


def erasure_ratio(weight: Float[np.ndarray, "..."], mask: Float[np.ndarray, "..."]) -> float:
    """The root mean square of the weight inside of the letter over that outside.

    0 right after masking, about 1 when the letter is gone; NaN for a weight that is 0 outside.
    """
    squares = np.square(weight, dtype=np.float64)
    outside = float(np.mean(squares[mask != 0]))
    return float(np.sqrt(np.mean(squares[mask == 0]) / outside)) if outside else float("nan")
