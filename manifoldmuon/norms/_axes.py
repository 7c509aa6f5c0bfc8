"""The axes that make one weight."""

from jaxtyping import Array, Float


def trailing(x: Float[Array, "..."], ndim: int) -> tuple[int, ...]:
    """The trailing `ndim` axes of `x`, as negative numbers.

    Raises:
      ValueError: `x` has fewer than `ndim` axes.
    """
    if x.ndim < ndim:
        raise ValueError(
            f"an array of shape {tuple(x.shape)} has {x.ndim} axes, but one weight of this norm "
            f"takes the trailing {ndim}; choose a norm or manifold made for {x.ndim} axes"
        )
    return tuple(range(-ndim, 0))
