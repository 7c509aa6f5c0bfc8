"""Invalid arguments raise when they are passed, not in the first training step.

Their messages name the argument and what arrived, in one line.
"""

# ruff: noqa: F403, F405
# pyright: reportArgumentType=false, reportOperatorIssue=false

import math
from collections.abc import Callable
from typing import Any

import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import config

from manifoldmuon.bounds import *
from manifoldmuon.contrib import *
from manifoldmuon.frameworks import linen, nnx
from manifoldmuon.frameworks.muon import geometry as from_numbers
from manifoldmuon.linalg import *
from manifoldmuon.manifolds import *
from manifoldmuon.manifolds.retractions import *
from manifoldmuon.manifolds.solvers import *
from manifoldmuon.minimize import *
from manifoldmuon.modules import *
from manifoldmuon.norms import *
from manifoldmuon.optim import *
from manifoldmuon.robustness import *
from tests.instances import MANIFOLDS

KEY, NAN = jax.random.key(0), math.nan
FLAT, MATRIX = Euclidean(), Hypersphere(ndim=2)
BLOCKS = Euclidean(RMSToRMS()).with_axes(1, 0, out_blocks=(2, 1))
PARAMS = {"w": jnp.ones((3, 2))}
NUMBERS = optax.contrib.MuonDimensionNumbers((0,), (1, -2))
LOGITS, LABELS = jnp.ones((3, 4)), jnp.arange(3)
DENSE = flax.nnx.Linear(3, 4, rngs=flax.nnx.Rngs(0))
COMPLEX = jnp.ones((3, 2), jnp.complex64)
UNIT = np.eye(3, dtype=np.float32)[0]

