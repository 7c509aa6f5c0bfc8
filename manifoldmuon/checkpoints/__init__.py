"""Checkpoints that resume bit for bit or refuse: Orbax's manager, and a record of what it saved.

Imported by name; needs the extra `manifoldmuon[checkpoints]`.
"""

from manifoldmuon.checkpoints._manager import STATE_LAYOUT, CheckpointError, Checkpoints, Restored

__all__ = ["STATE_LAYOUT", "CheckpointError", "Checkpoints", "Restored"]
