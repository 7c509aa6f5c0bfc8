"""Invalid arguments raise when they are passed, not in the first training step.

Their messages name the argument and what arrived, in one line.
"""

import math
from typing import Any

import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import config

import manifoldmuon as mm
from manifoldmuon import contrib
from manifoldmuon.frameworks import linen, nnx
from manifoldmuon.manifolds import Euclidean, Hypersphere, retractions, solvers

PACKAGES = (mm.bounds, mm.linalg, mm.manifolds, mm.minimize, mm.modules, mm.norms, mm.optim,
            mm.robustness, contrib, retractions, solvers)  # fmt: skip
NAMES = {name: getattr(package, name) for package in PACKAGES for name in package.__all__} | {
    "jax": jax,
    "jnp": jnp,
    "linen": linen,
    "math": math,
    "nnx": nnx,
    "np": np,
    "optax": optax,
    "EmptyState": optax.EmptyState,
    "KEY": jax.random.key(0),
    "FLAT": Euclidean(),
    "MATRIX": Hypersphere(ndim=2),
    "BLOCKS": Euclidean(mm.norms.RMSToRMS()).with_axes(1, 0, out_blocks=(2, 1)),
    "PARAMS": {"w": jnp.ones((3, 2))},
    "LOGITS": jnp.ones((3, 4)),
    "LABELS": jnp.arange(3),
    "DENSE": flax.nnx.Linear(3, 4, rngs=flax.nnx.Rngs(0)),
    "COMPLEX": jnp.ones((3, 2), jnp.complex64),
    "UNIT": np.eye(3, dtype=np.float32)[0],
    "NAN": math.nan,
}

