"""The network of the main job: the laboratory's."""

from manifoldmuon.lab._classifier import (
    Weights,
    accuracy,
    cross_entropy,
    init_weights,
    logits,
    shapes_of,
)

__all__ = ["Weights", "accuracy", "cross_entropy", "init_weights", "logits", "shapes_of"]
