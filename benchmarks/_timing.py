"""How benchmarks are timed: as the laboratory does it."""

from manifoldmuon.lab._timing import interleaved

__all__ = ["interleaved"]
