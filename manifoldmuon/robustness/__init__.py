"""Labels that hold: losses that ask for margins, and attacks on what they have made."""

from manifoldmuon.robustness._attacks import Attacked, auto_attack, pgd
from manifoldmuon.robustness._losses import margin_cross_entropy, multiclass_hinge

__all__ = ["Attacked", "auto_attack", "margin_cross_entropy", "multiclass_hinge", "pgd"]
