"""Arguments of a wrong kind are refused where they are given, not in the first training step.

In an interpreter of its own: in the suite the annotations are checked before the package's own
checks are reached.
"""

import json
import subprocess
import sys

import pytest

CASES = {
    "Spectral(MUON)": "Spectral.method must be a MsignMethod: write NewtonSchulz(FixedSchedule(",
    "ConvRMSToRMS('svd')": "ConvRMSToRMS.method must be a MsignMethod such as SVD(); got 'svd'",
    "SkewLift(MUON)": "SkewLift.method must be a MsignMethod: write NewtonSchulz(",
    "SkewLift(schedule=SVD())": "SkewLift.schedule must be a Schedule such as",
    "OneStep(SVD())": "OneStep.schedule must be a Schedule such as",
    "DualAscent(method=MUON)": "DualAscent.method must be a MsignMethod: write NewtonSchulz(",
    "AlternatingProjection(method=1)": "AlternatingProjection.method must be a MsignMethod",
    "NewtonSchulz(SVD())": "NewtonSchulz.schedule must be a Schedule such as",
    "NewtonSchulz(MUON, precision='high')": "NewtonSchulz.precision must be a jax.lax.Precision",
    "SkewLift(precision=None)": "SkewLift.precision must be a jax.lax.Precision such as",
    "OneStep(precision=1)": "OneStep.precision must be a jax.lax.Precision such as",
    "ByPlatform(ADMM(), SkewLift())": "ByPlatform.cpu must be a MemorylessSolver such as",
    "with_master_copies(muon(0.1, Euclidean()), int)": "dtype must be a floating dtype such as",
    "msign(jnp.ones((2, 2)), MUON)": "method must be a MsignMethod: write NewtonSchulz(",
    "inverse_sqrt(jnp.eye(2), SVD())": "schedule must be a Schedule such as",
    "Stiefel(step_norm=Infinity())": "Stiefel.step_norm must be Spectral or Frobenius; got Infin",
    "Hypersphere(step_norm=1.0)": "Hypersphere.step_norm must be Norm; got 1.0",
    "SpectralBall(step_norm=1.0)": "SpectralBall.step_norm must be Norm; got 1.0",
    "Euclidean(RMSToRMS)": "Euclidean.step_norm must be Norm; got <function RMSToRMS",
    "Stiefel(retraction=QR)": "Stiefel.retraction must be Retraction; got <class",
    "Grassmann(retraction=Clip())": "Grassmann.retraction must be Retraction; got Clip(",
    "Stiefel(solver='x')": "Stiefel.solver must be StiefelSolver; got 'x'",
    "Orthogonal(solver=FAST.cpu.__class__)": "Orthogonal.solver must be StiefelSolver; got <class",
    "SpectralBall(solver=SVD())": "SpectralBall.solver must be DouglasRachford or None; got SVD",
    "SpectralBand(retraction=Polar())": "SpectralBand.retraction must be SpectralRetraction; got",
    "Hypersphere(retraction=Geodesic)": "Hypersphere.retraction must be SphereRetraction; got <cl",
    "EmbeddingRows(solver=Bracket())": "EmbeddingRows.solver must be BarzilaiBorwein or DouglasRac",
    "DoublyStochastic(retraction=1)": "DoublyStochastic.retraction must be StochasticRetraction",
    "by_path({0: Stiefel()})": "a pattern of by_path is a string or a compiled re.Pattern; got 0",
    "Linear(3, 4, Stiefel().transposed())": "Linear.manifold must be a Manifold; got LaidOut(",
    "muon(0.1, Euclidean(), method=MUON)": "method must be a MsignMethod: write NewtonSchulz(",
    "Layout(0, 1, taps='ab')": "taps must be an axis number or several; got 'ab'",
    "Layout(in_blocks=2.0)": "in_blocks must be a whole number, 1 or more; got 2.0",
    "Layout(out_blocks=True)": "out_blocks must be a whole number, 1 or more; got True",
    "msign(COMPLEX)": "got complex64; only real numbers are known here. Keep the real and the im",
    "Stiefel().project(COMPLEX)": "got complex64; only real numbers",
    "Stiefel().tangent(COMPLEX, COMPLEX)": "got complex64; only real numbers",
    "Stiefel().steepest(COMPLEX, COMPLEX, ())": "got complex64; only real numbers",
    "Stiefel().retract(COMPLEX, COMPLEX)": "got complex64; only real numbers",
    "Hypersphere(ndim=2).steepest(COMPLEX, COMPLEX, ())": "got complex64; only real numbers",
    "EmbeddingRows().project(COMPLEX)": "got complex64; only real numbers",
    "Euclidean(Spectral()).steepest(COMPLEX, COMPLEX, ())": "got complex64; only real numbers",
    "muon(0.1, Euclidean()).init({'w': COMPLEX})": "the parameter 'w' has dtype complex64; only",
    "scale_by_budget(2.0).update({'w': COMPLEX}, EmptyState())": "the update of 'w' has dtype comp",
    "margin_cross_entropy(COMPLEX, LABELS, 1, 1)": "margin_cross_entropy: logits must be floating",
    "margin_cross_entropy(LOGITS, LOGITS, 1, 1)": "margin_cross_entropy: labels must be whole numb",
    "margin_cross_entropy(LOGITS, LABELS[:2], 1, 1)": "margin_cross_entropy: logits (..., classes)",
    "margin_cross_entropy(LOGITS[:, :1], LABELS, 1, 1)": "margin_cross_entropy: logits (..., class",
    "margin_cross_entropy(LOGITS, LABELS, -1, 1)": "margin_cross_entropy: offset must be a finite",
    "margin_cross_entropy(LOGITS, LABELS, 1, 0)": "margin_cross_entropy: temperature must be above",
    "multiclass_hinge(LOGITS, LABELS, -0.5)": "multiclass_hinge: margin must be a finite number",
    "multiclass_hinge(LOGITS[0], LABELS, 1)": "multiclass_hinge: logits (..., classes), two class",
}

CODE = """
import json, sys
import jax.numpy as jnp
from manifoldmuon.linalg import *
from manifoldmuon.manifolds import *
from manifoldmuon.manifolds.retractions import *
from manifoldmuon.manifolds.solvers import *
from manifoldmuon.modules import *
from manifoldmuon.norms import *
from manifoldmuon.optim import *
from manifoldmuon.robustness import *
from optax import EmptyState

COMPLEX = jnp.ones((3, 2), jnp.complex64)
LOGITS, LABELS = jnp.ones((3, 4)), jnp.arange(3)

def message(case):
    try:
        return repr(eval(case))
    except (TypeError, ValueError) as error:
        return str(error)

json.dump({case: message(case) for case in json.load(sys.stdin)}, sys.stdout)
"""


@pytest.fixture(scope="module")
def messages() -> dict[str, str]:
    command, asked = [sys.executable, "-c", CODE], json.dumps(list(CASES))
    done = subprocess.run(command, input=asked, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES)
def test_wrong_kinds_are_refused(case, messages):
    assert messages[case].startswith(CASES[case])
