"""Modules printed as trees, with declared values, masses and budgets."""

from __future__ import annotations

from typing import Any

import jax

from manifoldmuon._internal.text import align, branches

_HEADER = ("module", "mass", "sensitivity", "sharpness", "part of the mass", "budget")


def printed_tree(module: Any, weights: Any) -> str:
    """Return a printed tree of a module and its compiled weights, the input at the top."""
    return align([_HEADER, *_rows(module, weights, "", "", module.mass)])


def _rows(module: Any, plan: Any, first: str, rest: str, whole: float) -> list[tuple[str, ...]]:
    sharpness = "({:.3g}, {:.3g}, {:.3g})".format(*module.sharpness)
    row = (first + module.describe(), f"{module.mass:.4g}", f"{module.sensitivity:.4g}", sharpness)
    if not module.parts:
        return [(*row, *_learning(module, plan, whole))]
    rows = [(*row, "", "")]
    plans = (plan,) if module.wraps else plan
    lines = branches(len(plans), rest)
    for part, inner, (branch, below) in zip(module.parts, plans, lines, strict=True):
        rows += _rows(part, inner, branch, below, whole)
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
