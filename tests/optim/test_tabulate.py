"""Summary table of parameters, manifolds and budgets."""

import re

import jax.numpy as jnp
import pytest

from manifoldmuon import optim
from manifoldmuon.manifolds import EmbeddingRows, Euclidean, Hypersphere, LaidOut, Layout, Stiefel
from manifoldmuon.manifolds.solvers import ProjectedPolar
from manifoldmuon.norms import ConvRMSToRMS, Frobenius, L1ToRMS, RMSToRMS
from tests.optim.instances import abstract

W, FLAX, VECTOR = Stiefel(), Stiefel().transposed(), Euclidean()
MUON = Euclidean(RMSToRMS())


@pytest.mark.parametrize(
    ("entry", "shape", "copies", "fan_in", "fan_out"),
    [
        (W, (6, 3), 1, 3, 6),
        (FLAX, (3, 6), 1, 3, 6),
        (FLAX.stacked(), (2, 3, 6), 2, 3, 6),
        (W.with_axes(-3, (-2, -1)), (8, 2, 4), 1, 8, 8),  # Flax's attention: queries
        (W.with_axes((-3, -2), -1), (2, 4, 8), 1, 8, 8),  # ... and the output
        (W.with_axes(-3, -1), (8, 2, 4), 2, 8, 4),
        (LaidOut(W, Layout(-2, -1, ndim=3, out_blocks=6)), (2, 8, 24), 12, 8, 4),
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
    (row,) = optim.tabulate(entry, abstract({"layer/kernel": shape})).rows
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
    assert table._repr_html_() == f"<pre>{table}</pre>"  # the table needs no escapes
    header, _, *rows = (re.split("  +", line) for line in str(table).splitlines())
    assert header == ["path", "shape", "copies", "fan-in", "fan-out", "manifold", "norm", "budget",
                      "retraction"]  # fmt: skip
    kernel = "Stiefel(scale=2.0, solver=ProjectedPolar)", "Spectral(scale=2.0)"
    norm = "MaxRowNorm(scale=RootDim)"
    assert rows == [
        ["embed/embedding", "(9, 4)", "1", "9", "4", "EmbeddingRows", norm, "0.5", "Normalize"],
        ["out/bias", "(6,)", "1", "-", "-", "Euclidean", "Frobenius(ndim=1)", "1", "addition"],
        ["out/kernel", "(4, 6)", "1", "4", "6", *kernel, "array(1, 1)", "Polar"],
    ]
