"""What makes a gradient transformation a good Optax citizen, as checks anyone can run."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import optax

from manifoldmuon.testing._transformation_basics import BASICS, check_scale, check_still
from manifoldmuon.testing._transformation_case import Case
from manifoldmuon.testing._transformation_wrappers import WRAPPERS, check_injected


def check_transformation(
    make_tx: Callable[..., optax.GradientTransformation],
    params: Any,
    hyperparams: Mapping[str, Any] | None = None,
    *,
    static_args: str | Iterable[str] = (),
    scale_free: bool = True,
    still: bool = True,
    needs_params: bool = True,
    wrappers: bool = True,
) -> None:
    """Checks that a transformation works with everything Optax and JAX wrap around it.

    `init` under jit, on abstract values, on trees that are empty or have holes; one compilation;
    dtypes; `tree_map_params`, `inject_hyperparams`, `masked`, `partition`, `chain`, extra
    arguments, `MultiSteps`, `apply_if_finite`; scan, vmap, donation; zeros, scales, NaN; errors.
    It is for transformations that treat every leaf by itself. See `check_sharding` for meshes.

    Args:
      make_tx: makes the transformation: `make_tx(**hyperparams)`.
      params: at least two leaves of float32, each a valid point of whatever it is constrained to.
      hyperparams: keyword arguments of `make_tx`.
      static_args: which of them `optax.inject_hyperparams` has to leave alone.
      scale_free: whether gradients times 2^100 and 2^-100 (about 1e30, 1e-30) must give the
        same updates.
      still: whether zero gradients must give zero updates.
      needs_params: whether `update` must refuse `params=None`.
      wrappers: whether to try the wrappers, too; most of the time goes into compiling them.

    Raises:
      AssertionError: naming the check that failed.
    """
    made = make_tx(**(hyperparams or {}))
    if not isinstance(made, optax.GradientTransformationExtraArgs):
        raise AssertionError(f"not a GradientTransformationExtraArgs: {type(made)}")
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(7), len(leaves))
    drawn = [jax.random.normal(key, x.shape) for key, x in zip(keys, leaves, strict=True)]
    tx = optax.GradientTransformationExtraArgs(made.init, jax.jit(made.update))
    case = Case(tx, params, jax.tree.unflatten(treedef, drawn), needs_params)
    injected = optax.inject_hyperparams(make_tx, static_args)(**(hyperparams or {}))
    checks = [
        *BASICS,
        *([check_scale] if scale_free else []),
        *([check_still] if still else []),
        *([functools.partial(check_injected, injected), *WRAPPERS] if wrappers else []),
    ]
    for check in checks:
        try:
            check(case)
        except Exception as error:
            name = getattr(check, "__name__", "inject_hyperparams").strip("_")
            raise AssertionError(f"the check {name!r} failed: {error}") from error
