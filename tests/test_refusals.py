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
    "SkewPolar(MUON)": "SkewPolar.method must be a MsignMethod: write NewtonSchulz(",
    "SkewPolar(schedule=SVD())": "SkewPolar.schedule must be a Schedule such as",
    "ProjectedPolar(SVD())": "ProjectedPolar.schedule must be a Schedule such as",
    "DualAscent(method=MUON)": "DualAscent.method must be a MsignMethod: write NewtonSchulz(",
    "DualAscent(method=1)": "DualAscent.method must be a MsignMethod",
    "NewtonSchulz(SVD())": "NewtonSchulz.schedule must be a Schedule such as",
    "NewtonSchulz(MUON, precision='high')": "NewtonSchulz.precision must be a jax.lax.Precision",
    "SkewPolar(precision=None)": "SkewPolar.precision must be a jax.lax.Precision such as",
    "ProjectedPolar(precision=1)": "ProjectedPolar.precision must be a jax.lax.Precision such as",
    "ByPlatform(DualAscent(), SkewPolar())": "ByPlatform.cpu must be a MemorylessSolver such as",
    "with_master_copies(muon(0.1, Euclidean()), int)": "with_master_copies: dtype must be a float",
    "msign(jnp.ones((2, 2)), MUON)": "method must be a MsignMethod: write NewtonSchulz(",
    "inverse_sqrt(jnp.eye(2), SVD())": "schedule must be a Schedule such as",
    "Stiefel(step_norm=MaxAbs())": "Stiefel.step_norm must be Spectral or Frobenius; got MaxAb",
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
    "EmbeddingRows(solver=LineMultiplier())": "EmbeddingRows.solver must be BarzilaiBorwein or",
    "DoublyStochastic(retraction=1)": "DoublyStochastic.retraction must be StochasticRetraction",
    "by_path({0: Stiefel()})": "a pattern of by_path is a string or a compiled re.Pattern; got 0",
    "Linear(3, 4, Stiefel().transposed())": "Linear.manifold must be a Manifold; got LaidOut(",
    "muon(0.1, Euclidean(), method=MUON)": "muon: method must be a MsignMethod: write Newton",
    "Layout(0, 1, taps='ab')": "taps must be an axis number or several; got 'ab'",
    "Layout(in_blocks=2.0)": "Layout.in_blocks must be a whole number in [1, inf); got 2.0",
    "Layout(out_blocks=True)": "Layout.out_blocks must be a whole number in [1, inf); got True",
    "Layout(0.5, 1)": "in_axes must be an axis number or several; got 0.5",
    "Layout(True, 0)": "in_axes must be an axis number or several; got True",
    "LaidOut(Stiefel, Layout())": "LaidOut.manifold must be Manifold; got <class",
    "LaidOut(Stiefel(), 2)": "LaidOut.layout must be Layout; got 2",
    "low_rank((4, 3), 1.5)": "low_rank: rank must be a whole number; got 1.5",
    "SVD(-1.0)": "SVD.cutoff must be a finite number in [0, inf); got -1.0",
    "GramEigh(2.5)": "GramEigh.passes must be a whole number in [1, inf); got 2.5",
    "Sketch(2.0)": "Sketch.rank must be a whole number in [1, inf); got 2.0",
    "Sketch(2, seed=-1)": "Sketch.seed must be a whole number in [0, inf); got -1",
    "InverseRoot(steps='5')": "InverseRoot.steps must be a whole number in [1, inf); got '5'",
    "PolarExpress('x')": "PolarExpress.lower must be a finite number in [1e-12, 1); got 'x'",
    "PolarExpress(1e-3, 5.0)": "PolarExpress.degree must be a whole number in [3, inf); got 5.0",
    "PolarExpress(1e-3, safety=NAN)": "PolarExpress.safety must be a finite number in [1, 1.1]; g",
    "FixedSchedule((1.5, -0.5))": "a step is a tuple of two coefficients (degree 3) or more; got",
    "FixedSchedule([(1.5, -0.5)])": "FixedSchedule.head must be a tuple of steps; got [(1.5",
    "FixedSchedule(((1.5, NAN),))": "a coefficient of FixedSchedule must be a finite number; got",
    "NewtonSchulz(MUON, operands='int8')": "NewtonSchulz.operands must be a floating dtype such as",
    "NewtonSchulz(MUON, gram='no')": "NewtonSchulz.gram must be True or False; got 'no'",
    "NewtonSchulz(MUON, frobenius=1.0)": "NewtonSchulz.frobenius must be True or False; got 1.0",
    "PolarExpress(1e-3, contract='no')": "PolarExpress.contract must be True or False; got 'no'",
    "DualAscent(relative=None)": "DualAscent.relative must be True or False; got None",
    "Stiefel(step_norm=Frobenius(1))": "Stiefel.step_norm must be for 2 axes; got Frobenius(ndim=1",
    "Isospectral((1.0,), Frobenius(3))": "Isospectral.step_norm must be for 2 axes; got Frobenius(",
    "zolotarev(1.5, 0.1)": "poles must be a whole number in [1, inf); got 1.5",
    "Frobenius(-1)": "Frobenius.ndim must be a whole number in [0, inf); got -1",
    "MaxAbs(1.0)": "MaxAbs.ndim must be a whole number in [0, inf); got 1.0",
    "MaxRowNorm(threshold=-1e-6)": "MaxRowNorm.threshold must be a finite number in [0, 1); got",
    "PowerIterations(1.5)": "PowerIterations.warm must be a whole number in [1, inf); got 1.5",
    "SpectralSphere(lanczos=True)": "SpectralSphere.lanczos must be a whole number in [1, inf)",
    "SpectralBall(active_tolerance='x')": "SpectralBall.active_tolerance must be a finite numb",
    "Hypersphere(ndim=1.0)": "Hypersphere.ndim must be a whole number in [1, inf); got 1.0",
    "DoublyStochastic(True)": "DoublyStochastic.row_sum must be a finite number in (0, inf); got T",
    "LineMultiplier(steps=2.5)": "LineMultiplier.steps must be a whole number in [1, inf); got 2.5",
    "BarzilaiBorwein(cold_start_steps=-1)": "BarzilaiBorwein.cold_start_steps must be",
    "DouglasRachford(penalty=0)": "DouglasRachford.penalty must be a finite number in (0, inf); g",
    "DualAscent(-0.3)": "DualAscent.step must be a finite number in (0, inf); got -0.3",
    "Resolvents(0)": "Resolvents.poles must be a whole number in [1, inf); got 0",
    "Polar(0)": "Polar.max_iterations must be a whole number in [1, inf); got 0",
    "Clip(max_iterations=2.0)": "Clip.max_iterations must be a whole number in [1, inf); got 2.0",
    "Sinkhorn(max_iterations=2.5)": "Sinkhorn.max_iterations must be a whole number in [1, inf)",
    "Stiefel(True)": "Stiefel.scale must be a positive, finite number or a ScaleRule; got True",
    "FanRatio(-1)": "FanRatio.gain must be a finite number in (0, inf); got -1",
    "RootDim(True)": "RootDim.gain must be a finite number in (0, inf); got True",
    "Linear(2.5, 3)": "Linear.fan_out must be a whole number in [1, inf); got 2.5",
    "Linear(3, True)": "Linear.fan_in must be a whole number in [1, inf); got True",
    "LocallyConnected((2.0,), 3, 3)": "LocallyConnected.places must be a whole number >= 1; got 2",
    "Embed(0, 3)": "Embed.dim must be a whole number in [1, inf); got 0",
    "Unembed('3', 3)": "Unembed.vocabulary must be a whole number in [1, inf); got '3'",
    "Conv2D(3, 3, 2.5)": "Conv2D.kernel must be a whole number in [1, inf); got 2.5",
    "Conv2D(3, 3, stride=1.5)": "Conv2D.stride must be a whole number in [1, inf); got 1.5",
    "Conv2D(3, 3, padding=0.5)": "Conv2D.padding must be a whole number in [0, inf); got 0.5",
    "Bias(2.5)": "Bias.features must be a whole number in [1, inf); got 2.5",
    "Householder('4')": "Householder.features must be a whole number in [1, inf); got '4'",
    "TwoTap(4, 1.5)": "TwoTap.rank must be a whole number; got 1.5",
    "TwoTap(4, 2, axis=-2.0)": "TwoTap.axis must be a whole number in [-3, -2]; got -2.0",
    "TwoTap(4, 2, offset=0.5)": "TwoTap.offset must be a whole number; got 0.5",
    "Stack(Abs(), 2.5)": "Stack.copies must be a whole number in [1, inf); got 2.5",
    "SplitHeads(2.5)": "SplitHeads.heads must be a whole number in [1, inf); got 2.5",
    "AveragePool(2.5)": "AveragePool.rows must be a whole number in [1, inf); got 2.5",
    "AveragePool(1, 2.5)": "AveragePool.columns must be a whole number in [1, inf); got 2",
    "Flatten(2.5)": "Flatten.axes must be a whole number in [1, inf); got 2.5",
    "GroupSort(2.5)": "GroupSort.size must be a whole number in [1, inf); got 2.5",
    "SpaceToDepth(2.5)": "SpaceToDepth.side must be a whole number in [1, inf); got 2.5",
    "NormPool(True)": "NormPool.side must be a whole number in [1, inf); got True",
    "Shift(0.5)": "Shift.pixels must be a whole number; got 0.5",
    "MeanSubtract(-1.0)": "MeanSubtract.axis must be a whole number; got -1.0",
    "RMSDivide((-1, '2'))": "RMSDivide.axis must be a whole number; got '2'",
    "OrthogonalConv2D(4, 2.5)": "OrthogonalConv2D(kernel) must be a whole number >= 1; got 2.5",
    "MLP(3, 4, 5, 2.5)": "MLP depth must be a whole number >= 2; got 2.5",
    "residual(Abs(), 2.5)": "residual blocks must be a whole number >= 1; got 2.5",
    "Attention(6, 2.5)": "Attention heads must be a whole number >= 1; got 2.5",
    "GPT(5, 6, 2, 1.5)": "GPT blocks must be a whole number >= 1; got 1.5",
    "Param('a', Stiefel(), ndim=2.5)": "Param.ndim must be a whole number in [0, inf); got 2.5",
    "tie(Linear(3, 3) @ Linear(3, 3), 0, 1.0)": "an index of tie(places) must be a whole number",
    "L2(1.5)": "L2.axes must be a whole number in [1, inf); got 1.5",
    "Heads(2.5)": "Heads.count must be a whole number in [1, inf); got 2.5",
    "NormBound(1.0, features=2.5)": "NormBound.features must be a whole number in [1, inf); got 2",
    "bound(Abs(), input_norm='1')": "bound(input_norm) must be a number >= 0 or a Size; got '1'",
    "msign(COMPLEX)": "got complex64; only real numbers are known here. Keep the real and the im",
    "Stiefel().project(COMPLEX)": "got complex64; only real numbers",
    "Stiefel().project_tangent(COMPLEX, COMPLEX)": "got complex64; only real numbers",
    "Stiefel().steepest(COMPLEX, COMPLEX, ())": "got complex64; only real numbers",
    "Stiefel().retract(COMPLEX, COMPLEX)": "got complex64; only real numbers",
    "Hypersphere(ndim=2).steepest(COMPLEX, COMPLEX, ())": "got complex64; only real numbers",
    "EmbeddingRows().project(COMPLEX)": "got complex64; only real numbers",
    "Euclidean(Spectral()).steepest(COMPLEX, COMPLEX, ())": "got complex64; only real numbers",
    "muon(0.1, Euclidean()).init({'w': COMPLEX})": "the parameter 'w' has dtype complex64; only",
    "scale_by_budget(2.0).update({'w': COMPLEX}, EmptyState())": "'w' has dtype complex64, not r",
    "manifold_muon('0.1', FLAT)": "manifold_muon: learning_rate must be a finite number in [0, i",
    "manifold_muon(None, FLAT)": "manifold_muon: learning_rate must be a finite number in [0, in",
    "manifold_muon(NAN, FLAT)": "manifold_muon: learning_rate must be a finite number in [0, inf",
    "manifold_muon(-0.1, FLAT)": "manifold_muon: learning_rate must be a finite number in [0, in",
    "manifold_muon(True, FLAT)": "manifold_muon: learning_rate must be a finite number in [0, in",
    "manifold_muon(FLAT, 0.1)": "manifold_muon: learning_rate must be a finite number in [0, inf",
    "manifold_muon(LOGITS, FLAT)": "manifold_muon: learning_rate must be a finite number in [0,",
    "manifold_muon(0.1, 0.1)": "manifold_muon: geometry must be a Manifold, a tree of them, by_p",
    "manifold_muon(0.1, None)": "manifold_muon: geometry must be a Manifold, a tree of them, by_",
    "manifold_muon(0.1, Stiefel)": "manifold_muon: geometry must be a Manifold, a tree of them,",
    "manifold_muon(0.1, {'w': Stiefel})": "the geometry of 'w' is <class 'manifoldmuon.manifolds",
    "manifold_muon(0.1, by_path({'w': 3}))": "the geometry of 'w' is 3, not a Manifold",
    "manifold_muon(0.1, FLAT, 1.5)": "manifold_muon: momentum must be a finite number in [0, 1)",
    "manifold_muon(0.1, FLAT, -0.1)": "manifold_muon: momentum must be a finite number in [0, 1)",
    "manifold_muon(0.1, FLAT, jnp.array(2))": "manifold_muon: momentum must be a finite number i",
    "manifold_muon(0.1, FLAT, clip=-1)": "manifold_muon: clip must be a finite number in (0, inf",
    "manifold_muon(0.1, FLAT, weight_decay='x')": "manifold_muon: weight_decay must be a finite",
    "manifold_muon(0.1, FLAT, nesterov=0.95)": "manifold_muon: nesterov must be a bool; got 0.95",
    "manifold_muon(0.1, FLAT, accumulator_dtype='x')": "manifold_muon: accumulator_dtype must be",
    "manifold_muon(0.1, FLAT, combination=Max)": "manifold_muon: combination must be a Combinati",
    "manifold_muon(0.1, FLAT, budgets='x').init(PARAMS)": "the budget of 'w' is 'x', not a number",
    "manifold_muon(0.1, FLAT, neuron_decay=1)": "manifold_muon: neuron_decay must be a finite nu",
    "muon(0.1, FLAT, weight_decay=-0.1)": "muon: weight_decay must be a finite number in [0, inf",
    "normuon(0.1, FLAT, neuron_decay=2)": "normuon: neuron_decay must be a finite number in [0, 1)",
    "scion(np.float32(3), FLAT)": "scion: learning_rate must be a finite number in [0, 1] or a s",
    "scion(jnp.float32(3), FLAT)": "scion: learning_rate must be a finite number in [0, 1] or a",
    "scion(0.1, FLAT, constrained=1.0)": "scion: constrained must be a bool; got 1.0",
    "modular(0.1, FLAT)": "modular: architecture must have geometry() and budgets(); got Euclide",
    "modular(0.1, Linear)": "modular: architecture must have geometry() and budgets(); got <class",
    "modular(Linear(3, 4), 0.1)": "modular: learning_rate must be a finite number in [0, inf) or",
    "normed(0.1, optax.scale_by_adam, Linear(3, 4))": "normed: base must be a GradientTransforma",
    "normalize(optax.scale_by_adam(), FLAT, iterations=3)": "normalize: iterations must be a Pow",
    "agd(Layout(), 'x')": "agd: gain must be a finite number in [0, inf) or a schedule; got 'x'",
    "agd(0.1).init(PARAMS)": "automatic gradient descent: the entry of 'w' is 0.1, not a Layout",
    "riemannian_adam(0.1, FLAT, b1=1.0)": "riemannian_adam: b1 must be a finite number in [0, 1)",
    "riemannian_adam(0.1, FLAT, b2=-1)": "riemannian_adam: b2 must be a finite number in [0, 1);",
    "riemannian_adam(0.1, FLAT, eps=-1)": "riemannian_adam: eps must be a finite number in [0, i",
    "riemannian_sgd(0.1, FLAT, 2)": "riemannian_sgd: momentum must be a finite number in [0, 1)",
    "scale_by_steepest(0.1)": "scale_by_steepest: geometry must be a Manifold, a tree of them, b",
    "scale_by_steepest(FLAT, 0.95)": "scale_by_steepest: certify must be a bool; got 0.95",
    "scale_by_duality(FLAT, 1.0, 'max')": "scale_by_duality: combination must be a Combination;",
    "scale_by_budget(-1.0).init(PARAMS)": "the budget of 'w' is -1.0; it must be finite and >= 0",
    "scale_by_neuron_rms(FLAT, np.float32(1))": "scale_by_neuron_rms: decay must be a finite num",
    "retract('x')": "retract: geometry must be a Manifold, a tree of them, by_path(...) or a fun",
    "project_tangent(0)": "project_tangent: geometry must be a Manifold, a tree of them, by_path(",
    "cautious(FLAT, FLAT)": "cautious: base must be a GradientTransformation; got Euclidean(",
    "add_cautious_weight_decay(None, FLAT)": "add_cautious_weight_decay: weight_decay must be a",
    "add_decay_towards(0.1, FLAT, None)": "add_decay_towards: sets must be a Manifold, a tree of",
    "with_master_copies(0.1)": "with_master_copies: inner must be a GradientTransformation; got",
    "with_qk_clip(optax.sgd(0.1), FLAT, None, 0)": "with_qk_clip: threshold must be a finite num",
    "with_qk_clip(optax.sgd(0.1), FLAT, None, power=NAN)": "with_qk_clip: power must be a finite",
    "step_by_distance(FLAT, first=0)": "step_by_distance: first must be a finite number in (0, i",
    "step_by_line_search(FLAT, max_trials=2.5)": "step_by_line_search: max_trials must be a whol",
    "step_by_line_search(FLAT, shrink=True)": "step_by_line_search: shrink must be a finite numb",
    "step_by_rule(DeepTrust)": "step_by_rule: rule must be a StepRule; got <class",
    "chain(0.1)": "chain: link 0 of 1 must be a GradientTransformation; got 0.1",
    "chain(optax.trace, retract(FLAT))": "chain: link 0 of 2 must be a GradientTransformation; g",
    "check_chain(optax.sgd(0.1), FLAT, PARAMS, steps=0)": "check_chain: steps must be a whole nu",
    "normalize(optax.scale_by_adam(), FLAT, 'x').init(PARAMS)": "the budget of 'w' is 'x', not a",
    "scale_by_duality(FLAT, -1.0).init(PARAMS)": "the budget of 'w' is -1.0; it must be finite and",
    "by_path('w')": "by_path takes a dictionary of patterns and values; got 'w'",
    "margin_cross_entropy(COMPLEX, LABELS, 1, 1)": "margin_cross_entropy: logits must be floating",
    "margin_cross_entropy(LOGITS, LOGITS, 1, 1)": "margin_cross_entropy: labels must be whole numb",
    "margin_cross_entropy(LOGITS, LABELS[:2], 1, 1)": "margin_cross_entropy: logits (..., classes)",
    "margin_cross_entropy(LOGITS[:, :1], LABELS, 1, 1)": "margin_cross_entropy: logits (..., class",
    "margin_cross_entropy(LOGITS, LABELS, -1, 1)": "margin_cross_entropy: offset must be a finite",
    "margin_cross_entropy(LOGITS, LABELS, 1, 0)": "margin_cross_entropy: temperature must be above",
    "multiclass_hinge(LOGITS, LABELS, -0.5)": "multiclass_hinge: margin must be a finite number",
    "multiclass_hinge(LOGITS[0], LABELS, 1)": "multiclass_hinge: logits (..., classes), two class",
}

# Numbers that the annotations of Optax leave out.
ACCEPTED = [
    f"manifold_muon({number}, FLAT, {momentum}, clip={number}, weight_decay={number})"
    for number in ("1", "np.float32(0.5)", "np.int32(1)", "np.array(0.5)", "jnp.array(1)")
    for momentum in ("0", "np.float16(0.5)")
]

CODE = """
import json, math, sys
import jax.numpy as jnp
import numpy as np
import optax
from manifoldmuon.bounds import *
from manifoldmuon.contrib import *
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
NAN, FLAT, PARAMS = math.nan, Euclidean(), {'w': jnp.ones((3, 2))}
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
    command, asked = [sys.executable, "-c", CODE], json.dumps([*CASES, *ACCEPTED])
    done = subprocess.run(command, input=asked, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES)
def test_wrong_kinds_are_refused(case, messages):
    assert messages[case].startswith(CASES[case])


@pytest.mark.parametrize("case", ACCEPTED)
def test_numbers_are_accepted(case, messages):
    assert messages[case].startswith("LastLink(init=<function")