# A call, and the beginning of its message.
REFUSED = """
msign(COMPLEX)  # got complex64; only real numbers are known here. Keep the real and the imaginary
msign(jnp.ones(3))  # msign takes matrices in the trailing two axes; got an array of shape (3,)
msign(jnp.ones((2, 2), jnp.int32))  # msign takes a real floating dtype; got int32
msign(jnp.ones((2, 2)), MUON)  # method must be a MsignMethod: write
msign(jnp.ones((2, 2)), SVD)  # method must be a MsignMethod such as SVD(); got <class
inverse_sqrt(jnp.eye(2), SVD())  # schedule must be a Schedule such as PolarExpress(1e-3); got SVD()
power_iteration(jnp.eye(2), jnp.ones(2), steps=-1)  # steps must not be negative; got -1 and -1
NewtonSchulz(SVD())  # NewtonSchulz.schedule must be a Schedule such as PolarExpress(1e-3); got
NewtonSchulz(MUON, precision="high")  # NewtonSchulz.precision must be a jax.lax.Precision such as
NewtonSchulz(MUON, operands="int8")  # NewtonSchulz.operands must be a floating dtype such as
NewtonSchulz(MUON, frobenius=1.0)  # NewtonSchulz.frobenius must be True or False; got 1.0
PolarExpress("x")  # PolarExpress.lower must be a finite number in [1e-12, 1); got 'x'
PolarExpress(1e-3, 5.0)  # PolarExpress.degree must be a whole number in [3, inf); got 5.0
PolarExpress(1e-3, 4)  # PolarExpress.degree must be odd; got 4
PolarExpress(1e-3, steps=0)  # PolarExpress.steps must be a whole number in [1, inf); got 0
PolarExpress(1e-3, safety=0.9)  # PolarExpress.safety must be a finite number in [1, 1.1]; got 0.9
PolarExpress(1e-3, cushion=0.5)  # PolarExpress.cushion must be a finite number in [0, 0.5); got 0.5
PolarExpress(1e-3, contract="no")  # PolarExpress.contract must be True or False; got 'no'
FixedSchedule()  # a schedule needs at least one step; got steps=None and a head of 0
FixedSchedule((1.5, -0.5))  # a step is a tuple of two coefficients (degree 3) or more; got 1.5
FixedSchedule([(1.5, -0.5)])  # FixedSchedule.head must be a tuple of steps; got [(1.5, -0.5)]
FixedSchedule(((1.0,),))  # a step is a tuple of two coefficients (degree 3) or more; got (1.0,)
FixedSchedule(((1.5, NAN),))  # a coefficient of FixedSchedule must be a finite number; got nan
FixedSchedule(((1.5, -0.5),), steps=2)  # steps=2 exceeds the 1 polynomials of a schedule without

Spectral(MUON)  # Spectral.method must be a MsignMethod: write
ConvRMSToRMS("svd")  # ConvRMSToRMS.method must be a MsignMethod such as SVD(); got 'svd'
Frobenius(-1)  # Frobenius.ndim must be a whole number in [0, inf); got -1
MaxAbs(1.0)  # MaxAbs.ndim must be a whole number in [0, inf); got 1.0
MaxRowNorm(threshold=-1e-06)  # MaxRowNorm.threshold must be a finite number in [0, 1); got -1e-06
PowerIterations(1.5)  # PowerIterations.warm must be a whole number in [1, inf); got 1.5
FanRatio(-1)  # FanRatio.gain must be a finite number in (0, inf); got -1
RootDim(True)  # RootDim.gain must be a finite number in (0, inf); got True
RootRank(-1.0)  # RootRank.each must be a positive, finite number or a ScaleRule; got -1.0

Stiefel(0.0)  # Stiefel.scale must be a positive, finite number or a ScaleRule; got 0.0
Stiefel(True)  # Stiefel.scale must be a positive, finite number or a ScaleRule; got True
Stiefel(retraction=QR)  # Stiefel.retraction must be a Retraction of orthonormal matrices; got
Stiefel(solver="x")  # Stiefel.solver must be a StiefelSolver; got 'x'
Stiefel(step_norm=MaxAbs())  # Stiefel.step_norm must be a Spectral or Frobenius; got MaxAbs()
Stiefel(step_norm=Frobenius(1))  # Stiefel.step_norm must be for 2 axes; got Frobenius(ndim=1)
Stiefel(step_norm=Spectral(SVD()))  # Stiefel.step_norm names a method of msign, but Stiefel.solver
Stiefel().check_shape((5,))  # Stiefel takes the trailing 2 axes of an array as one point, but the
Stiefel().random_point(KEY, (5,), jnp.float32)  # Stiefel takes the trailing 2 axes of an array as
Stiefel().project(COMPLEX)  # got complex64; only real numbers are known here. Keep the real and the
Stiefel().project_tangent(COMPLEX, COMPLEX)  # got complex64; only real numbers are known here. Keep
Stiefel().steepest(np.eye(4, 3), np.eye(3, 4))  # Stiefel.steepest: grad has the shape (3, 4), and
Stiefel().project_tangent(np.eye(3), np.eye(2))  # Stiefel.project_tangent: vector has the shape (2,
Euclidean().retract(point=UNIT, vector=np.eye(3))  # Euclidean.retract: vector has the shape (3, 3),
Stiefel().steepest(COMPLEX, COMPLEX, ())  # got complex64; only real numbers are known here. Keep
Stiefel().retract(COMPLEX, COMPLEX)  # got complex64; only real numbers are known here. Keep the
Orthogonal(NAN)  # Orthogonal.scale must be a positive, finite number or a ScaleRule; got nan
Orthogonal(solver=ProjectedPolar)  # Orthogonal.solver must be a StiefelSolver; got <class
Orthogonal(step_norm=Spectral(SVD()))  # Orthogonal.step_norm names a method of msign, but
Orthogonal().check_shape((4, 3))  # Orthogonal takes square matrices in the trailing two axes; got
Grassmann(-1.0)  # Grassmann.scale must be a positive, finite number or a ScaleRule; got -1.0
Grassmann(retraction=Clip())  # Grassmann.retraction must be a Retraction of orthonormal matrices;
Grassmann().check_shape((4, 4))  # Grassmann takes rectangular matrices; got the shape (4, 4).
ComplexStiefel(retraction=QR())  # ComplexStiefel.retraction: QR() of the real form is not that of
ComplexStiefel().check_shape((3, 4, 4))  # ComplexStiefel takes real and imaginary parts in the
Hypersphere(-2.0)  # Hypersphere.scale must be a positive, finite number or a ScaleRule; got -2.0
Hypersphere(ndim=1.0)  # Hypersphere.ndim must be a whole number in [1, inf); got 1.0
Hypersphere(step_norm=1.0)  # Hypersphere.step_norm must be a Norm; got 1.0
Hypersphere(ndim=2, step_norm=Frobenius(1))  # Hypersphere.step_norm must be for 2 axes; got
Hypersphere(retraction=Geodesic)  # Hypersphere.retraction must be a Retraction of unit vectors; got
Hypersphere().check_shape(())  # Hypersphere takes the trailing 1 axes of an array as one point, but
Hypersphere().with_axes(0, 1)  # a layout arranges matrices, but a point of Hypersphere has 1 axes;
Hypersphere(ndim=2).steepest(COMPLEX, COMPLEX, ())  # got complex64; only real numbers are known
EmbeddingRows(step_norm=Frobenius(1))  # EmbeddingRows.step_norm must be for 2 axes; got
EmbeddingRows(solver=LineMultiplier())  # EmbeddingRows.solver must be a BarzilaiBorwein or
SpectralSphere(-1.0)  # SpectralSphere.scale must be a positive, finite number or a ScaleRule; got
SpectralSphere(lanczos=True)  # SpectralSphere.lanczos must be a whole number in [1, inf); got True
SpectralSphere(step_norm=Frobenius(1))  # SpectralSphere.step_norm must be for 2 axes; got
SpectralBall(step_norm=1.0)  # SpectralBall.step_norm must be a Norm; got 1.0
SpectralBall(solver=SVD())  # SpectralBall.solver must be a DouglasRachford or None; got SVD()
SpectralBall(active_tolerance="x")  # SpectralBall.active_tolerance must be a finite number in (0,
SpectralBand(2.0, 0.5)  # SpectralBand takes low + 4 * active_tolerance < high; got 2.0, 0.5 and
SpectralBand(1.0, 1.0)  # SpectralBand takes low + 4 * active_tolerance < high; got 1.0, 1.0 and
SpectralBand(0.0, 1.0)  # SpectralBand.low must be positive; without it take SpectralBall
SpectralBand(retraction=Polar())  # SpectralBand.retraction must be a Clip; got Polar()
Euclidean(RMSToRMS)  # Euclidean.step_norm must be a Norm; got <class
Euclidean(Spectral()).check_shape((7,))  # Euclidean takes the trailing 2 axes of an array as one
Euclidean(Spectral()).steepest(COMPLEX, COMPLEX, ())  # got complex64; only real numbers are known
low_rank((4, 3), 1.5)  # low_rank: rank must be a whole number; got 1.5
low_rank((4, 6), 5)  # low_rank takes the shape of one matrix and a rank from 1 to its smaller side;
low_rank((4, 6), 2, "W")  # low_rank: zero must be 'A' or 'B', the factor that is 0; got 'W'
Stiefel().stacked(-1)  # stacked(axes) must be a whole number in [0, inf); got -1
Stiefel().transposed().stacked(0.5)  # stacked(axes) must be a whole number in [0, inf); got 0.5
ConvRMSToRMS(tap_axes=0)  # ConvRMSToRMS.tap_axes must be a whole number in [1, inf); got 0
nnx.geometry(DENSE, Euclidean(ConvRMSToRMS()))  # geometry: 'kernel' is a matrix, and Euclidean(

SkewPolar(MUON)  # SkewPolar.method must be a MsignMethod: write
SkewPolar(schedule=SVD())  # SkewPolar.schedule must be a Schedule such as PolarExpress(1e-3); got
SkewPolar(precision=1)  # SkewPolar.precision must be a jax.lax.Precision such as Precision.HIGHEST;
ProjectedPolar(SVD())  # ProjectedPolar.schedule must be a Schedule such as PolarExpress(1e-3); got
ProjectedPolar(precision=1)  # ProjectedPolar.precision must be a jax.lax.Precision such as
DualAscent(-0.3)  # DualAscent.step must be a finite number in (0, inf); got -0.3
DualAscent(method=MUON)  # DualAscent.method must be a MsignMethod: write
DualAscent(relative=None)  # DualAscent.relative must be True or False; got None
Resolvents(0)  # Resolvents.poles must be a whole number in [1, inf); got 0
LineMultiplier(steps=0)  # LineMultiplier.steps must be a whole number in [1, inf); got 0
BarzilaiBorwein(cold_start_steps=-1)  # BarzilaiBorwein.cold_start_steps must be a whole number in

Layout(0, 0)  # in_axes=0, out_axes=0 name the same axis twice in an array of 2 axes
Layout((0, 1), 1)  # in_axes=(0, 1), out_axes=1 name the same axis twice in an array of 3 axes
Layout(0, 1, taps=(1, 2))  # in_axes=0, out_axes=1, taps=(1, 2) name the same axis twice in an array
Layout(0, 1, taps="ab")  # taps must be an axis number or several; got 'ab'
Layout(0, -1)  # in_axes=0, out_axes=-1 count from both ends; use one sign, or say ndim, the number
Layout(0, 3, ndim=3)  # ndim=3 is too small: in_axes=0, out_axes=3 need 4
Layout((), 1)  # in_axes must be an axis number or several; got ()
Layout(in_blocks=2.0)  # Layout.in_blocks must be a whole number in [1, inf); got 2.0
Layout(out_blocks=())  # Layout.out_blocks must be a whole number in [1, inf); got 0
Layout(out_blocks=(2, 0))  # Layout.out_blocks: a length must be a whole number in [1, inf); got 0
Layout(1, (0, 2), out_blocks=(1, 2))  # out_blocks=(1, 2) are lengths along one axis, without
Layout(out_blocks=(2, 3)).inner_shape((5, 4))  # here out_blocks must be a number of equal blocks;
Layout.from_muon(None)  # dims is None: optax.contrib.muon leaves such a parameter to Adam, and it
LaidOut(Stiefel, Layout())  # LaidOut.manifold must be a Manifold; got <class
LaidOut(Stiefel(), 2)  # LaidOut.layout must be a Layout; got 2
LaidOut(Stiefel(), Layout(out_blocks=5)).check_shape((12, 4))  # out_blocks=5 does not divide the
Stiefel().with_axes(0, (1, 2)).check_shape((4, 5))  # in_axes=(-3,), out_axes=(-2, -1) take an array
Stiefel().with_axes(1, 0).check_shape((8, 4, 3, 3))  # the axis numbers reach 2 axes from the front,
Orthogonal().with_axes(0, (1, 2)).check_shape((4, 2, 3))  # Orthogonal takes square matrices in the

Linear(2.5, 3)  # Linear.fan_out must be a whole number in [1, inf); got 2.5
Linear(3, True)  # Linear.fan_in must be a whole number in [1, inf); got True
Linear(3, 4, Stiefel().transposed())  # Linear.manifold must be a Manifold; got
LocallyConnected((2.0,), 3, 3)  # LocallyConnected.places must be a whole number in [1, inf); got
Embed(0, 3)  # Embed.dim must be a whole number in [1, inf); got 0
Unembed("3", 3)  # Unembed.vocabulary must be a whole number in [1, inf); got '3'
Conv2D(3, 3, 2.5)  # Conv2D.kernel must be a whole number in [1, inf); got 2.5
Conv2D(3, 3, stride=1.5)  # Conv2D.stride must be a whole number in [1, inf); got 1.5
Conv2D(3, 3, padding=0.5)  # Conv2D.padding must be a whole number in [0, inf); got 0.5
Bias(2.5)  # Bias.features must be a whole number in [1, inf); got 2.5
TwoTap(4, 1.5)  # TwoTap.rank must be a whole number in [1, inf); got 1.5
TwoTap(4, 2, axis=-2.0)  # TwoTap.axis must be a whole number in [-3, -2]; got -2.0
Stack(Abs(), 2.5)  # Stack.copies must be a whole number in [1, inf); got 2.5
SplitHeads(2.5)  # SplitHeads.heads must be a whole number in [1, inf); got 2.5
AveragePool(2.5)  # AveragePool.rows must be a whole number in [1, inf); got 2.5
AveragePool(1, 2.5)  # AveragePool.columns must be a whole number in [1, inf); got 2.5
Flatten(2.5)  # Flatten.axes must be a whole number in [1, inf); got 2.5
GroupSort(2.5)  # GroupSort.size must be a whole number in [1, inf); got 2.5
SpaceToDepth(2.5)  # SpaceToDepth.side must be a whole number in [1, inf); got 2.5
Shift(0.5)  # Shift.pixels must be a whole number; got 0.5
orthogonal_conv2d(4, 2.5)  # orthogonal_conv2d(kernel) must be a whole number in [1, inf); got 2.5
mlp(3, 4, 5, 2.5)  # mlp(depth) must be a whole number in [2, inf); got 2.5
residual(Abs(), 2.5)  # residual(blocks) must be a whole number in [1, inf); got 2.5
attention(6, 2.5)  # attention(heads) must be a whole number in [1, inf); got 2.5
gpt(5, 6, 2, 1.5)  # gpt(blocks) must be a whole number in [1, inf); got 1.5
Param("a", Stiefel(), ndim=2.5)  # Param.ndim must be a whole number in [0, inf); got 2.5
Tied(Linear(3, 3) @ Linear(3, 3), (0, 1.0))  # an index of Tied.places must be a whole number in [0,
Linear(3, 4, Hypersphere(ndim=3))  # Linear.manifold: Hypersphere takes the trailing 3 axes of an
Linear(3, 4, mass=-1.0)  # Linear.mass must be a finite number in [0, inf); got -1.0
Linear(3, 4).apply(jnp.ones((3, 4)), jnp.ones(3))  # Linear takes inputs (..., 4 entries); got (3,)
Linear(3, 4).norm((jnp.ones((3, 4)),))  # expected a tree of the structure that init returns, *; got
Linear(3, 4).tare(-1.0)  # tare(absolute) must be a finite number in [0, inf); got -1.0
Linear(3, 4, mass=0.0).tare(1.0)  # no factor brings a mass of 0 to 1.0; give an atom a mass
Linear(3, 4) @ "no"  # unsupported operand type(s) for @: 'Linear' and 'str'
Linear(3, 4) @ (Abs(), "no")  # expected a module or a non-empty tuple of modules; got 'no'
Linear(3, 4) @ ()  # expected a module or a non-empty tuple of modules; got ()
Linear(3, 4) * 2  # module * number is not defined, as modula scales the input by it: write number *
Linear(3, 4) ** -1  # a power is a whole number of copies, 0 or more; got -1
Linear(3, 4) ** 2.5  # unsupported operand type(s) for ** or pow(): 'Linear' and 'float'
Linear(3, 4) ** True  # unsupported operand type(s) for ** or pow(): 'Linear' and 'bool'
NAN * Linear(3, 4)  # Mul.factor must be a finite number; got nan
LocallyConnected((), 3, 3)  # LocallyConnected.places must be a tuple of at least one length; got
LocallyConnected((4,), 2, 3).apply(jnp.ones((4, 2, 3)), jnp.ones((3, 3)))  # LocallyConnected takes
Embed(2, 3).apply(jnp.ones((3, 2)), jnp.ones(4))  # Embed takes whole numbers; got an input of dtype
Conv2D(2, 3).apply(jnp.ones((3, 3, 2, 3)), jnp.ones((4, 3)))  # Conv2D takes (..., height, width,
Bias(3).apply(jnp.ones(3), jnp.ones(4))  # Bias takes inputs (..., 3 entries); got (4,)
TwoTap(4, 4)  # TwoTap.rank must be less than the 4 channels; got 4
TwoTap(4, 2, axis=-3).apply(jnp.ones((4, 2)), jnp.ones((3, 4)))  # TwoTap shifts along axis -3; got
SplitHeads(4).forward(jnp.ones((2, 6)))  # 6 features do not split into 4 heads
AveragePool(3, 3).forward(jnp.ones((4, 6, 3)))  # an image of 4 by 6 pixels does not divide into 3
Flatten(4).forward(jnp.ones((2, 3)))  # Flatten takes at least 4 axes; got the shape (2, 3)
GroupSort(4).forward(jnp.ones(6))  # 6 features do not fall into groups of 4
SpaceToDepth(2).forward(jnp.ones((3, 4, 1)))  # SpaceToDepth takes (..., height, width, channels)
Shift().forward(jnp.ones((3, 5)))  # Shift takes (..., height, width, channels); got (3, 5)
RoPE(base=0.5)  # RoPE.base must be a finite number in [1, inf); got 0.5
RoPE().forward(jnp.ones((4, 5)))  # RoPE turns pairs of entries; got 5, an odd number
ReLU(sensitivity=-1.0)  # ReLU.sensitivity must be a finite number in [0, inf); got -1.0
orthogonal_conv2d(1, 3)  # TwoTap.rank must be a whole number in [1, inf); got 0
ExternalModule(Param("a/b", FLAT) @ Param("a", FLAT))  # Param 'a/b' lies inside Param 'a'
ExternalModule(Param("a", FLAT) @ Param("a/b", FLAT))  # other parameters lie inside Param 'a'
ExternalModule(Param("a", FLAT) @ Param("a", MATRIX))  # weights at 'a' must agree in manifold and
ExternalModule(Param("a", FLAT) @ Param("a", FLAT) ** 2)  # weights at 'a' must agree in manifold
ExternalModule(Param("a", FLAT), unused="b")  # ExternalModule(unused) must be a tuple of paths,
ExternalModule(Param("a", FLAT, mass=0.0) @ Param("a", FLAT))  # weights at 'a' are frozen together
Param("a", FLAT, mass=-1.0)  # Param.mass must be a finite number in [0, inf); got -1.0
Param("a", MATRIX, ndim=1)  # Param.ndim is 1, but a point of the manifold of 'a' takes 2 axes
Param("a", FLAT).constrained()  # Param 'a' on Euclidean has no default constraint: declare it on
(Param("a", Stiefel()) @ ReLU() @ Param("b", FLAT)).constrained()  # Param 'b' on Euclidean has no
Param("a", FLAT).init(KEY)  # Param 'a' on Euclidean has no weight of its own: the model makes it
(Param("a", FLAT) @ ReLU()).apply(((), None), jnp.ones(2))  # Param 'a' on Euclidean has no forward
Tied(Linear(3, 3) @ Linear(3, 3), (0,))  # Tied takes two different places at least; got (0,)
Tied(Linear(4, 3) @ Linear(3, 3), (0, 1))  # tied weights must agree in shape; got [(3, 3), (4, 3)]
Tied(Linear(3, 3) @ Linear(3, 3).tare(0.0), (0, 1))  # weights tied at (0, 1) are frozen together or
L2(1.5)  # L2.axes must be a whole number in [1, inf); got 1.5
RMS(2.5)  # RMS.heads must be a whole number in [1, inf); got 2.5
NormBound(1.0, features=2.5)  # NormBound.features must be a whole number in [1, inf); got 2.5
NormBound("a")  # NormBound.upper must be a finite number in [0, inf); got 'a'
matrix_bounds(Stiefel(), (3, 4), -0.5)  # matrix_bounds: drift must be a finite number in [0, inf);
matrix_bounds(SpectralBall(), (3, 4), NAN)  # matrix_bounds: drift must be a finite number in [0,
matrix_bounds(Euclidean(), (3, 4), -1)  # matrix_bounds: drift must be a finite number in [0, inf);
matrix_bounds(Stiefel(), (3,))  # matrix_bounds: shape: its length must be a finite number in [2,
matrix_bounds(Spectral(), ())  # matrix_bounds: shape: its length must be a finite number in [2,
bound(ExternalModule(Param("a", Stiefel())))  # bound(params) must be given for an ExternalModule
bound(Abs(), input_norm="1")  # bound(input_norm) must be a number >= 0 or a NormBound; got '1'

manifold_muon("0.1", FLAT)  # manifold_muon: learning_rate must be a finite number in [0, inf) or a
manifold_muon(NAN, FLAT)  # manifold_muon: learning_rate must be a finite number in [0, inf) or a
manifold_muon(True, FLAT)  # manifold_muon: learning_rate must be a finite number in [0, inf) or a
manifold_muon(FLAT, 0.1)  # manifold_muon: learning_rate must be a finite number in [0, inf) or a
manifold_muon(optax.adam, FLAT)  # manifold_muon: learning_rate must be a finite number in [0, inf)
manifold_muon(0.1, 0.1)  # manifold_muon: geometry must be a Manifold, a tree of them, by_path(...)
manifold_muon(0.1, Stiefel)  # manifold_muon: geometry must be a Manifold, a tree of them,
manifold_muon(0.1, {"w": Stiefel})  # the geometry of 'w' is <class
manifold_muon(0.1, by_path({"w": 3}))  # the geometry of 'w' is 3, not a Manifold.
manifold_muon(0.1, FLAT, 1.5)  # manifold_muon: momentum must be a finite number in [0, 1) or None;
manifold_muon(0.1, FLAT, jnp.array(2))  # manifold_muon: momentum must be a finite number in [0, 1)
manifold_muon(0.1, FLAT, clip=-1)  # manifold_muon: clip must be a finite number in (0, inf), a
manifold_muon(0.1, FLAT, weight_decay="x")  # manifold_muon: weight_decay must be a finite number in
manifold_muon(0.1, FLAT, nesterov=0.95)  # manifold_muon: nesterov must be a bool; got 0.95
manifold_muon(0.1, FLAT, accumulator_dtype="x")  # manifold_muon: accumulator_dtype must be a
manifold_muon(0.1, FLAT, budgets="x").init(PARAMS)  # the budget of 'w' is 'x', not a number.
descend(0.1, 0.1)  # descend: geometry must be a Manifold, a tree of them, by_path(...) or a
muon(0.1, FLAT, method=MUON)  # muon: method must be a MsignMethod: write
muon(0.1, FLAT, weight_decay=optax.scale(1.0))  # muon: weight_decay must be a finite number in [0,
muon(0.1, FLAT).init({"w": COMPLEX})  # the parameter 'w' has dtype complex64; only real floating
muon(0.1, FLAT).init({"w": jnp.zeros((3, 2), jnp.float8_e4m3fn)})  # the parameter 'w' has dtype
muon(0.1, Stiefel()).init(PARAMS)  # muon is for flat space, but ['w'] lie on constrained manifolds;
manifold_muon(0.1, FLAT, rest=0.1)  # manifold_muon: rest must be a GradientTransformation; got 0.1
muon(0.1, FLAT, rest=optax.adam)  # muon: rest must be a GradientTransformation; got <function adam
muonh(0.1, FLAT, rest=0.1)  # muonh: rest must be a GradientTransformation; got 0.1
muonh(0.1, FLAT, method="x")  # muonh: method must be a MsignMethod such as SVD(); got 'x'
hyperball(optax.sgd(0.1), 0.1, FLAT).init(PARAMS)  # hyperball(base) must ascend, without a learning
hyperball(optax.adam, 0.1, MATRIX)  # hyperball: base must be a GradientTransformation; got
hyperball(optax.identity(), -1, MATRIX)  # hyperball: learning_rate must be a finite number in [0,
hyperball(optax.identity(), 0.1, MATRIX, radial=1.5)  # hyperball: radial must be a finite number in
keep_norms(Stiefel()).init(jnp.eye(3))  # keep_norms: the geometry of '' is Stiefel(); a weight of
keep_norms(MATRIX, radius=-1.0).init(jnp.eye(3))  # keep_norms: the radius of '' must be a positive,
muon(0.1, BLOCKS).init({"w": jnp.ones((4, 2))})  # the parameter 'w': out_blocks=(2, 1) must add up
normuon(0.1, BLOCKS).init(PARAMS)  # here out_blocks must be a number of equal blocks; got Layout(
normuon(0.1, FLAT, neuron_decay=2)  # normuon: neuron_decay must be a finite number in [0, 1); got 2
modular(0.1, FLAT)  # modular: architecture must have geometry() and budgets(); got Euclidean()
modular(Linear(3, 4), 0.1)  # modular: learning_rate must be a finite number in [0, inf) or a
normed(0.1, optax.scale_by_adam, Linear(3, 4))  # normed: base must be a GradientTransformation; got
normalize(optax.scale_by_adam(), FLAT, iterations=3)  # normalize: iterations must be a
normalize(optax.scale_by_adam(), FLAT, "x").init(PARAMS)  # the budget of 'w' is 'x', not a number.
normalize(optax.adam(0.1), FLAT).init(PARAMS)  # normalize(base) must ascend, without a learning
normalize(optax.contrib.muon(0.1), FLAT).init(PARAMS)  # normalize(base) must ascend, without a
normalize(optax.lion(0.1), FLAT).init(PARAMS)  # normalize(base) must ascend, without a learning
agd(Layout(), "x")  # agd: gain must be a finite number in [0, inf) or a schedule; got 'x'
agd(0.1).init(PARAMS)  # automatic gradient descent: the entry of 'w' is 0.1, not a Layout.
agd(Layout()).init({"w": jnp.ones((2, 2), jnp.int32)})  # automatic gradient descent: 'w' has dtype
agd(Layout()).init({"s": jnp.ones(())})  # 's': in_axes=(-1,), out_axes=(-2,) take an array of at
agd(Layout()).init({"b": jnp.ones(3)})  # 'b': in_axes=(-1,), out_axes=(-2,) take an array of at
agd(Layout(taps=(-4, -3))).init(PARAMS)  # 'w': in_axes=(-1,), out_axes=(-2,), taps=(-4, -3) take an
agd({"v": Layout()}).init(PARAMS)  # layouts has no entry for the parameter 'w'; the entries are
init_semi_orthogonal(Layout(), KEY, {"b": jnp.ones(3)})  # 'b': in_axes=(-1,), out_axes=(-2,) take
agd(Layout(out_blocks=(2, 1))).init(PARAMS)  # automatic gradient descent: out_blocks of 'w' must be
riemannian_adam(0.1, FLAT, b1=1.0)  # riemannian_adam: b1 must be a finite number in [0, 1); got 1.0
riemannian_adam(0.1, FLAT, eps=-1)  # riemannian_adam: eps must be a finite number in [0, inf); got
riemannian_sgd(0.1, FLAT, 2)  # riemannian_sgd: momentum must be a finite number in [0, 1) or None;
riemannian_sgd(optax.scale_by_learning_rate, FLAT)  # riemannian_sgd: learning_rate must be a finite
scale_by_steepest(0.1)  # scale_by_steepest: geometry must be a Manifold, a tree of them,
scale_by_steepest(FLAT, 0.95)  # scale_by_steepest: track_gap must be a bool; got 0.95
scale_by_budget(2.0).update({"w": COMPLEX}, EmptyState())  # 'w' has dtype complex64, not real
scale_by_budget({"w": NAN}).init(PARAMS)  # the budget of 'w' is nan; it must be finite and >= 0.
scale_by_budget({"w": True}).init(PARAMS)  # the budget of 'w' is True, not a number.
scale_by_budget({"v": 1.0}).init(PARAMS)  # budgets has no entry for the parameter 'w'; the entries
scale_by_budget(lambda path, leaf: None).init(PARAMS)  # the budget of 'w' is None, not a number.
scale_by_budget({"w": np.ones((3, 1, 1))}).init(PARAMS)  # the budget of 'w' has shape (3, 1, 1),
scale_by_budget({"w": np.array([[-1.0]])}).init(PARAMS)  # the budget of 'w' is [[-1.]]; it must be
scale_by_budget({"w": np.ones((3, 1), bool)}).init(PARAMS)  # the budget of 'w' has dtype bool, not
scale_by_neuron_rms(FLAT, np.float32(1))  # scale_by_neuron_rms: decay must be a finite number in
retract("x")  # retract: geometry must be a Manifold, a tree of them, by_path(...) or a function;
project_tangent(0)  # project_tangent: geometry must be a Manifold, a tree of them, by_path(...) or
with_master_copies(0.1)  # with_master_copies: inner must be a GradientTransformation; got 0.1
with_master_copies(muon(0.1, Euclidean()), int)  # with_master_copies: dtype must be a floating
quantized(FLAT)  # quantized: inner must be a GradientTransformation; got Euclidean()
quantized(optax.trace(0.9), 2)  # quantized: bits must be 8 or 4; got 2
quantized(optax.trace(0.9), block=1)  # quantized: block must be a whole number in [2, inf); got 1
quantized(optax.trace(0.9), min_size=-1)  # quantized: min_size must be a whole number in [0, inf);
with_qk_clip(optax.sgd(0.1), FLAT, None, 0)  # with_qk_clip: threshold must be a finite number in
with_qk_clip(optax.sgd(0.1), FLAT, None, power=NAN)  # with_qk_clip: power must be a finite number
chain(0.1)  # chain: transformation 0 of 1 must be a GradientTransformation; got 0.1
chain(optax.trace, retract(FLAT))  # chain: transformation 0 of 2 must be a GradientTransformation
chain(hyperball(optax.identity(), 0.1, MATRIX), optax.scale(2))  # chain: transformation 0 of 2 is a
chain(retract(FLAT), optax.scale(2))  # chain: transformation 0 of 2 is a
chain(muon(1, FLAT, rest=optax.sgd(1)), optax.clip(1))  # chain: transformation 0 of 2 is a
chain(start_on(retract(FLAT), FLAT), optax.scale(2))  # chain: transformation 0 of 2 is a
start_on(Stiefel(), Stiefel())  # start_on: tx must be a GradientTransformation; got Stiefel()
start_anywhere(0.1)  # start_anywhere: tx must be a GradientTransformation; got 0.1
chain(manifold_muon(0.1, FLAT), optax.scale(2))  # chain: transformation 0 of 2 is a
chain(with_master_copies(optax.sgd(0.1)), optax.scale(0.5))  # chain: transformation 0 of 2 is a
check_chain(optax.sgd(0.1), FLAT, PARAMS, steps=0)  # check_chain: steps must be a whole number in
by_path("w")  # by_path takes a dictionary of patterns and values; got 'w'
by_path({0: Stiefel()})  # a pattern of by_path is a string or a compiled re.Pattern; got 0. The
init_tree(FLAT, PARAMS, KEY)  # init_tree(geometry, key, params): the key must be a random key of
init_tree(FLAT, 0, PARAMS)  # init_tree(geometry, key, params): the key must be a random key of JAX,
nnx.geometry(PARAMS, Stiefel())  # frameworks.nnx.geometry: model must be an nnx.Module; got a dict.
linen.geometry(PARAMS, (1,), FLAT)  # frameworks.linen.geometry: model must be a Module of Linen;
optax_muon(0.1, method="svd")  # optax_muon: method must be a MsignMethod such as SVD(); got 'svd'
optax_muon(0.1).init({"w": COMPLEX})  # optax_muon: parameter 'w' is complex64; train complex
nnx.geometry(DENSE, Stiefel().transposed())  # geometry: matrices must be a Manifold; got
nnx.geometry(DENSE, "stiefel")  # geometry: matrices must be a Manifold; got 'stiefel'
nnx.geometry(DENSE, Stiefel(), per_head=1)  # geometry: per_head must be a bool; got 1
nnx.geometry(DENSE, Stiefel(), overrides=Stiefel())  # geometry: overrides must be a dictionary; got
nnx.geometry(DENSE, Stiefel(), overrides={"kernel": 3})  # the geometry of 'kernel' is 3, not a
nnx.geometry(DENSE, Stiefel(), rest=Stiefel())  # the parameter 'bias': Stiefel takes the trailing 2

minimize(jnp.sum, FLAT, PARAMS, PARAMS)  # minimize: args must be a tuple, such as (a,); got {'w':
minimize(jnp.sum, Hypersphere(), 2 * UNIT)  # minimize: x0 is off its manifolds: distance 1 (at
minimize(lambda x: jnp.log(-jnp.sum(x * x)), Hypersphere(), UNIT)  # minimize: f(x0) is nan, with a
minimize(jnp.sum, Hypersphere(), UNIT, tolerance=1e-10)  # minimize: tolerance=1e-10 is below the
minimize(jnp.sum, {"w": Hypersphere()}, {"v": UNIT})  # geometry has no entry for the parameter 'v'
minimize(jnp.sum, Hypersphere(), np.ones((0,)))  # minimize: x0 has no numbers; give it at least one
minimize(jnp.sum, Hypersphere(), jnp.bfloat16(UNIT))  # minimize: x0 must be all float32 or all
minimize(jnp.sum, SpectralSphere(), np.eye(3))  # minimize: minima on SpectralSphere() lie at its
minimize(jnp.sum, SpectralBall(), np.eye(3))  # minimize: SpectralBall() has a boundary, where a
minimize(lambda x: x, Hypersphere(), UNIT)  # minimize: f must return one real number; got
minimize(jnp.sum, Hypersphere(), UNIT, method="L-BFGS")  # minimize: method must be Auto(),
minimize(jnp.sum, Hypersphere(), UNIT, max_steps=-1)  # minimize: max_steps must be a whole number
LBFGS(memory=0)  # LBFGS.memory must be a whole number in [1, inf); got 0
TrustRegion(radius=0.0)  # TrustRegion.radius must be a finite number in (0, inf); got 0.0

margin_cross_entropy(COMPLEX, LABELS, 1, 1)  # margin_cross_entropy: logits must be floating point;
margin_cross_entropy(LOGITS, LOGITS, 1, 1)  # margin_cross_entropy: labels must be whole numbers,
margin_cross_entropy(LOGITS, LABELS[:2], 1, 1)  # margin_cross_entropy: logits (..., classes), two
margin_cross_entropy(LOGITS[:, :1], LABELS, 1, 1)  # margin_cross_entropy: logits (..., classes),
margin_cross_entropy(LOGITS, LABELS, -1, 1)  # margin_cross_entropy: offset must be a finite number
margin_cross_entropy(LOGITS, LABELS, 1, 0)  # margin_cross_entropy: temperature must be above 0; got
certify(Linear(3, 2), COMPLEX, np.ones((4, 2)))  # certify: logits must be real and finite; got
certify(Linear(1, 2), jnp.ones((1, 2)), np.ones((4, 2)))  # certify takes logits (n, 2 classes or
certified_accuracy(LOGITS, LABELS, -0.5)  # certified_accuracy: radius must be a finite number in
certified_accuracy(LOGITS, LABELS, 1, -1)  # certified_accuracy: lipschitz must be a finite number
certified_accuracy(LOGITS, LABELS, 1, jnp.array(NAN))  # certified_accuracy: lipschitz must be a
"""
ROWS = [line.split("  # ") for line in REFUSED.splitlines() if line]


