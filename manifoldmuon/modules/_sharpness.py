"""Sharpness: bounds on second derivatives, and how they combine."""

from typing import NamedTuple


class Sharpness(NamedTuple):
    """Bounds on a module's second derivatives (modular norm, arXiv:2405.14813, section 3.4).

    In the modular norm of the weights and the norms of input and output, for every pair of
    perturbations,

    * `||d2f/dw2 [dw, dw']|| <= alpha ||dw|| ||dw'||`,
    * `||d2f/dwdx [dw, dx]|| <= beta ||dw|| ||dx||`,
    * `||d2f/dx2 [dx, dx']|| <= gamma ||dx|| ||dx'||`.

    Attributes:
      alpha: weights with weights.
      beta: weights with inputs.
      gamma: inputs with inputs.
    """

    alpha: float
    beta: float
    gamma: float


LINEAR = Sharpness(0.0, 0.0, 0.0)


class Share(NamedTuple):
    """What the rules need to know of one part: its share of the mass, and its attributes."""

    share: float
    sensitivity: float
    sharpness: Sharpness


def composed(first: Share, second: Share) -> Sharpness:
    """Sharpness of `second` after `first` (proposition 8 of the paper).

    Where `second` does not look at its input (sensitivity zero), nothing of `first` reaches the
    output, and the terms that divide by the sensitivity are zero instead.
    """
    p1, mu1, (a1, b1, g1) = first
    p2, mu2, (a2, b2, g2) = second
    ratio = p1 / mu2 if mu2 > 0 else 0.0
    reaches = p1 if mu2 > 0 else 0.0
    return Sharpness(
        p1 * ratio * a1 + p2 * p2 * a2 + 2 * ratio * p2 * b2 + ratio * ratio * g2,
        reaches * b1 + mu1 * (p2 * b2 + ratio * g2),
        mu2 * g1 + mu1 * mu1 * g2,
    )


def concatenated(parts: list[Share]) -> Sharpness:
    """Sharpness of parts that read the same input side by side (proposition 9)."""
    return Sharpness(
        sum(part.share**2 * part.sharpness.alpha for part in parts),
        sum(part.share * part.sharpness.beta for part in parts),
        sum(part.sharpness.gamma for part in parts),
    )
