"""Functions of matrices: msign and its methods, schedules and their designer, power iteration."""

from manifoldmuon.linalg._gram_eigh import GramEigh
from manifoldmuon.linalg._inverse_root import InverseRoot, inverse_root
from manifoldmuon.linalg._inverse_sqrt import DEFAULT_INVERSE_SQRT, inverse_sqrt
from manifoldmuon.linalg._matrix import mT, product, skew, sym, upcast
from manifoldmuon.linalg._method import MsignMethod
from manifoldmuon.linalg._msign import DEFAULT_MSIGN, msign
from manifoldmuon.linalg._newton_schulz import NewtonSchulz
from manifoldmuon.linalg._polar_express import polar_express
from manifoldmuon.linalg._power_iteration import power_iteration, spectral_norm
from manifoldmuon.linalg._qdwh import QDWH
from manifoldmuon.linalg._scaling import prescale, times_power_of_two
from manifoldmuon.linalg._schedule import (
    CUBIC,
    MODULA_SIX_STEP,
    MUON,
    POLAR_EXPRESS,
    QUINTIC,
    Schedule,
)
from manifoldmuon.linalg._sketch import Sketch
from manifoldmuon.linalg._svd import SVD

__all__ = [
    "CUBIC",
    "DEFAULT_INVERSE_SQRT",
    "DEFAULT_MSIGN",
    "MODULA_SIX_STEP",
    "MUON",
    "POLAR_EXPRESS",
    "QDWH",
    "QUINTIC",
    "SVD",
    "GramEigh",
    "InverseRoot",
    "MsignMethod",
    "NewtonSchulz",
    "Schedule",
    "Sketch",
    "inverse_root",
    "inverse_sqrt",
    "mT",
    "msign",
    "polar_express",
    "power_iteration",
    "prescale",
    "product",
    "skew",
    "spectral_norm",
    "sym",
    "times_power_of_two",
    "upcast",
]
