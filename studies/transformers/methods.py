"""The methods: optimizers of the hidden matrices, with traced hyperparameters."""

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
    """Hyperparameters of a training: arguments of its compiled program.

    Attributes:
      rate: the peak learning rate of the hidden matrices.
      decay: the weight decay of the hidden matrices, multiplied by the rate.
      factor: multiplies the outputs of the branches.
      radial: the argument of `hyperball`.
      gain_rate: the peak rate of the gains (a scalar per matrix); 0 leaves them at 1.
      rest_rate: the peak rate of Adam for embedding and head.
      momentum: Muon's momentum, or Adam's first decay rate.
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
    """A recipe: a program, its tuned knobs and its fixed knobs.

    Attributes:
      program: a name in `PROGRAMS`.
      centre: log2 of the initial rate of the search.
      second: the tuned knob that is specific to the method.
      start: the initial value of the second knob.
      ratio: the ratio between neighbouring values of the second knob.
      fixed: knobs with values other than the defaults, as pairs.
    """

    program: str
    centre: float
    second: str
    start: float
    ratio: float
    fixed: tuple[tuple[str, float], ...] = ()

    def knobs(self, place: Place) -> Knobs:
        """Return the knobs at a point of the search.

        The coordinates are half octaves of the rate from `2**centre`, powers of `ratio` of the
        second knob from `start`, powers of two of `1 - momentum` from 0.1, and powers of two of
        the rate of embedding and head from 1/32.
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
    "AuroraH, gains": _kept("Aurora, sphere", -4.0, gain_rate=GAIN_RATE),
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
}
"""Methods share the Gaussian initial weights (projected onto sets), and Adam for embedding and
head; all but AdamW and AdamH use Nesterov momentum. `rows` constrains the rows of every matrix;
`stream vectors` constrains the rows or columns that read from or write to the residual stream, as
in nGPT."""

_STEPS = Spectral(TRAINING_MSIGN, FanRatio())
SETS: dict[str, Manifold] = {
    "spectral sphere": SpectralSphere(FanRatio(), _STEPS),
    "spectral ball": SpectralBall(FanRatio(), None, Clip(), _STEPS),
    "band": SpectralBand(1 / 3, 3.0, FanRatio(), None, Clip(), _STEPS),
    "Stiefel": Stiefel(FanRatio(), solver=ProjectedPolar()),
}
"""Constraint sets for steepest descent with retractions."""


def _with_ends_transposed(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Transpose the ends of branches for `tx`, so that all rows are vectors of the stream."""

    def turned(matrices: Any) -> Any:
        return {role: w.mT if role in BRANCH_ENDS else w for role, w in matrices.items()}

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        updates, state = tx.update(turned(updates), state, turned(params))
        return turned(updates), state

    return optax.GradientTransformation(lambda params: tx.init(turned(params)), update)


def _even_directions() -> optax.GradientTransformation:
    """Return Aurora's directions: orthonormal, with nearly equal row lengths for tall matrices.

    The direction is the polar factor of `D G` with `D` diagonal: the inverse row lengths of `G`,
    then corrected once by the row lengths of the polar factor (Dewulf et al., arXiv:2606.27715).
    Square matrices have the plain polar factor; wide matrices are transposed.
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
    """Return the initial hidden matrices: Gaussian, branch ends scaled, or projected onto a set."""
    manifold = SETS.get(program)
    if manifold is not None:
        return {role: jax.jit(manifold.project)(stack) for role, stack in gaussian.items()}
    scale = {role: size.branch_scale() if role in BRANCH_ENDS else 1.0 for role in gaussian}
    return {role: scale[role] * stack for role, stack in gaussian.items()}


def branch_factor(program: str, size: Size, factor: Any) -> Any:
    """Return the factor of the branch ends in the forward pass.

    It includes `branch_scale` for programs with sets; other programs have it in their weights.
    """
    return factor * (size.branch_scale() if program in SETS else 1.0)


def optimizer(program: str, knobs: Knobs, schedule: Any) -> optax.GradientTransformation:
    """Return the optimizer of the hidden matrices.

    Args:
      program: a name in `PROGRAMS`.
      knobs: the hyperparameters.
      schedule: maps a step to a fraction of the peak rate.
    """

    def rate(step: Any) -> Any:
        return knobs.rate * schedule(step)

    flat, sphere = Euclidean(RMSToRMS(TRAINING_MSIGN)).stacked(), Hypersphere(ndim=2).stacked()
    momentum = optax.trace(knobs.momentum, nesterov=True)
    adam = optax.scale_by_adam(knobs.momentum, 0.95)
    steps = chain(momentum, scale_by_steepest(flat, track_gap=False))
    even = optax.chain(momentum, _even_directions())
    decayed = [optax.add_decayed_weights(knobs.decay), optax.scale_by_learning_rate(rate)]
    ball = functools.partial(hyperball, learning_rate=rate, radial=knobs.radial)
    if program in SETS:
        set_ = SETS[program].stacked()
        links = [scale_by_steepest(set_, track_gap=False), optax.scale_by_learning_rate(rate)]
        return chain(momentum, *links, retract(set_))
    makers: dict[str, Any] = {
        "Adam": lambda: optax.chain(adam, *decayed),
        "Muon": lambda: optax.chain(steps, *decayed),
        "NorMuon": lambda: optax.chain(steps, scale_by_neuron_rms(flat), *decayed),
        "Adam, sphere": lambda: ball(adam, geometry=sphere),
        "Aurora": lambda: optax.chain(even, *decayed),
        "Aurora, sphere": lambda: ball(even, geometry=sphere),
        "NorMuon, sphere": lambda: ball(chain(steps, scale_by_neuron_rms(flat)), geometry=sphere),
        "Muon, sphere": lambda: ball(steps, geometry=sphere),
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
    "Adam, sphere",
    "NorMuon, sphere",
    "Muon, sphere",
    "Muon, rows",
    "Muon, streams",
    *SETS,
)
