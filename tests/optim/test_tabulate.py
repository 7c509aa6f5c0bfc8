"""Summary table of parameters, manifolds and budgets."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from manifoldmuon import optim
from manifoldmuon.manifolds import EmbeddingRows, Euclidean, Hypersphere, LaidOut, Layout, Stiefel
from manifoldmuon.manifolds.solvers import ProjectedPolar
from manifoldmuon.norms import ConvRMSToRMS, Frobenius, L1ToRMS, RMSToRMS
from tests.optim.instances import abstract

W, FLAX, VECTOR = Stiefel(), Stiefel().transposed(), Euclidean()
MUON = Euclidean(RMSToRMS())


def only(entry: Any, shape: tuple[int, ...], path: str = "layer/kernel") -> Any:
    (row,) = optim.tabulate(entry, {path: jax.ShapeDtypeStruct(shape, jnp.float32)}).rows
    return row


@pytest.mark.parametrize(
    ("entry", "shape", "copies", "fan_in", "fan_out"),
    [
        (W, (6, 3), 1, 3, 6),
        (FLAX, (3, 6), 1, 3, 6),
        (FLAX, (2, 3, 6), 2, 3, 6),
        (W.with_axes(0, (1, 2)), (8, 2, 4), 1, 8, 8),
        (W.with_axes(-3, -1), (8, 2, 4), 2, 8, 4),
        (LaidOut(W, Layout(-2, -1, out_blocks=6)), (2, 8, 24), 12, 8, 4),
        (LaidOut(W, Layout(in_blocks=2)), (8, 8), 2, 4, 8),
        (W.with_axes((0, 1, 2), 3), (3, 3, 4, 8), 1, 36, 8),
        (W.with_axes(-2, -1, (-4, -3)), (3, 3, 4, 8), 9, 4, 8),
        (Euclidean(ConvRMSToRMS()).with_axes(-2, -1, (-4, -3)), (3, 3, 4, 8), 1, 36, 8),
        (EmbeddingRows(), (50, 8), 1, 50, 8),
        (Euclidean(L1ToRMS()), (50, 8), 1, 50, 8),
        (Hypersphere(ndim=2), (6, 3), 1, 3, 6),
        (VECTOR, (2, 6), 2, None, None),
        (Euclidean(Frobenius(ndim=0)), (), 1, None, None),
    ],
)
def test_copies_and_fans_follow_layout(entry, shape, copies, fan_in, fan_out):
    row = only(entry, shape)
    assert (row.copies, row.fan_in, row.fan_out) == (copies, fan_in, fan_out)


def test_training_method_is_named():
    printed = str(optim.tabulate(MUON.for_training(), abstract({"w": (6, 4)})))
    assert "RMSToRMS(method=BOUNDED_MSIGN)" in printed


def test_table_prints_all_columns():
    params = abstract({"embed": {"embedding": (9, 4)}, "out": {"kernel": (4, 6), "bias": (6,)}})
    geometry = {
        "embed": EmbeddingRows(),
        "out": {"kernel": Stiefel(scale=2.0, solver=ProjectedPolar()).transposed(), "bias": W},
    }
    with pytest.raises(ValueError, match="'out/bias'"):
        optim.tabulate(geometry, params)
    geometry["out"]["bias"] = VECTOR
    budgets = {"embed": 0.5, "out": {"kernel": jnp.full((1, 1), 0.25), "bias": 1}}
    table = optim.tabulate(geometry, params, budgets)
    lines = str(table).splitlines()
    assert table._repr_html_() == f"<pre>{table}</pre>"  # the table needs no escapes
    assert [line.split("  ")[0].rstrip() for line in lines] == [
        "path", "-" * 15, "embed/embedding", "out/bias", "out/kernel"
    ]  # fmt: skip
    starts = [lines[0].index(name) for name in ("path", "shape", "manifold", "norm", "retraction")]
    embedding, bias, kernel = (
        [line[at:].split("  ")[0].rstrip() for at in starts] for line in lines[2:]
    )
    assert embedding == [
        "embed/embedding", "(9, 4)", "EmbeddingRows", "MaxRowNorm(scale=RootDim)", "Normalize"
    ]  # fmt: skip
    assert bias == ["out/bias", "(6,)", "Euclidean", "Frobenius(ndim=1)", "addition"]
    assert kernel == [
        "out/kernel",
        "(4, 6)",
        "Stiefel(scale=2.0, solver=ProjectedPolar)",
        "Spectral(scale=2.0)",
        "Polar",
    ]
    ends = [lines[0].index(name) + len(name) for name in ("copies", "fan-in", "fan-out", "budget")]
    numbers = [[line[:at].split()[-1] for at in ends] for line in lines[2:]]
    assert numbers[0] == ["1", "9", "4", "0.5"]
    assert numbers[1] == ["1", "-", "-", "1"]
    assert numbers[2][:3] == ["1", "4", "6"]
    assert "array(1, 1)" in lines[4]
