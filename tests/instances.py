"""Table of norms and manifolds. Every law is checked for every row; add a row for a new class."""

from typing import NamedTuple

from manifoldmuon.linalg import SVD
from manifoldmuon.manifolds import (
    EmbeddingRows,
    Euclidean,
    Grassmann,
    Hypersphere,
    Manifold,
    Orthogonal,
    Rotations,
    SpectralBall,
    SpectralBand,
    SpectralSphere,
    Stiefel,
)
from manifoldmuon.manifolds.retractions import QR, Geodesic
from manifoldmuon.manifolds.solvers import SkewPolar
from manifoldmuon.norms import (
    ConvRMSToRMS,
    FanRatio,
    Frobenius,
    L1ToRMS,
    MaxAbs,
    Norm,
    RMSToRMS,
    RootDim,
    RootRank,
    Spectral,
)


class NormCase(NamedTuple):
    """Norm and weight shape; `loss` bounds the relative loss of its method in the dual norm.

    A row of each kind is checked thoroughly; see `check_norm`.
    """

    name: str
    norm: Norm
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
    NormCase("frobenius matrix", Frobenius(), (5, 3), thorough=True),
    NormCase("frobenius scalar", Frobenius(ndim=0), ()),
    NormCase("infinity", MaxAbs(), (2, 4, 3)),
    NormCase("spectral tall", Spectral(), (6, 4)),
    NormCase("spectral wide stack", Spectral(), (2, 3, 5)),
    NormCase("spectral row", Spectral(), (1, 5)),
    NormCase("spectral by svd", Spectral(SVD()), (4, 4)),
    NormCase("rms to rms", RMSToRMS(), (8, 2), thorough=True),
    NormCase("embedding", L1ToRMS(), (9, 4), thorough=True),
    NormCase("convolution", ConvRMSToRMS(), (3, 2, 6, 4)),
    NormCase("sequence convolution", ConvRMSToRMS(tap_axes=1), (3, 4, 6)),
    NormCase("volume convolution", ConvRMSToRMS(tap_axes=3), (2, 2, 2, 3, 4)),
]

FLAT = [
    ManifoldCase("flat vector", Euclidean(), (5,)),
    ManifoldCase("flat scalar", Euclidean(Frobenius(ndim=0)), ()),
    ManifoldCase("flat sign", Euclidean(MaxAbs()), (4, 3)),
    ManifoldCase("flat muon", Euclidean(RMSToRMS()), (2, 6, 4), thorough=True),
    ManifoldCase("flat embedding", Euclidean(L1ToRMS()), (7, 4)),
    ManifoldCase("flat convolution", Euclidean(ConvRMSToRMS()), (3, 2, 4, 6)),
]

SPHERES = [
    ManifoldCase("sphere of a matrix", Hypersphere(RootDim(), ndim=2), (4, 3)),
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
    ManifoldCase("stiefel wide, scaled", Stiefel(FanRatio()), (3, 9), thorough=True),
    ManifoldCase("stiefel square", Stiefel(1.5), (4, 4)),
    ManifoldCase("stiefel column", Stiefel(), (6, 1)),
    ManifoldCase("stiefel taps", Stiefel(), (2, 1, 8, 3)),
    ManifoldCase("stiefel by Frobenius steps", Stiefel(2.0, step_norm=Frobenius()), (8, 3)),
]

GRASSMANN = [
    ManifoldCase("grassmann tall", Grassmann(), (10, 4), thorough=True),
    ManifoldCase(
        "grassmann wide stack, by svd",
        Grassmann(FanRatio(), QR(), Spectral(SVD(), FanRatio())),
        (2, 4, 6),
    ),
    ManifoldCase("grassmann by Frobenius steps", Grassmann(step_norm=Frobenius()), (5, 1)),
]

# SVD, because iterative methods make large programs; they have separate tests.
BY_SVD = Spectral(SVD())
ANY_NORM = [
    ManifoldCase(
        "fixed Frobenius norm by spectral steps",
        Hypersphere(RootRank(FanRatio()), ndim=2, step_norm=RMSToRMS(SVD())),
        (2, 5, 3),
        thorough=True,
    ),
    ManifoldCase(
        "sphere by sign steps", Hypersphere(RootDim(), ndim=2, step_norm=MaxAbs()), (4, 3)
    ),
    ManifoldCase("rows by spectral steps", EmbeddingRows(step_norm=BY_SVD), (6, 4), gap=0.02),
    # Small steps: the set is strongly curved if the second singular value is close.
    ManifoldCase("spectral sphere", SpectralSphere(4.0, step_norm=Spectral()), (5, 3)),
    ManifoldCase(
        "spectral sphere, wide stack, by svd",
        SpectralSphere(5.0, step_norm=BY_SVD),
        (2, 3, 4),
    ),
    ManifoldCase(
        "spectral ball", SpectralBall(FanRatio(), step_norm=RMSToRMS(SVD())), (6, 4), gap=0.01
    ),
    ManifoldCase(
        "spectral band, wide stack",
        SpectralBand(0.7, 1.4, 2.0, step_norm=BY_SVD),
        (2, 3, 5),
        0.02,
    ),
    ManifoldCase(
        "spectral band by Frobenius steps",
        SpectralBand(step_norm=Frobenius()),
        (4, 4),
    ),
]

MANIFOLDS = [
    *FLAT,
    *SPHERES,
    *SQUARE,
    *STIEFEL,
    *GRASSMANN,
    *ANY_NORM,
]
