"""The methods: what the hidden matrices are trained by, in numbers that are traced."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from manifoldmuon.contrib import scale_by_neuron_rms
from manifoldmuon.linalg import TRAINING_MSIGN, msign
from manifoldmuon.manifolds import (
    Euclidean,
    Hypersphere,
    Manifold,
    SpectralBall,
    SpectralBand,
    SpectralSphere,
    Stiefel,
)
from manifoldmuon.manifolds.retractions import Clip
from manifoldmuon.manifolds.solvers import ProjectedPolar
from manifoldmuon.norms import FanRatio, RMSToRMS, Spectral
from manifoldmuon.optim import chain, hyperball, retract, scale_by_steepest
from studies.transformers.network import BRANCH_ENDS, Size
from studies.transformers.search import Place

MUON = "Muon"


class Knobs(NamedTuple):
    """The numbers of a training, arguments of its compiled program.

    Attributes:
      rate: the peak learning rate of the hidden matrices.
      decay: of the hidden matrices, times the rate.
      factor: of the branches: what their last matrices write is multiplied by it.
      radial: of `hyperball`.
      gain_rate: the peak rate of the gains, one for each matrix; 0 leaves them at 1.
      rest_rate: the peak rate of Adam for embedding and head.
      momentum: of Muon, and the first of Adam's two.
    """

    rate: float
    decay: float = 0.0
    factor: float = 1.0
    radial: float = 1.0
    gain_rate: float = 0.0
    rest_rate: float = 0.0
    momentum: float = 0.9


@dataclasses.dataclass(frozen=True)
class Method:
    """A recipe: a program, what is tuned beside the rate, and what is fixed.

    Attributes:
      program: a name in `PROGRAMS`.
      centre: log2 of the rate where the search begins.
      second: the knob of its own that is tuned; the search moves it by powers of `ratio`.
      start: of that knob.
      ratio: between neighbours of that knob.
      fixed: other knobs than the defaults, as pairs.
    """

    program: str
    centre: float
    second: str
    start: float
    ratio: float
    fixed: tuple[tuple[str, float], ...] = ()

    def knobs(self, place: Place) -> Knobs:
        """Return the knobs of a place.

        Beside rate and second knob these are the momentum, whose distance from 1 goes by powers of
        two from 0.1, and the rate of embedding and head, by powers of two from 1/32.
        """
        rate, second, momentum, rest = place
        values = dict(self.fixed)
        values[self.second] = self.start * self.ratio**second
        return Knobs(
            rate=2.0 ** (self.centre + rate / 2),
            momentum=1 - 0.1 * 2.0**momentum,
            rest_rate=2.0 ** (rest - 5),
            **values,
        )


def _decaying(program: str, centre: float, decay: float) -> Method:
    return Method(program, centre, "decay", decay, 2.0)


def _kept(program: str, centre: float, **fixed: float) -> Method:
    return Method(program, centre, "factor", 1.0, 2**0.5, tuple(sorted(fixed.items())))


GAIN_RATE = 0.02

METHODS: dict[str, Method] = {
    "AdamW": _decaying("Adam", -6.5, 0.125),
    MUON: _decaying("Muon", -4.0, 0.125),
    "NorMuon": _decaying("NorMuon", -4.0, 0.125),
    "Aurora": _decaying("Aurora", -4.0, 0.125),
    "AdamH": _kept("Adam, sphere", -5.5),
    "MuonH": _kept("Muon, sphere", -4.0),
    "MuonH, gains": _kept("Muon, sphere", -4.0, gain_rate=GAIN_RATE),
    "AuroraH": _kept("Aurora, sphere", -4.0),
    "AuroraH, gains": _kept("Aurora, sphere", -4.0, gain_rate=GAIN_RATE),
    "Aurora, stream vectors, gains": _kept("Aurora, streams", -4.0, gain_rate=GAIN_RATE),
    "NorMuonH, gains": _kept("NorMuon, sphere", -4.0, gain_rate=GAIN_RATE),
    "MuonH, tangent": _kept("Muon, sphere", -4.0, radial=0.0),
    "rows": _kept("Muon, rows", -4.0),
    "rows, gains": _kept("Muon, rows", -4.0, gain_rate=GAIN_RATE),
    "stream vectors": _kept("Muon, streams", -4.0),
    "stream vectors, gains": _kept("Muon, streams", -4.0, gain_rate=GAIN_RATE),
    "spectral sphere": _kept("spectral sphere", -4.0),
    "spectral ball": _kept("spectral ball", -4.0),
    "band": _kept("band", -4.0),
    "Stiefel": _kept("Stiefel", -4.0),
    "Stiefel, gains": _kept("Stiefel", -4.0, gain_rate=GAIN_RATE),
}
"""All else is the same: the first weights, Nesterov's step, and Adam for embedding and head.
`rows` are those of every matrix; `stream vectors` are
read from the residual stream or written to it, rows or columns, as in nGPT."""

_STEPS = Spectral(TRAINING_MSIGN, FanRatio())
SETS: dict[str, Manifold] = {
    "spectral sphere": SpectralSphere(FanRatio(), _STEPS),
    "spectral ball": SpectralBall(FanRatio(), None, Clip(), _STEPS),
    "band": SpectralBand(1 / 3, 3.0, FanRatio(), None, Clip(), _STEPS),
    "Stiefel": Stiefel(FanRatio(), solver=ProjectedPolar()),
}
"""Sets of matrices that are kept by steepest steps and retractions."""


def _with_ends_transposed(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return the transformation for matrices whose rows are all vectors of the stream."""

    def turned(matrices: Any) -> Any:
        return {role: w.mT if role in BRANCH_ENDS else w for role, w in matrices.items()}

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        updates, state = tx.update(turned(updates), state, turned(params))
        return turned(updates), state

    return optax.GradientTransformation(lambda params: tx.init(turned(params)), update)


