"""The last link: turning a tangent step into a step from point to point of the set."""

import jax
import optax

from manifoldmuon.manifolds import Manifold
from manifoldmuon.optim._geometry import Geometry
from manifoldmuon.optim._grouping import together
from manifoldmuon.optim._updates import pair_up, wide


class LastLink(optax.GradientTransformationExtraArgs):
    """A transformation after which nothing may change the updates any more.

    An ordinary `optax.GradientTransformationExtraArgs`; the type lets `chain` see the mistake.
    """


def retract(geometry: Geometry) -> LastLink:
    """Emits `R_W(u) - W`, so that `optax.apply_updates` lands on the manifold.

    It must be the last link: anything that scales or adds to its updates leaves the manifold
    without a word. `manifoldmuon.optim.chain` refuses a wrong order, and `check_chain` finds it
    in any transformation, built by whatever means. Wrappers that pass an update on or suppress
    it whole (`optax.masked`, `optax.MultiSteps`, `optax.apply_if_finite`) are harmless.

    On flat leaves the step passes through, cast to the parameter's dtype.

    Args:
      geometry: which manifold each parameter lives on; see `resolve`.

    Returns:
      A transformation without state. The retraction is computed in float32 or wider; the update
      has the parameter's dtype and is rounded so that `W + u`, in that dtype, is next to the
      retracted point. A zero step gives a zero update. `update` needs `params`.

    Raises:
      TypeError: on use, for parameters that are not floating point.
      ValueError: on use, where geometry, parameters and updates do not fit, naming the path.
    """

    def update_fn(updates, state, params=None, **extra_args):
        del extra_args
        layout, outgoing, pairs = pair_up(geometry, updates, params, "retract")
        curved = []
        for pair in pairs:
            if pair.manifold.flat:
                outgoing[pair.index] = pair.update.astype(pair.param.dtype)
            else:
                curved.append(pair)
        problems = [(pair.param, pair.update) for pair in curved]
        moved = together(_step, [pair.manifold for pair in curved], problems)
        for pair, (step, _) in zip(curved, moved, strict=True):
            outgoing[pair.index] = step
        return layout.rebuild(outgoing), state

    return LastLink(lambda params: optax.EmptyState(), update_fn)


def _step(manifold: Manifold, point: jax.Array, vector: jax.Array) -> tuple[jax.Array, tuple[()]]:
    start = wide(point)
    target = manifold.retract(start, vector.astype(start.dtype))
    return difference(target, point), ()


def difference(target: jax.Array, point: jax.Array) -> jax.Array:
    """The update `u` in the point's dtype for which the rounded `point + u` is next to `target`.

    Rounding the target first makes the difference exact wherever target and point are within a
    factor of two of one another (Sterbenz): the sum is then the best number there is.
    """
    nearest = target.astype(point.dtype)
    return (wide(nearest) - wide(point)).astype(point.dtype)
