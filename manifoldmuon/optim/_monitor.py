"""Reading certificates out of an optimizer state, for logging."""

from typing import Any

import jax

from manifoldmuon.optim._steepest import ScaleBySteepestState


def monitor(state: Any) -> dict[str, dict[str, jax.Array]]:
    """The last step's certificates, wherever in an optimizer state they are.

    Works on the state of any composition (chains, `optax.masked`, `optax.partition`,
    `optax.MultiSteps`, ...), and under `jax.jit`. See `monitor_distance` for the distance of the
    parameters from their manifolds.

    Args:
      state: an optimizer state with one `scale_by_steepest` in it, or several that share out
        the parameters.

    Returns:
      `{"residual": {path: array}, "gap": {path: array}}`: float32, one number per point; see
      `manifoldmuon.manifolds.Steepest`.

    Raises:
      ValueError: if there is no `ScaleBySteepestState`, or two speak of the same parameter.
    """
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, ScaleBySteepestState))
    found = [node for node in nodes if isinstance(node, ScaleBySteepestState)]
    if not found:
        raise ValueError("there is no scale_by_steepest in the transformation of this state.")
    report: dict[str, dict[str, jax.Array]] = {"residual": {}, "gap": {}}
    for part in found:
        twice = report["gap"].keys() & part.gap.keys()
        if twice:
            raise ValueError(f"two scale_by_steepest report on {sorted(twice)}; ask each state.")
        report["residual"].update(part.residual)
        report["gap"].update(part.gap)
    return report