def _even_directions() -> optax.GradientTransformation:
    """Return Aurora's directions: orthonormal, the rows of tall matrices nearly of one length.

    The polar factor is taken of `D G`, `D` diagonal: first 1 over the lengths of the rows, then
    corrected once by those of the factor (Dewulf et al., arXiv:2606.27715). Square matrices have
    the polar factor, wide ones are transposed.
    """

    def even(w: Any) -> Any:
        fan_out, fan_in = w.shape[-2:]
        tall = w if fan_out >= fan_in else w.mT
        if fan_out != fan_in:
            tall = tall / nonzero(jnp.linalg.norm(tall, axis=-1, keepdims=True))
            lengths = jnp.linalg.norm(msign(tall, TRAINING_MSIGN), axis=-1, keepdims=True)
            tall = tall / nonzero(lengths)
        found = msign(tall, TRAINING_MSIGN)
        return (fan_out / fan_in) ** 0.5 * (found if fan_out >= fan_in else found.mT)

    def nonzero(x: Any) -> Any:
        return jnp.where(x == 0, 1, x)

    return optax.stateless(lambda updates, _: jax.tree.map(even, updates))


def first_matrices(program: str, size: Size, gaussian: dict[str, Any]) -> dict[str, Any]:
    """Return the first hidden matrices: the Gaussian ones, or the nearest on the set."""
    manifold = SETS.get(program)
    if manifold is not None:
        return {role: jax.jit(manifold.project)(stack) for role, stack in gaussian.items()}
    scale = {role: size.branch_scale() if role in BRANCH_ENDS else 1.0 for role in gaussian}
    return {role: scale[role] * stack for role, stack in gaussian.items()}


def branch_factor(program: str, size: Size, factor: Any) -> Any:
    """Return what the ends of branches are multiplied by in the function."""
    return factor * (size.branch_scale() if program in SETS else 1.0)


def optimizer(
    program: str, knobs: Knobs, schedule: Any, trace: Any = optax.trace
) -> optax.GradientTransformation:
    """Return the optimizer of the hidden matrices.

    Args:
      program: a name in `PROGRAMS`.
      knobs: its numbers.
      schedule: maps a step to a part of the rate.
      trace: makes the link that holds momentum, with the arguments of `optax.trace`.
    """

    def rate(step: Any) -> Any:
        return knobs.rate * schedule(step)

    flat = Euclidean(RMSToRMS(TRAINING_MSIGN))
    momentum = trace(knobs.momentum, nesterov=True)
    adam = optax.scale_by_adam(knobs.momentum, 0.95)
    steps = chain(momentum, scale_by_steepest(flat, certify=False))
    even = optax.chain(momentum, _even_directions())
    decayed = [optax.add_decayed_weights(knobs.decay), optax.scale_by_learning_rate(rate)]
    ball = functools.partial(hyperball, learning_rate=rate, radial=knobs.radial)
    if program in SETS:
        set_ = SETS[program]
        links = [scale_by_steepest(set_, certify=False), optax.scale_by_learning_rate(rate)]
        return chain(momentum, *links, retract(set_))
    makers: dict[str, Any] = {
        "Adam": lambda: optax.chain(adam, *decayed),
        "Muon": lambda: optax.chain(steps, *decayed),
        "NorMuon": lambda: optax.chain(steps, scale_by_neuron_rms(flat), *decayed),
        "Adam, sphere": lambda: ball(adam, geometry=Hypersphere(ndim=2)),
        "Aurora": lambda: optax.chain(even, *decayed),
        "Aurora, sphere": lambda: ball(even, geometry=Hypersphere(ndim=2)),
        "Aurora, streams": lambda: _with_ends_transposed(ball(even, geometry=Hypersphere())),
        "NorMuon, sphere": lambda: ball(
            chain(steps, scale_by_neuron_rms(flat)), geometry=Hypersphere(ndim=2)
        ),
        "Muon, sphere": lambda: ball(steps, geometry=Hypersphere(ndim=2)),
        "Muon, rows": lambda: ball(steps, geometry=Hypersphere()),
        "Muon, streams": lambda: _with_ends_transposed(ball(steps, geometry=Hypersphere())),
    }
    return makers[program]()


PROGRAMS = (
    "Adam",
    "Muon",
    "NorMuon",
    "Aurora",
    "Aurora, sphere",
    "Aurora, streams",
    "Adam, sphere",
    "NorMuon, sphere",
    "Muon, sphere",
    "Muon, rows",
    "Muon, streams",
    *SETS,
)
