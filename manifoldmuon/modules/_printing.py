"""A module as text: one line for each part, with its attributes and its share of learning."""

from typing import Any

import jax
import numpy as np

from manifoldmuon.modules._interface import ModuleInterface

_HEADER = ("module", "mass", "sensitivity", "sharpness", "share of learning", "target norm")


def tree_text(module: ModuleInterface) -> str:
    """The tree of a module, the input at the top.

    Atoms show their share of the total mass, and their target norm in the whole (from the first
    copy to the last, where the copies of a stack differ).
    """
    whole = module.mass
    rows = [_HEADER, *_rows(module, module.plan(np.ones(())), "", "", whole)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER))]
    lines = ("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _rows(module: Any, plan: Any, first: str, rest: str, whole: float) -> list[tuple[str, ...]]:
    sharpness = "({:.3g}, {:.3g}, {:.3g})".format(*module.sharpness)
    row = (first + module.describe(), f"{module.mass:.4g}", f"{module.sensitivity:.4g}", sharpness)
    if not module.parts:
        return [(*row, *_learning(module, plan, whole))]
    rows = [(*row, "", "")]
    plans = (plan,) if module.wraps else plan
    for i, (part, inner) in enumerate(zip(module.parts, plans, strict=True)):
        last = i == len(module.parts) - 1
        branch, below = ("└─ ", "   ") if last else ("├─ ", "│  ")
        rows += _rows(part, inner, rest + branch, rest + below, whole)
    return rows


def _learning(module: Any, plan: Any, whole: float) -> tuple[str, str]:
    leaves = jax.tree.leaves(plan)
    if not leaves:
        return ("", "") if not module.mass else ("tied", "")
    mass = sum(leaf.mass for leaf in leaves)
    if not mass:
        return "frozen", "0"
    ends = dict.fromkeys(f"{b:.4g}" for leaf in leaves for b in leaf.budget.flat[[0, -1]])
    return f"{mass / whole:.1%}", " … ".join(ends)
