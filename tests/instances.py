"""Table of norms and manifolds. Every law is checked for every row; add a row for a new class."""

# ruff: noqa: F403, F405

from typing import NamedTuple

from manifoldmuon import norms
from manifoldmuon.linalg import SVD
from manifoldmuon.manifolds import *
from manifoldmuon.manifolds.retractions import QR, Geodesic
from manifoldmuon.manifolds.solvers import SkewPolar


class NormCase(NamedTuple):
    """Norm and weight shape; `loss` bounds the relative loss of its method in the dual norm.

    A row of each kind is checked thoroughly; see `check_norm`.
    """

    name: str
    norm: norms.Norm
    shape: tuple[int, ...]
    loss: float = 1e-4
    thorough: bool = False


class ManifoldCase(NamedTuple):
    """Manifold and point shape; `gap` bounds the certified gap of its method.

    A row of each kind is checked thoroughly; see `check_manifold`, also for `convex`.
    """

    name: str
    manifold: Manifold
    shape: tuple[int, ...]
    gap: float = 1e-3
    thorough: bool = False
    convex: bool = False


NORMS = [
    NormCase("frobenius matrix", norms.Frobenius(), (5, 3), thorough=True),
    NormCase("frobenius scalar", norms.Frobenius(ndim=0), ()),
    NormCase("infinity", norms.MaxAbs(), (2, 4, 3)),
    NormCase("spectral tall", norms.Spectral(), (6, 4)),
    NormCase("spectral wide stack", norms.Spectral(), (2, 3, 5)),
    NormCase("spectral row", norms.Spectral(), (1, 5)),
    NormCase("spectral by svd", norms.Spectral(SVD()), (4, 4)),
    NormCase("rms to rms", norms.RMSToRMS(), (8, 2), thorough=True),
    NormCase("embedding", norms.L1ToRMS(), (9, 4), thorough=True),
    NormCase("convolution", norms.ConvRMSToRMS(), (3, 2, 6, 4)),
    NormCase("sequence convolution", norms.ConvRMSToRMS(tap_axes=1), (3, 4, 6)),
    NormCase("volume convolution", norms.ConvRMSToRMS(tap_axes=3), (2, 2, 2, 3, 4)),
]

FLAT = [
    ManifoldCase("flat vector", Euclidean(), (5,)),
    ManifoldCase("flat scalar", Euclidean(norms.Frobenius(ndim=0)), ()),
    ManifoldCase("flat sign", Euclidean(norms.MaxAbs()), (4, 3)),
    ManifoldCase("flat muon", Euclidean(norms.RMSToRMS()), (2, 6, 4), thorough=True),
    ManifoldCase("flat embedding", Euclidean(norms.L1ToRMS()), (7, 4)),
    ManifoldCase("flat convolution", Euclidean(norms.ConvRMSToRMS()), (3, 2, 4, 6)),
]

SPHERES = [
    ManifoldCase("sphere of a matrix", Hypersphere(norms.RootDim(), ndim=2), (4, 3)),
    ManifoldCase("spheres of radius 3", Hypersphere(3.0), (2, 5), thorough=True),
    ManifoldCase("sphere by great circles", Hypersphere(2.0, retraction=Geodesic()), (5,)),
    ManifoldCase("embedding rows", EmbeddingRows(), (7, 4)),
    ManifoldCase("embedding rows of length 2", EmbeddingRows(2.0), (7, 4)),
]

SQUARE = [
    ManifoldCase("orthogonal odd stack", Orthogonal(2.0), (2, 5, 5)),
    ManifoldCase("orthogonal by svd", Orthogonal(solver=SkewPolar(SVD())), (4, 4)),
    ManifoldCase("orthogonal 1x1", Orthogonal(), (1, 1)),
    ManifoldCase("rotations", Rotations(), (3, 3)),
    ManifoldCase("rotations of scale 2, stack", Rotations(2.0), (2, 3, 3)),
]

STIEFEL = [
    ManifoldCase("stiefel tall", Stiefel(), (10, 4)),
    ManifoldCase("stiefel wide, scaled", Stiefel(norms.FanRatio()), (3, 9), thorough=True),
    ManifoldCase("stiefel square", Stiefel(1.5), (4, 4)),
    ManifoldCase("stiefel column", Stiefel(), (6, 1)),
    ManifoldCase("stiefel taps", Stiefel(), (2, 1, 8, 3)),
    ManifoldCase("stiefel by Frobenius steps", Stiefel(2.0, step_norm=norms.Frobenius()), (8, 3)),
]

GRASSMANN = [
    ManifoldCase("grassmann tall", Grassmann(), (10, 4), thorough=True),
    ManifoldCase(
        "grassmann wide stack, by svd",
        Grassmann(norms.FanRatio(), QR(), norms.Spectral(SVD(), norms.FanRatio())),
        (2, 4, 6),
    ),
    ManifoldCase("grassmann by Frobenius steps", Grassmann(step_norm=norms.Frobenius()), (5, 1)),
]

# SVD, because iterative methods make large programs; they have separate tests.
BY_SVD = norms.Spectral(SVD())
ANY_NORM = [
    ManifoldCase(
        "fixed Frobenius norm by spectral steps",
        Hypersphere(norms.RootRank(norms.FanRatio()), ndim=2, step_norm=norms.RMSToRMS(SVD())),
        (2, 5, 3),
        thorough=True,
    ),
    ManifoldCase(
        "sphere by sign steps",
        Hypersphere(norms.RootDim(), ndim=2, step_norm=norms.MaxAbs()),
        (4, 3),
    ),
    ManifoldCase("rows by spectral steps", EmbeddingRows(step_norm=BY_SVD), (6, 4), gap=0.02),
    # Small steps: the set is strongly curved if the second singular value is close.
    ManifoldCase("spectral sphere", SpectralSphere(4.0, step_norm=norms.Spectral()), (5, 3)),
    ManifoldCase(
        "spectral sphere, wide stack, by svd", SpectralSphere(5.0, step_norm=BY_SVD), (2, 3, 4)
    ),
    ManifoldCase(
        "spectral ball",
        SpectralBall(norms.FanRatio(), step_norm=norms.RMSToRMS(SVD())),
        (6, 4),
        gap=0.01,
    ),
    ManifoldCase(
        "spectral band, wide stack", SpectralBand(0.7, 1.4, 2.0, step_norm=BY_SVD), (2, 3, 5), 0.02
    ),
    ManifoldCase(
        "spectral band by Frobenius steps", SpectralBand(step_norm=norms.Frobenius()), (4, 4)
    ),
]

MANIFOLDS = [*FLAT, *SPHERES, *SQUARE, *STIEFEL, *GRASSMANN, *ANY_NORM]
