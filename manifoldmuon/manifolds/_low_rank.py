"""Matrices of low rank as a product of two factors."""

from __future__ import annotations

from typing import Literal

from manifoldmuon._internal.arguments import check_number
from manifoldmuon.manifolds._euclidean import Euclidean
from manifoldmuon.manifolds._manifold import Manifold
from manifoldmuon.manifolds._stiefel import Stiefel
from manifoldmuon.norms import FanRatio, RMSToRMS


def low_rank(
    shape: tuple[int, int], rank: int, zero: Literal["A", "B"] = "A"
) -> dict[str, Manifold]:
    """Return manifolds for the factors of `W = B A`, a matrix of rank at most `rank` (LoRA).

    The columns of B are orthonormal up to its scale, as in arXiv:2508.17901, so that no factor can
    grow while the other shrinks and the full rank is in use; A is free. Steps of both are measured
    in the RMS-to-RMS norm. In this norm B has norm 1 and W has the norm of A, and a step of norm
    eta in each factor changes W by at most `eta (1 + ||A||)`.

    An adapter begins with `W = 0`: the free factor is zero and the other at a random point. PEFT
    and Flax start with `B = 0`: with `zero="B"` the rows of A are orthonormal up to its scale, and
    B is free. `optim.project_tree` on their random A changes no output.

    Args:
      shape: `(fan_out, fan_in)` of W.
      rank: from 1 to the smaller side.
      zero: the factor that is zero at the start, which is free.

    Returns:
      `{"B": Stiefel(FanRatio()), "A": Euclidean(RMSToRMS())}`, for factors of shapes
      `(fan_out, rank)` and `(rank, fan_in)`; exchanged for `zero="B"`.

    Examples:
      >>> low_rank((64, 32), 4)["B"]
      Stiefel(scale=FanRatio())
    """
    check_number("low_rank: rank", rank, whole=True)
    if not isinstance(shape, tuple | list) or len(shape) != 2 or not 1 <= rank <= min(shape):
        raise ValueError(
            f"low_rank takes a shape (m, n) and a rank from 1 to min(m, n); got the shape "
            f"{shape} and the rank {rank}"
        )
    if zero not in ("A", "B"):
        raise ValueError(f"low_rank: zero must be 'A' or 'B', the factor that is 0; got {zero!r}")
    frame, free = Stiefel(FanRatio()), Euclidean(RMSToRMS())
    return {"B": frame, "A": free} if zero == "A" else {"B": free, "A": frame}