# Calls, and the beginning of their messages.
# fmt: off
REFUSED: tuple[tuple[Callable[[], Any], str], ...] = (
    (lambda: msign(COMPLEX), "complex numbers are not supported; got complex64. Keep real and"),
    (lambda: msign(jnp.ones(3)), "msign takes matrices in the trailing two axes; got an array of"),
    (lambda: msign(jnp.ones((2, 2), jnp.int32)), "expected floating-point numbers; got int32"),
    (lambda: msign(jnp.ones((2, 2)), MUON), "method must be a MsignMethod: write"),
    (lambda: msign(jnp.ones((2, 2)), SVD), "method must be a MsignMethod such as SVD(); got"),
    (lambda: clip_singular_values(jnp.eye(2), -1.0), "clip_singular_values(upper) must be a"),
    (lambda: inverse_sqrt(jnp.eye(2), SVD()), "schedule must be a Schedule such as"),
    (lambda: power_iteration(jnp.eye(2), jnp.ones(2), steps=-1), "steps must not be negative; got"),
    (lambda: NewtonSchulz(SVD()), "NewtonSchulz.schedule must be a Schedule such as"),
    (lambda: NewtonSchulz(MUON, precision="high"), "NewtonSchulz.precision must be a"),
    (lambda: NewtonSchulz(MUON, operands="int8"), "NewtonSchulz.operands must be a floating dtype"),
    (lambda: NewtonSchulz(MUON, frobenius=1.0), "NewtonSchulz.frobenius must be True or False;"),
    (lambda: PolarExpress("x"), "PolarExpress.lower must be a finite number in [1e-12, 1); got"),
    (lambda: PolarExpress(1e-3, 5.0), "PolarExpress.degree must be a whole number in [3, inf);"),
    (lambda: PolarExpress(1e-3, 4), "PolarExpress.degree must be odd; got 4"),
    (lambda: PolarExpress(1e-3, steps=0), "PolarExpress.steps must be a whole number in [1, inf);"),
    (lambda: PolarExpress(1e-3, safety=0.9), "PolarExpress.safety must be a finite number in [1,"),
    (lambda: PolarExpress(1e-3, cushion=0.5), "PolarExpress.cushion must be a finite number in"),
    (lambda: PolarExpress(1e-3, contract="no"), "PolarExpress.contract must be True or False; got"),
    (lambda: FixedSchedule(), "a schedule needs steps; got steps=None and a head of 0"),
    (lambda: FixedSchedule((1.5, -0.5)), "a step is a tuple of two coefficients (degree 3) or"),
    (lambda: FixedSchedule([(1.5, -0.5)]), "FixedSchedule.head must be a tuple of steps; got"),
    (lambda: FixedSchedule(((1.0,),)), "a step is a tuple of two coefficients (degree 3) or more;"),
    (lambda: FixedSchedule(((1.5, NAN),)), "a coefficient of FixedSchedule must be a finite"),
    (lambda: FixedSchedule(((1.5, -0.5),), steps=2), "steps=2 exceeds the 1 polynomials of a"),

    (lambda: Spectral(MUON), "Spectral.method must be a MsignMethod: write"),
    (lambda: ConvRMSToRMS("svd"), "ConvRMSToRMS.method must be a MsignMethod such as SVD(); got"),
    (lambda: Frobenius(-1), "Frobenius.ndim must be a whole number in [0, inf); got -1"),
    (lambda: MaxAbs(1.0), "MaxAbs.ndim must be a whole number in [0, inf); got 1.0"),
    (lambda: MaxRowNorm(threshold=-1e-06), "MaxRowNorm.threshold must be a finite number in [0,"),
    (lambda: PowerIterations(1.5), "PowerIterations.warm must be a whole number in [1, inf); got"),
    (lambda: FanRatio(-1), "FanRatio.gain must be a finite number in (0, inf); got -1"),
    (lambda: RootDim(True), "RootDim.gain must be a finite number in (0, inf); got True"),
    (lambda: RootRank(-1.0), "RootRank.each must be a finite number in (0, inf) or a ScaleRule;"),

    (lambda: Stiefel(0.0), "Stiefel.scale must be a finite number in (0, inf) or a ScaleRule; got"),
    (lambda: Stiefel(True), "Stiefel.scale must be a finite number in (0, inf) or a ScaleRule;"),
    (lambda: Stiefel(retraction=QR), "Stiefel.retraction must be a Retraction of orthonormal"),
    (lambda: Stiefel(solver="x"), "Stiefel.solver must be a StiefelSolver; got 'x'"),
    (lambda: Stiefel(step_norm=MaxAbs()), "Stiefel.step_norm must be a Spectral or Frobenius; got"),
    (lambda: Stiefel(step_norm=Frobenius(1)), "Stiefel.step_norm must be for 2 axes; got"),
    (lambda: Stiefel(step_norm=Spectral(SVD())), "Stiefel.step_norm names a method of msign, but"),
    (lambda: Stiefel().check_shape((5,)), "Stiefel needs at least 2 axes; got the shape (5,)."),
    (lambda: Stiefel().random_point(KEY, (5,), jnp.float32), "Stiefel needs at least 2 axes; got"),
    (lambda: Stiefel().project(COMPLEX), "complex numbers are not supported; got complex64."),
    (lambda: Stiefel().project_tangent(COMPLEX, COMPLEX), "complex numbers are not supported; got"),
    (lambda: Stiefel().steepest(np.eye(4, 3), np.eye(3, 4)), "Stiefel.steepest: grad has the"),
    (lambda: Stiefel().project_tangent(np.eye(3), np.eye(2)), "Stiefel.project_tangent: vector"),
    (lambda: Euclidean().retract(point=UNIT, vector=np.eye(3)), "Euclidean.retract: vector has"),
    (lambda: Stiefel().steepest(COMPLEX, COMPLEX, ()), "complex numbers are not supported; got"),
    (lambda: Stiefel().retract(COMPLEX, COMPLEX), "complex numbers are not supported; got"),
    (lambda: Orthogonal(NAN), "Orthogonal.scale must be a finite number in (0, inf) or a"),
    (lambda: Orthogonal(solver=ProjectedPolar), "Orthogonal.solver must be a StiefelSolver; got"),
    (lambda: Orthogonal(step_norm=Spectral(SVD())), "Orthogonal.step_norm names a method of"),
    (lambda: Orthogonal().check_shape((4, 3)), "Orthogonal takes square matrices in the trailing"),
    (lambda: Grassmann(-1.0), "Grassmann.scale must be a finite number in (0, inf) or a"),
    (lambda: Grassmann(retraction=Clip()), "Grassmann.retraction must be a Retraction of"),
    (lambda: Grassmann().check_shape((4, 4)), "Grassmann takes rectangular matrices; got the"),
    (lambda: ComplexStiefel(retraction=QR()), "ComplexStiefel.retraction must not be QR():"),
    (lambda: ComplexStiefel().check_shape((3, 4, 4)), "ComplexStiefel takes real and imaginary"),
    (lambda: Hypersphere(-2.0), "Hypersphere.scale must be a finite number in (0, inf) or a"),
    (lambda: Hypersphere(ndim=1.0), "Hypersphere.ndim must be a whole number in [1, inf); got 1.0"),
    (lambda: Hypersphere(step_norm=1.0), "Hypersphere.step_norm must be a Norm; got 1.0"),
    (lambda: Hypersphere(ndim=2, step_norm=Frobenius(1)), "Hypersphere.step_norm must be for 2"),
    (lambda: Hypersphere(retraction=Geodesic), "Hypersphere.retraction must be a Retraction of"),
    (lambda: Hypersphere().check_shape(()), "Hypersphere needs at least 1 axes; got the shape ()"),
    (lambda: Hypersphere().with_axes(0, 1), "a layout arranges matrices, but a point of"),
    (lambda: Hypersphere(ndim=2).steepest(COMPLEX, COMPLEX, ()), "complex numbers are not"),
    (lambda: EmbeddingRows(step_norm=Frobenius(1)), "EmbeddingRows.step_norm must be for 2 axes;"),
    (lambda: EmbeddingRows(solver=LineMultiplier()), "EmbeddingRows.solver must be a"),
    (lambda: SpectralSphere(-1.0), "SpectralSphere.scale must be a finite number in (0, inf) or a"),
    (lambda: SpectralSphere(lanczos=True), "SpectralSphere.lanczos must be a whole number in [1,"),
    (lambda: SpectralSphere(step_norm=Frobenius(1)), "SpectralSphere.step_norm must be for 2"),
    (lambda: SpectralBall(step_norm=1.0), "SpectralBall.step_norm must be a Norm; got 1.0"),
    (lambda: SpectralBall(solver=SVD()), "SpectralBall.solver must be a DouglasRachford or None;"),
    (lambda: SpectralBall(active_tolerance="x"), "SpectralBall.active_tolerance must be a finite"),
    (lambda: SpectralBand(2.0, 0.5), "SpectralBand takes low + 4 * active_tolerance < high; got"),
    (lambda: SpectralBand(1.0, 1.0), "SpectralBand takes low + 4 * active_tolerance < high; got"),
    (lambda: SpectralBand(0.0, 1.0), "SpectralBand.low must be positive; without it take"),
    (lambda: SpectralBand(retraction=Polar()), "SpectralBand.retraction must be a Clip; got"),
    (lambda: Euclidean(RMSToRMS), "Euclidean.step_norm must be a Norm; got <class"),
    (lambda: Euclidean(Spectral()).check_shape((7,)), "Euclidean needs at least 2 axes; got the"),
    (lambda: Euclidean(Spectral()).steepest(COMPLEX, COMPLEX, ()), "complex numbers are not"),
    (lambda: low_rank((4, 3), 1.5), "low_rank: rank must be a whole number; got 1.5"),
    (lambda: low_rank((4, 6), 5), "low_rank takes a shape (m, n) and a rank from 1 to"),
    (lambda: low_rank(4, 2), "low_rank takes a shape (m, n) and a rank"),
    (lambda: Layout(out_blocks=4).inner_shape((6, 8)), "out_blocks=4 does not divide the fan of 6"),
    (lambda: Orthogonal().project(np.ones((5, 3))), "Orthogonal takes square matrices in the"),
    (lambda: Orthogonal().distance(np.ones(5)), "Orthogonal needs at least 2 axes"),
    (lambda: Hypersphere(FanRatio()).project(UNIT), "FanRatio() is for matrices; got the shape"),
    (lambda: inverse_sqrt(jnp.ones((2, 3))), "inverse_sqrt(gram) takes square matrices in the"),
    (lambda: low_rank((4, 6), 2, "W"), "low_rank: zero must be 'A' or 'B', the factor that is 0;"),
    (lambda: Stiefel().stacked(-1), "stacked(axes) must be a whole number in [0, inf); got -1"),
    (lambda: Stiefel().transposed().stacked(0.5), "stacked(axes) must be a whole number in [0,"),
    (lambda: ConvRMSToRMS(tap_axes=0), "ConvRMSToRMS.tap_axes must be a whole number in [1, inf);"),
    (lambda: nnx.geometry(DENSE, Euclidean(ConvRMSToRMS())), "geometry: 'kernel' is a matrix, but"),

    (lambda: SkewPolar(MUON), "SkewPolar.method must be a MsignMethod: write"),
    (lambda: SkewPolar(schedule=SVD()), "SkewPolar.schedule must be a Schedule such as"),
    (lambda: SkewPolar(precision=1), "SkewPolar.precision must be a jax.lax.Precision such as"),
    (lambda: ProjectedPolar(SVD()), "ProjectedPolar.schedule must be a Schedule such as"),
    (lambda: ProjectedPolar(precision=1), "ProjectedPolar.precision must be a jax.lax.Precision"),
    (lambda: DualAscent(-0.3), "DualAscent.step must be a finite number in (0, inf); got -0.3"),
    (lambda: DualAscent(method=MUON), "DualAscent.method must be a MsignMethod: write"),
    (lambda: DualAscent(relative=None), "DualAscent.relative must be True or False; got None"),
    (lambda: Resolvents(0), "Resolvents.poles must be a whole number in [1, inf); got 0"),
    (lambda: LineMultiplier(steps=0), "LineMultiplier.steps must be a whole number in [1, inf);"),
    (lambda: BarzilaiBorwein(cold_start_steps=-1), "BarzilaiBorwein.cold_start_steps must be a"),

    (lambda: Layout(0, 0), "in_axes=0, out_axes=0 name the same axis twice in an array of 2 axes"),
    (lambda: Layout((0, 1), 1), "in_axes=(0, 1), out_axes=1 name the same axis twice in an array"),
    (lambda: Layout(0, 1, taps=(1, 2)), "in_axes=0, out_axes=1, taps=(1, 2) name the same axis"),
    (lambda: Layout(0, 1, taps="ab"), "taps must be an axis number or several; got 'ab'"),
    (lambda: Layout(0, -1), "in_axes=0, out_axes=-1 mix positive and negative axis numbers;"),
    (lambda: Layout(0, 3, ndim=3), "ndim=3 is too small: in_axes=0, out_axes=3 need 4"),
    (lambda: Layout((), 1), "in_axes must be an axis number or several; got ()"),
    (lambda: Layout(in_blocks=2.0), "Layout.in_blocks must be a whole number in [1, inf); got 2.0"),
    (lambda: Layout(out_blocks=()), "Layout.out_blocks must be a whole number in [1, inf); got 0"),
    (lambda: Layout(out_blocks=(2, 0)), "Layout.out_blocks: a length must be a whole number in"),
    (lambda: Layout(1, (0, 2), out_blocks=(1, 2)), "lengths as out_blocks=(1, 2) need a single"),
    (lambda: Layout(out_blocks=(2, 3)).inner_shape((5, 4)), "here out_blocks must be a number of"),
    (lambda: Layout.from_muon(None), "dims is None: optax.contrib.muon leaves such a parameter to"),
    (lambda: LaidOut(Stiefel, Layout()), "LaidOut.manifold must be a Manifold; got <class"),
    (lambda: LaidOut(Stiefel(), 2), "LaidOut.layout must be a Layout; got 2"),
    (lambda: LaidOut(Stiefel(), Layout(out_blocks=5)).check_shape((12, 4)),
     "out_blocks=5 does not divide the"),
    (lambda: Stiefel().with_axes(0, (1, 2)).check_shape((4, 5)), "in_axes=(-3,), out_axes=(-2,"),
    (lambda: Stiefel().with_axes(1, 0).check_shape((8, 4, 3, 3)), "axis numbers from the front"),
    (lambda: Orthogonal().with_axes(0, (1, 2)).check_shape((4, 2, 3)), "Orthogonal takes square"),

    (lambda: Linear(2.5, 3), "Linear.fan_out must be a whole number in [1, inf); got 2.5"),
    (lambda: Linear(3, True), "Linear.fan_in must be a whole number in [1, inf); got True"),
    (lambda: Linear(3, 4, Stiefel().transposed()), "Linear.manifold must be a Manifold; got"),
    (lambda: LocallyConnected((2.0,), 3, 3), "LocallyConnected.places must be a whole number in"),
    (lambda: Embed(0, 3), "Embed.dim must be a whole number in [1, inf); got 0"),
    (lambda: Unembed("3", 3), "Unembed.vocabulary must be a whole number in [1, inf); got '3'"),
    (lambda: Conv2D(3, 3, 2.5), "Conv2D.kernel must be a whole number in [1, inf); got 2.5"),
    (lambda: Conv2D(3, 3, stride=1.5), "Conv2D.stride must be a whole number in [1, inf); got 1.5"),
    (lambda: Conv2D(3, 3, padding=0.5), "Conv2D.padding must be a whole number in [0, inf); got"),
    (lambda: Bias(2.5), "Bias.features must be a whole number in [1, inf); got 2.5"),
    (lambda: TwoTap(4, 1.5), "TwoTap.rank must be a whole number in [1, inf); got 1.5"),
    (lambda: TwoTap(4, 2, axis=-2.0), "TwoTap.axis must be a whole number in [-3, -2]; got -2.0"),
    (lambda: Stack(Abs(), 2.5), "Stack.copies must be a whole number in [1, inf); got 2.5"),
    (lambda: SplitHeads(2.5), "SplitHeads.heads must be a whole number in [1, inf); got 2.5"),
    (lambda: AveragePool(2.5), "AveragePool.rows must be a whole number in [1, inf); got 2.5"),
    (lambda: AveragePool(1, 2.5), "AveragePool.columns must be a whole number in [1, inf); got"),
    (lambda: Flatten(2.5), "Flatten.axes must be a whole number in [1, inf); got 2.5"),
    (lambda: GroupSort(2.5), "GroupSort.size must be a whole number in [1, inf); got 2.5"),
    (lambda: SpaceToDepth(2.5), "SpaceToDepth.side must be a whole number in [1, inf); got 2.5"),
    (lambda: Shift(0.5), "Shift.pixels must be a whole number; got 0.5"),
    (lambda: orthogonal_conv2d(4, 2.5), "orthogonal_conv2d(kernel) must be a whole number in [1,"),
    (lambda: mlp(3, 4, 5, 2.5), "mlp(depth) must be a whole number in [2, inf); got 2.5"),
    (lambda: residual(Abs(), 2.5), "residual(blocks) must be a whole number in [1, inf); got 2.5"),
    (lambda: attention(6, 2.5), "attention(heads) must be a whole number in [1, inf); got 2.5"),
    (lambda: gpt(5, 6, 2, 1.5), "gpt(blocks) must be a whole number in [1, inf); got 1.5"),
    (lambda: Param("a", Stiefel(), ndim=2.5), "Param.ndim must be a whole number in [0, inf); got"),
    (lambda: Tied(Linear(3, 3) @ Linear(3, 3), (0, 1.0)), "an index of Tied.places must be a"),
    (lambda: Linear(3, 4, Hypersphere(ndim=3)), "Linear.manifold: Hypersphere needs at least"),
    (lambda: Linear(3, 4, mass=-1.0), "Linear.mass must be a finite number in [0, inf); got -1.0"),
    (lambda: Linear(3, 4).apply(jnp.ones((3, 4)), jnp.ones(3)), "Linear takes inputs (..., 4"),
    (lambda: Linear(3, 4).norm((jnp.ones((3, 4)),)), "Linear: expected a tree of the structure"),
    (lambda: Linear(3, 4).tare(-1.0), "tare(absolute) must be a finite number in [0, inf); got"),
    (lambda: Linear(3, 4, mass=0.0).tare(1.0), "no factor brings a mass of 0 to 1.0; give an atom"),
    (lambda: Linear(3, 4) @ "no", "unsupported operand type(s) for @: 'Linear' and 'str'"),
    (lambda: Linear(3, 4) @ (Abs(), "no"), "expected a module or a non-empty tuple of modules;"),
    (lambda: Linear(3, 4) @ (), "expected a module or a non-empty tuple of modules; got ()"),
    (lambda: Linear(3, 4) * 2, "module * number is not defined, as modula scales the input by it:"),
    (lambda: Linear(3, 4) ** -1, "a power is a whole number of copies, 0 or more; got -1"),
    (lambda: Linear(3, 4) ** 2.5, "unsupported operand type(s) for ** or pow(): 'Linear' and"),
    (lambda: Linear(3, 4) ** True, "unsupported operand type(s) for ** or pow(): 'Linear' and"),
    (lambda: NAN * Linear(3, 4), "Mul.factor must be a finite number; got nan"),
    (lambda: LocallyConnected((), 3, 3), "LocallyConnected.places must be a nonempty tuple"),
    (lambda: LocallyConnected((4,), 2, 3).apply(jnp.ones((4, 2, 3)), jnp.ones((3, 3))),
     "LocallyConnected takes"),
    (lambda: Embed(2, 3).apply(jnp.ones((3, 2)), jnp.ones(4)), "Embed takes whole numbers; got an"),
    (lambda: Conv2D(2, 3).apply(jnp.ones((3, 3, 2, 3)), jnp.ones((4, 3))),
     "Conv2D takes (..., height, width,"),
    (lambda: Bias(3).apply(jnp.ones(3), jnp.ones(4)), "Bias takes inputs (..., 3 entries); got"),
    (lambda: TwoTap(4, 4), "TwoTap.rank must be less than the 4 channels; got 4"),
    (lambda: TwoTap(4, 2, axis=-3).apply(jnp.ones((4, 2)), jnp.ones((3, 4))),
     "TwoTap shifts along axis -3; got"),
    (lambda: SplitHeads(4).forward(jnp.ones((2, 6))), "6 features do not split into 4 heads"),
    (lambda: AveragePool(3, 3).forward(jnp.ones((4, 6, 3))), "an image of 4 by 6 pixels does not"),
    (lambda: Flatten(4).forward(jnp.ones((2, 3))), "Flatten takes at least 4 axes; got the shape"),
    (lambda: GroupSort(4).forward(jnp.ones(6)), "6 features do not fall into groups of 4"),
    (lambda: SpaceToDepth(2).forward(jnp.ones((3, 4, 1))), "SpaceToDepth takes (..., height,"),
    (lambda: Shift().forward(jnp.ones((3, 5))), "Shift takes (..., height, width, channels); got"),
    (lambda: RoPE(base=0.5), "RoPE.base must be a finite number in [1, inf); got 0.5"),
    (lambda: RoPE().forward(jnp.ones((4, 5))), "RoPE turns pairs of entries; got 5, an odd number"),
    (lambda: ReLU(sensitivity=-1.0), "ReLU.sensitivity must be a finite number in [0, inf); got"),
    (lambda: orthogonal_conv2d(1, 3), "TwoTap.rank must be a whole number in [1, inf); got 0"),
    (lambda: ExternalModule(Param("a/b", FLAT) @ Param("a", FLAT)), "Param 'a/b' is inside"),
    (lambda: ExternalModule(Param("a", FLAT) @ Param("a/b", FLAT)), "Param 'a' contains other"),
    (lambda: ExternalModule(Param("a", FLAT) @ Param("a", MATRIX)), "weights at 'a' must agree in"),
    (lambda: ExternalModule(Param("a", FLAT) @ Param("a", FLAT) ** 2), "weights at 'a' must agree"),
    (lambda: ExternalModule(Param("a", FLAT), unused="b"), "ExternalModule(unused) must be a"),
    (lambda: ExternalModule(Param("a", FLAT, mass=0.0) @ Param("a", FLAT)),
     "weights at 'a' are frozen together"),
    (lambda: Param("a", FLAT, mass=-1.0), "Param.mass must be a finite number in [0, inf); got"),
    (lambda: Param("a", None), "Param.manifold must be a Manifold or LaidOut; got None"),
    (lambda: Param("a", Stiefel), "Param.manifold must be a Manifold or LaidOut; got <class"),
    (lambda: Param(("a", "b"), FLAT), "Param.path must be a str; got ('a', 'b')"),
    (lambda: Param("a", FLAT, atom=ReLU()), "Param.atom must be a Atom or None; got ReLU("),
    (lambda: Param("a", MATRIX, ndim=1), "Param.ndim is 1, but a point of the manifold of 'a'"),
    (lambda: Param("a", FLAT).constrained(), "Param 'a' on Euclidean has no default constraint:"),
    (lambda: (Param("a", Stiefel()) @ ReLU() @ Param("b", FLAT)).constrained(),
     "Param 'b' on Euclidean has no"),
    (lambda: Param("a", FLAT).init(KEY), "Param 'a' on Euclidean has no weight of its own: the"),
    (lambda: (Param("a", FLAT) @ ReLU()).apply(((), None), jnp.ones(2)), "Param 'a' on Euclidean"),
    (lambda: Tied(Linear(3, 3) @ Linear(3, 3), (0,)), "Tied takes two different places at least;"),
    (lambda: Tied(Linear(4, 3) @ Linear(3, 3), (0, 1)), "tied weights must agree in shape; got"),
    (lambda: Tied(Linear(3, 3) @ Linear(3, 3).tare(0.0), (0, 1)), "weights tied at (0, 1) are"),
    (lambda: L2(1.5), "L2.axes must be a whole number in [1, inf); got 1.5"),
    (lambda: RMS(2.5), "RMS.heads must be a whole number in [1, inf); got 2.5"),
    (lambda: NormBound(1.0, features=2.5), "NormBound.features must be a whole number in [1,"),
    (lambda: NormBound("a"), "NormBound.upper must be a finite number in [0, inf); got 'a'"),
    (lambda: matrix_bounds(Stiefel(), (3, 4), -0.5), "matrix_bounds: drift must be a finite"),
    (lambda: matrix_bounds(SpectralBall(), (3, 4), NAN), "matrix_bounds: drift must be a finite"),
    (lambda: matrix_bounds(Euclidean(), (3, 4), -1), "matrix_bounds: drift must be a finite"),
    (lambda: matrix_bounds(Stiefel(), (3,)), "matrix_bounds: shape: its length must be a finite"),
    (lambda: matrix_bounds(Spectral(), ()), "matrix_bounds: shape: its length must be a finite"),
    (lambda: bound(ExternalModule(Param("a", Stiefel()))), "bound(params) is missing: an"),
    (lambda: jax.jit(lambda w: bound(Linear(1, 2), w).lipschitz_inputs)(jnp.ones((2, 1))),
     "bound(params) computes in float64 by NumPy: call it outside of jax.jit"),
    (lambda: rules.then(lambda *_: (1.0, {}))(FLAT, UNIT, UNIT, {}), "<function"),
    (lambda: bound(Abs(), input_norm="1"), "bound(input_norm) must be a Python number >="),

    (lambda: manifold_muon("0.1", FLAT), "manifold_muon: learning_rate must be a finite number in"),
    (lambda: manifold_muon(NAN, FLAT), "manifold_muon: learning_rate must be a finite number in"),
    (lambda: manifold_muon(True, FLAT), "manifold_muon: learning_rate must be a finite number in"),
    (lambda: manifold_muon(FLAT, 0.1), "manifold_muon: learning_rate must be a finite number in"),
    (lambda: manifold_muon(optax.adam, FLAT), "manifold_muon: learning_rate must be a finite"),
    (lambda: manifold_muon(lambda count: jnp.ones(1), FLAT),
     "manifold_muon: learning_rate must return a single number; got an array of shape (1,)"),
    (lambda: manifold_muon(0.1, 0.1), "manifold_muon: geometry must be a Manifold, a tree of"),
    (lambda: manifold_muon(0.1, Stiefel), "manifold_muon: geometry must be a Manifold, a tree of"),
    (lambda: manifold_muon(0.1, {"w": Stiefel}), "the geometry of 'w' is <class"),
    (lambda: manifold_muon(0.1, by_path({"w": 3})), "the geometry of 'w' is 3, not a Manifold."),
    (lambda: manifold_muon(0.1, FLAT, 1.5), "manifold_muon: momentum must be a finite number in"),
    (lambda: manifold_muon(0.1, FLAT, jnp.array(2)), "manifold_muon: momentum must be a finite"),
    (lambda: manifold_muon(0.1, FLAT, clip=-1), "manifold_muon: clip must be a finite number in"),
    (lambda: manifold_muon(0.1, FLAT, weight_decay="x"), "manifold_muon: weight_decay must be a"),
    (lambda: manifold_muon(0.1, FLAT, nesterov=0.95), "manifold_muon: nesterov must be a bool;"),
    (lambda: manifold_muon(0.1, FLAT, accumulator_dtype="x"), "manifold_muon: accumulator_dtype"),
    (lambda: muon(0.1, FLAT, accumulator_dtype="float8_e4m3fn"), "muon: accumulator_dtype must be"),
    (lambda: manifold_muon(0.1, FLAT, budgets="x").init(PARAMS), "the budget of 'w' is 'x', not a"),
    (lambda: descend(0.1, 0.1), "descend: geometry must be a Manifold, a tree of them,"),
    (lambda: muon(0.1, FLAT, method=MUON), "muon: method must be a MsignMethod: write"),
    (lambda: muon(0.1, FLAT, weight_decay=optax.scale(1.0)), "muon: weight_decay must be a finite"),
    (lambda: muon(0.1, FLAT).init({"w": COMPLEX}), "the parameter 'w' has dtype complex64; only"),
    (lambda: muon(0.1, FLAT).init({"w": jnp.zeros((3, 2), jnp.float8_e4m3fn)}),
     "the parameter 'w' has dtype"),
    (lambda: muon(0.1, Stiefel()).init(PARAMS), "muon is for flat space, but ['w'] have"),
    (lambda: manifold_muon(0.1, FLAT, rest=0.1), "manifold_muon: rest must be a"),
    (lambda: muon(0.1, FLAT, rest=optax.adam), "muon: rest must be a GradientTransformation; got"),
    (lambda: muonh(0.1, FLAT, rest=0.1), "muonh: rest must be a GradientTransformation; got 0.1"),
    (lambda: muonh(0.1, FLAT, method="x"), "muonh: method must be a MsignMethod such as SVD();"),
    (lambda: hyperball(optax.sgd(0.1), 0.1, FLAT).init(PARAMS), "hyperball(base) must ascend,"),
    (lambda: hyperball(optax.adam, 0.1, MATRIX), "hyperball: base must be a"),
    (lambda: hyperball(optax.identity(), -1, MATRIX), "hyperball: learning_rate must be a finite"),
    (lambda: hyperball(optax.identity(), 0.1, MATRIX, radial=1.5), "hyperball: radial must be a"),
    (lambda: keep_norms(Stiefel()).init(jnp.eye(3)), "keep_norms: the geometry of '' must be"),
    (lambda: keep_norms(MATRIX, radius=-1.0).init(jnp.eye(3)), "keep_norms: the radius of '' must"),
    (lambda: keep_norms(MATRIX, radius=jnp.ones(())).init(jnp.eye(3)), "keep_norms: the radius of"),
    (lambda: muonh(0.1, Hypersphere()).init({"w": UNIT}), "muonh takes matrices, and ['w'] have"),
    (lambda: muon(0.1, by_path({"w": BLOCKS, "*/1": FLAT})).init(PARAMS | {"w/1": jnp.eye(3)}),
     "the parameter paths ['w/1'] occur more than once: rename a key."),
    (lambda: muon(0.1, FLAT).init({"a": PARAMS, "a/w": jnp.eye(3)}), "the parameter paths ['a/w']"),
    (lambda: muon(0.1, BLOCKS).init({"w": jnp.ones((4, 2))}), "the parameter 'w': out_blocks=(2,"),
    (lambda: normuon(0.1, FLAT, neuron_decay=2), "normuon: neuron_decay must be a finite number"),
    (lambda: modular(0.1, FLAT), "modular: architecture must have geometry() and budgets(); got"),
    (lambda: modular(Linear(3, 4), 0.1), "modular: learning_rate must be a finite number in [0,"),
    (lambda: normed(0.1, optax.scale_by_adam, Linear(3, 4)), "normed: base must be a"),
    (lambda: normalize(optax.scale_by_adam(), FLAT, iterations=3), "normalize: iterations must be"),
    (lambda: normalize(optax.scale_by_adam(), FLAT, "x").init(PARAMS), "the budget of 'w' is 'x',"),
    (lambda: normalize(optax.adam(0.1), FLAT).init(PARAMS), "normalize(base) must ascend, without"),
    (lambda: normalize(optax.contrib.muon(0.1), FLAT).init(PARAMS), "normalize(base) must ascend,"),
    (lambda: normalize(optax.lion(0.1), FLAT).init(PARAMS), "normalize(base) must ascend, without"),
    (lambda: agd(Layout(), "x"), "agd: gain must be a finite number in [0, inf) or a schedule;"),
    (lambda: agd(0.1).init(PARAMS), "automatic gradient descent: the entry of 'w' is 0.1, not a"),
    (lambda: agd(Layout()).init({"w": jnp.ones((2, 2), jnp.int32)}), "automatic gradient descent:"),
    (lambda: agd(Layout()).init({"s": jnp.ones(())}), "'s': in_axes=(-1,), out_axes=(-2,) take an"),
    (lambda: agd(Layout()).init({"b": jnp.ones(3)}), "'b': in_axes=(-1,), out_axes=(-2,) take an"),
    (lambda: agd(Layout(taps=(-4, -3))).init(PARAMS), "'w': in_axes=(-1,), out_axes=(-2,),"),
    (lambda: agd({"v": Layout()}).init(PARAMS), "layouts has no entry for the parameter 'w'; the"),
    (lambda: init_semi_orthogonal(Layout(), KEY, {"b": jnp.ones(3)}),
     "'b': in_axes=(-1,), out_axes=(-2,) take"),
    (lambda: riemannian_adam(0.1, FLAT, b1=1.0), "riemannian_adam: b1 must be a finite number in"),
    (lambda: riemannian_adam(0.1, FLAT, eps=-1), "riemannian_adam: eps must be a finite number in"),
    (lambda: riemannian_sgd(0.1, FLAT, 2), "riemannian_sgd: momentum must be a finite number in"),
    (lambda: riemannian_sgd(optax.scale_by_learning_rate, FLAT), "riemannian_sgd: learning_rate"),
    (lambda: scale_by_steepest(0.1), "scale_by_steepest: geometry must be a Manifold, a tree of"),
    (lambda: scale_by_steepest(FLAT, 0.95), "scale_by_steepest: track_gap must be a bool; got"),
    (lambda: scale_by_budget(2.0).update({"w": COMPLEX}, optax.EmptyState()),
     "'w' has dtype complex64, not real"),
    (lambda: scale_by_budget({"w": NAN}).init(PARAMS), "the budget of 'w' is nan; it must be"),
    (lambda: scale_by_budget({"w": True}).init(PARAMS), "the budget of 'w' is True, not a number."),
    (lambda: scale_by_budget({"v": 1.0}).init(PARAMS), "budgets has no entry for the parameter"),
    (lambda: scale_by_budget(lambda path, leaf: None).init(PARAMS), "the budget of 'w' is None,"),
    (lambda: scale_by_budget({"w": np.ones((3, 1, 1))}).init(PARAMS),
     "the budget of 'w' has shape (3, 1, 1),"),
    (lambda: scale_by_budget({"w": np.array([[-1.0]])}).init(PARAMS),
     "the budget of 'w' is [[-1.]]; it must be"),
    (lambda: scale_by_budget({"w": np.ones((3, 1), bool)}).init(PARAMS),
     "the budget of 'w' has dtype bool, not"),
    (lambda: scale_by_neuron_rms(FLAT, np.float32(1)), "scale_by_neuron_rms: decay must be a"),
    (lambda: retract("x"), "retract: geometry must be a Manifold, a tree of them, by_path(...) or"),
    (lambda: project_tangent(0), "project_tangent: geometry must be a Manifold, a tree of them,"),
    (lambda: with_master_copies(0.1), "with_master_copies: inner must be a"),
    (lambda: with_master_copies(muon(0.1, Euclidean()), int), "with_master_copies: dtype must be"),
    (lambda: quantized(FLAT), "quantized: inner must be a GradientTransformation; got Euclidean()"),
    (lambda: quantized(optax.trace(0.9), 2), "quantized: bits must be 8 or 4; got 2"),
    (lambda: quantized(optax.trace(0.9), block=1), "quantized: block must be a whole number in"),
    (lambda: quantized(optax.trace(0.9), min_size=-1), "quantized: min_size must be a whole"),
    (lambda: with_qk_clip(optax.sgd(0.1), FLAT, None, 0), "with_qk_clip: threshold must be a"),
    (lambda: with_qk_clip(optax.sgd(0.1), FLAT, None, power=NAN), "with_qk_clip: power must be a"),
    (lambda: transformation([rules.tangent, rules.budget], FLAT), "a rule must be a function"),
    (lambda: rules.then(rules.tangent, optax.sgd(0.1)), "a rule must be a function (manifold,"),
    (lambda: transformation(rules.tangent, FLAT, numbers={"rate": jnp.ones(3)}),
     "transformation: numbers['rate'] must be a number; got Array([1., 1., 1.]"),
    (lambda: transformation(rules.tangent, FLAT, numbers={"rate": optax.constant_schedule(0.1)}),
     "transformation: numbers['rate'] must be a number; got <function"),
    (lambda: chain([optax.sgd(1)]), "chain takes transformations as arguments, chain(a, b); got a"),
    (lambda: chain(0.1), "chain: transformation 0 of 1 must be a GradientTransformation; got 0.1"),
    (lambda: chain(optax.trace, retract(FLAT)), "chain: transformation 0 of 2 must be a"),
    (lambda: chain(hyperball(optax.identity(), 0.1, MATRIX), optax.scale(2)),
     "chain: transformation 0 of 2 is a"),
    (lambda: chain(retract(FLAT), optax.scale(2)), "chain: transformation 0 of 2 is a"),
    (lambda: chain(muon(1, FLAT, rest=optax.sgd(1)), optax.clip(1)), "chain: transformation 0 of"),
    (lambda: chain(start_on(retract(FLAT), FLAT), optax.scale(2)), "chain: transformation 0 of 2"),
    (lambda: start_on(Stiefel(), Stiefel()), "start_on: tx must be a GradientTransformation; got"),
    (lambda: start_anywhere(0.1), "start_anywhere: tx must be a GradientTransformation; got 0.1"),
    (lambda: chain(manifold_muon(0.1, FLAT), optax.scale(2)), "chain: transformation 0 of 2 is a"),
    (lambda: chain(with_master_copies(optax.sgd(0.1)), optax.scale(0.5)),
     "chain: transformation 0 of 2 is a"),
    (lambda: check_chain(optax.sgd(0.1), FLAT, PARAMS, steps=0), "check_chain: steps must be a"),
    (lambda: by_path("w"), "by_path takes a dictionary of patterns and values; got 'w'"),
    (lambda: by_path({0: Stiefel()}), "a pattern of by_path is a string or a compiled re.Pattern;"),
    (lambda: init_tree(FLAT, PARAMS, KEY), "init_tree(geometry, key, params): the key must be a"),
    (lambda: init_tree(FLAT, 0, PARAMS), "init_tree(geometry, key, params): the key must be a"),
    (lambda: init_tree(FLAT, jax.random.split(KEY), PARAMS),
     "init_tree(geometry, key, params): the key must be a single random key"),
    (lambda: init_tree(FLAT, jnp.int32(0), PARAMS), "init_tree(geometry, key, params): the key"),
    (lambda: nnx.geometry(PARAMS, Stiefel()), "frameworks.nnx.geometry: model must be an"),
    (lambda: linen.geometry(PARAMS, (1,), FLAT), "frameworks.linen.geometry: model must be a"),
    (lambda: from_numbers(lambda params: None, Stiefel()),
     "frameworks.muon.geometry: dimension_numbers is a function; call it on the parameters"),
    (lambda: from_numbers({"w": Stiefel()}, Stiefel()),
     "frameworks.muon.geometry: the entry of 'w' is Stiefel(); write"),
    (lambda: resolve_geometry(from_numbers({"v": None}, Stiefel()), PARAMS),
     "the dimension numbers have no entry for the parameter 'w'; the entries are ['v']"),
    (lambda: resolve_geometry(from_numbers(NUMBERS, Stiefel()), PARAMS),
     "the parameter 'w' of shape (3, 2): its dimension numbers do not fit; ndim=2 is too small"),
    (lambda: optax_muon(0.1, method="svd"), "optax_muon: method must be a MsignMethod such as"),
    (lambda: optax_muon(0.1).init({"w": COMPLEX}), "optax_muon: parameter 'w' is complex64; train"),
    (lambda: optax_muon(0.1, muon_weight_dimension_numbers={"w": NUMBERS}).init(PARAMS),
     "optax_muon: the dimension numbers of 'w' do not fit its shape (3, 2): ndim=2 is too small"),
    (lambda: nnx.geometry(DENSE, Stiefel().transposed()), "geometry: matrices must be a Manifold;"),
    (lambda: nnx.geometry(DENSE, "stiefel"), "geometry: matrices must be a Manifold; got"),
    (lambda: nnx.geometry(DENSE, Stiefel(), per_head=1), "geometry: per_head must be a bool; got"),
    (lambda: nnx.geometry(DENSE, Stiefel(), overrides=Stiefel()), "geometry: overrides must be a"),
    (lambda: nnx.geometry(DENSE, Stiefel(), overrides={"kernel": 3}), "the geometry of 'kernel'"),
    (lambda: nnx.geometry(DENSE, Stiefel(), rest=Stiefel()), "the parameter 'bias': Stiefel needs"),

    (lambda: minimize(jnp.sum, FLAT, PARAMS, PARAMS), "minimize: args must be a tuple, such as"),
    (lambda: minimize(jnp.sum, Hypersphere(), 2 * UNIT), "minimize: x0 is off its manifolds:"),
    (lambda: minimize(lambda x: (jnp.sum(x), x), Hypersphere(), UNIT), "minimize: f must return a"),
    (lambda: minimize(lambda x: jnp.log(-jnp.sum(x * x)), Hypersphere(), UNIT),
     "minimize: f(x0) is nan, with a"),
    (lambda: minimize(jnp.sum, Hypersphere(), UNIT, tolerance=1e-10), "minimize: tolerance=1e-10"),
    (lambda: minimize(jnp.sum, {"w": Hypersphere()}, {"v": UNIT}), "geometry has no entry for the"),
    (lambda: minimize(jnp.sum, {"v": None}, {"v": UNIT}), "minimize: the geometry leaves 'v' out"),
    (lambda: minimize(jnp.sum, Hypersphere(), np.ones((0,))), "minimize: x0 has no numbers; give"),
    (lambda: minimize(jnp.sum, Hypersphere(), jnp.bfloat16(UNIT)), "minimize: x0 must be all"),
    (lambda: minimize(jnp.sum, SpectralSphere(), np.eye(3)),
     "minimize: SpectralSphere() is not supported: its"),
    (lambda: minimize(jnp.sum, SpectralBall(), np.eye(3)), "minimize: SpectralBall() has a"),
    (lambda: minimize(lambda x: x, Hypersphere(), UNIT), "minimize: f must return a real"),
    (lambda: minimize(jnp.sum, Hypersphere(), UNIT, method="L-BFGS"), "minimize: method must be"),
    (lambda: minimize(jnp.sum, Hypersphere(), UNIT, max_steps=-1), "minimize: max_steps must be a"),
    (lambda: LBFGS(memory=0), "LBFGS.memory must be a whole number in [1, inf); got 0"),
    (lambda: TrustRegion(radius=0.0), "TrustRegion.radius must be a finite number in (0, inf);"),

    (lambda: margin_cross_entropy(COMPLEX, LABELS, 1, 1), "margin_cross_entropy: logits must be"),
    (lambda: margin_cross_entropy(LOGITS, LOGITS, 1, 1), "margin_cross_entropy: labels must be"),
    (lambda: margin_cross_entropy(LOGITS, LABELS[:2], 1, 1), "margin_cross_entropy: logits must"),
    (lambda: margin_cross_entropy(LOGITS[:, :1], LABELS, 1, 1), "margin_cross_entropy: logits"),
    (lambda: margin_cross_entropy(LOGITS, LABELS, -1, 1), "margin_cross_entropy: offset must be a"),
    (lambda: margin_cross_entropy(LOGITS, LABELS, 1, 0), "margin_cross_entropy: temperature must"),
    (lambda: certify(Linear(3, 2), COMPLEX, np.ones((4, 2))), "certify: logits must be real and"),
    (lambda: certify(Linear(3, 2), np.ones((3, 2)), np.ones((2, 2)), [1, 3]),
     "certify(labels) must be 0 to 2; got 3"),
    (lambda: certify(Linear(1, 2), jnp.ones((1, 2)), np.ones((4, 2))), "the network must return"),
    (lambda: certify(jnp.ones((1, 2)), Linear(1, 2), np.ones((4, 2))), "certify(net) must be a"),
    (lambda: bound(jnp.ones((1, 2)), Linear(1, 2)), "bound(module) must be a Module or"),
)
# fmt: on


