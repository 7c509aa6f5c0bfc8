"""Weight erasure: does training forget the initial weights?

The initial weights are multiplied by a mask that is zero on a letter. Updates of high stable rank
write over the whole letter; updates of rank 1 leave it readable (modular duality, arXiv:2410.21265,
and the experiment in the Modula documentation).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import scipy.stats
from jaxtyping import Float, Num

from manifoldmuon._internal.matrices.arrays import Matrices, Numbers, nonzero_or_one
from manifoldmuon._internal.matrices.powers_of_two import scale_to_unit_exponent
from manifoldmuon._internal.text import missing_extra
from manifoldmuon.linalg import spectral_norm


def letter_mask(shape: tuple[int, int]) -> Float[np.ndarray, "m n"]:
    """Return a float32 mask that is 0 on an "a" in the middle of a matrix and 1 elsewhere.

    Drawn by matplotlib (extra `studies`) in DejaVu Sans, which it includes. The letter takes 80 %
    of the matrix's smaller side.

    Examples:
      >>> letter_mask((64, 32)).shape
      (64, 32)
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.font_manager import FontProperties
        from matplotlib.patches import PathPatch
        from matplotlib.textpath import TextPath
        from matplotlib.transforms import Affine2D
    except ImportError as error:
        raise missing_extra("lab.letter_mask", "matplotlib", "studies") from error

    whole = all(isinstance(side, int | np.integer) and side > 0 for side in shape)
    if len(shape) != 2 or not whole:
        raise ValueError(f"shape must have two positive lengths, such as (64, 32); got {shape}")
    rows, columns = map(int, shape)
    outline = TextPath((0, 0), "a", size=100, prop=FontProperties(family="DejaVu Sans"))
    box = outline.get_extents()
    scale = 0.8 * min(rows, columns) / max(box.width, box.height)
    affine = Affine2D().translate(-(box.x0 + box.x1) / 2, -(box.y0 + box.y1) / 2).scale(scale)
    affine = affine.translate(columns / 2, rows / 2)
    dpi = 100
    figure = Figure(figsize=(columns / dpi, rows / dpi), dpi=dpi)
    canvas = FigureCanvasAgg(figure)
    patch = PathPatch(affine.transform_path(outline), color="black", linewidth=0, antialiased=False)
    patch.set_transform(Affine2D())  # in pixels
    figure.add_artist(patch)
    canvas.draw()
    ink = np.asarray(canvas.buffer_rgba())[:, :, 0] < 128
    return np.where(ink[:rows, :columns], 0.0, 1.0).astype(np.float32)


def erasure_auc(weight: Num[np.ndarray, "..."], mask: Float[np.ndarray, "..."]) -> float:
    """Return how well magnitudes reveal the mask: 1 for perfectly, 0.5 for not at all.

    The area under the ROC curve, by Mann and Whitney: the probability that `|W_ij|` is larger at an
    entry outside of the letter (mask not 0) than at an entry inside, ties counted half. It does not
    depend on the weight's scale.

    Args:
      weight: real or complex array of any shape.
      mask: array of the same shape, 0 inside of the letter and not 0 outside.

    Examples:
      >>> mask = letter_mask((32, 32))
      >>> erasure_auc(mask, mask)
      1.0
    """
    weight, mask = np.asarray(weight), np.asarray(mask)
    # Wider first: in int8 the magnitude of -128 is -128.
    weight = np.abs(weight.astype(np.result_type(weight, np.float64)))
    if weight.shape != mask.shape:
        raise ValueError(f"the weight has shape {weight.shape} and the mask {mask.shape}")
    inside, outside = weight[mask == 0], weight[mask != 0]
    if not len(inside) or not len(outside):
        raise ValueError("the mask must be 0 somewhere and not 0 elsewhere; see letter_mask")
    test: Any = scipy.stats.mannwhitneyu(outside, inside, method="asymptotic")
    return float(test.statistic / (len(inside) * len(outside)))


def stable_rank(matrix: Matrices) -> Numbers:
    """Return `||X||_F^2 / ||X||_2^2`: between 1 and the rank but, unlike the rank, continuous.

    Args:
      matrix: matrices at any scale; leading axes are independent.

    Returns:
      Float32 or wider; 0 for a zero matrix.

    Examples:
      >>> print(stable_rank(jnp.eye(3, 5)))
      3.0
    """
    scaled, _ = scale_to_unit_exponent(matrix, 2)
    largest = spectral_norm(scaled)
    total = jnp.sum(scaled**2, axis=(-2, -1))
    return total / nonzero_or_one(largest) ** 2