@pytest.fixture(autouse=True)
def own_checks(monkeypatch):
    """Disable the suite's annotation checks, which would raise before the package's own checks."""
    monkeypatch.setattr(config, "jaxtyping_disable", True)


@pytest.mark.parametrize(("call", "message"), ROWS, ids=[call for call, _ in ROWS])
def test_invalid_arguments_raise(call, message):
    with pytest.raises((TypeError, ValueError)) as error:
        eval(call, NAMES)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


class DualityMapOnly(mm.norms.MaxAbs):
    """A norm that cannot project onto its ball."""

    project = mm.norms.Norm.project


@pytest.mark.parametrize(
    ("kind", "other"),
    [
        (mm.manifolds.EmbeddingRows, solvers.BarzilaiBorwein()),
        (mm.manifolds.SpectralBall, None),
        (mm.manifolds.SpectralBand, None),
    ],
)
def test_norm_without_required_projection_is_refused(kind: Any, other: Any):
    norm = DualityMapOnly()
    with pytest.raises(ValueError, match=f"{kind.__name__}.solver takes step_norm.project"):
        kind(step_norm=norm)
    assert kind(step_norm=norm, solver=other).norm == norm


@pytest.mark.parametrize("number", [1, np.float32(0.5), np.int32(1), np.array(0.5), jnp.array(1)])
@pytest.mark.parametrize("momentum", [0, np.float16(0.5)])
def test_numbers_outside_annotations_are_accepted(number, momentum):
    mm.optim.manifold_muon(number, Euclidean(), momentum, clip=number, weight_decay=number)