@pytest.fixture(autouse=True)
def own_checks(monkeypatch):
    """Disable the suite's annotation checks, which would raise before the package's own checks."""
    monkeypatch.setattr(config, "jaxtyping_disable", True)


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_invalid_arguments_raise(call, message):
    with pytest.raises((TypeError, ValueError)) as error:
        call()
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("case", MANIFOLDS, ids=lambda case: case.name)
def test_integers_are_refused(case):
    """Points on these sets are no integers: rounded to the dtype of the argument they would be."""
    manifold, key = case.manifold, jax.random.key(0)
    whole, real = (jnp.ones(case.shape, dtype) for dtype in (jnp.int32, jnp.float32))
    calls = [
        lambda: manifold.random_point(key, case.shape, jnp.int32),
        *(lambda x=x: manifold.project_tangent(*x) for x in ((whole, real), (real, whole))),
        *(lambda x=x: manifold.steepest(*x) for x in ((whole, real), (real, whole))),
        *(lambda x=x: manifold.retract(*x) for x in ((whole, real), (real, whole))),
    ]
    if manifold.constrained:
        calls += [lambda: manifold.project(whole), lambda: manifold.distance(whole)]
    for call in calls:
        with pytest.raises(TypeError, match="floating"):
            call()


class DualityMapOnly(MaxAbs):
    """A norm that cannot project onto its ball."""

    project = Norm.project


@pytest.mark.parametrize(
    ("kind", "other"),
    [(EmbeddingRows, BarzilaiBorwein()), (SpectralBall, None), (SpectralBand, None)],
)
def test_norm_without_required_projection_is_refused(kind: Any, other: Any):
    norm = DualityMapOnly()
    with pytest.raises(ValueError, match=f"{kind.__name__}.solver takes step_norm.project"):
        kind(step_norm=norm)
    assert kind(step_norm=norm, solver=other).norm == norm


@pytest.mark.parametrize("number", [1, np.float32(0.5), np.int32(1), np.array(0.5), jnp.array(1)])
@pytest.mark.parametrize("momentum", [0, np.float16(0.5)])
def test_numbers_outside_annotations_are_accepted(number, momentum):
    manifold_muon(number, Euclidean(), momentum, clip=number, weight_decay=number)
