"""Check that a gradient transformation works with Optax's wrappers and JAX's transformations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from manifoldmuon.optim import start_anywhere
from manifoldmuon.testing._assertions import wide
from manifoldmuon.testing._meshes import check_inside_shard_map


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
    descends: bool | None = True,
) -> None:
    """Check that a transformation works with Optax's wrappers and JAX's transformations.

    `init` under jit, on abstract values, on trees that are empty or have holes; recompilation;
    dtypes; `tree_map_params`, `inject_hyperparams`, `masked`, `partition`, `chain`, extra
    arguments, `MultiSteps`, `apply_if_finite`; scan, vmap, donation; `shard_map`; zeros, scales,
    NaN; errors. The transformation must treat leaves independently. For meshes see
    `check_sharding`.

    Args:
      make_tx: function that returns the transformation: `make_tx(**hyperparams)`.
      params: at least two float32 leaves, each a valid point of its constraint.
      hyperparams: keyword arguments of `make_tx`.
      static_args: names of arguments to be left alone by `optax.inject_hyperparams`.
      scale_free: whether gradients times 2^100 and 2^-100 (about 1e30, 1e-30) must give the
        same updates.
      still: whether zero gradients must give zero updates.
      needs_params: whether `update` must refuse `params=None` and return updates in the dtypes of
        the parameters; otherwise in the dtypes of the gradients.
      wrappers: whether to check Optax's wrappers and `vmap`, too; compiling them takes most of the
        time.
      descends: sign of `<update, gradient>` in the first step, in every leaf that moves: negative
        for an optimizer with its learning rate (True), positive for `scale_by_*`, which ascend
        (False). None: not checked, for updates that do not depend on the gradient's sign.

    Raises:
      AssertionError: names the failed check.

    Examples:
      >>> params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
      >>> make = lambda rate: mm.optim.manifold_muon(rate, mm.manifolds.Euclidean())
      >>> check_transformation(make, params, {"rate": 0.1}, wrappers=False)
    """
    made = make_tx(**(hyperparams or {}))
    if not isinstance(made, optax.GradientTransformationExtraArgs):
        raise AssertionError(f"not a GradientTransformationExtraArgs: {type(made)}")
    rng = np.random.default_rng(7)
    grads = jax.tree.map(lambda x: np.asarray(rng.standard_normal(x.shape), np.float32), params)
    try:
        case = make_case(made, params, grads, needs_params)
    except Exception as error:
        raise AssertionError(f"the check 'first_step' failed: {error}") from error
    injected = optax.inject_hyperparams(make_tx, static_args)(**(hyperparams or {}))
    checks = [
        *BASICS,
        *([_scale] if scale_free else []),
        *([_still] if still else []),
        *([_descends if descends else _ascends] if descends is not None else []),
        *([functools.partial(check_injected, injected), *WRAPPERS] if wrappers else []),
    ]
    for check in checks:
        try:
            check(case)
        except Exception as error:
            name = getattr(check, "__name__", "inject_hyperparams").strip("_")
            raise AssertionError(f"the check {name!r} failed: {error}") from error


CLOSE = {"rtol": 1e-5, "atol": 1e-6}
EPS = float(np.finfo(np.float32).eps)


class CheckedTransformation(NamedTuple):
    """A transformation under test; the checks share its compiled `update`.

    The checks themselves compute in NumPy: compiling them for every shape would take longer than
    the transformation.
    """

    tx: optax.GradientTransformationExtraArgs
    params: Any
    grads: Any
    needs_params: bool
    state: Any
    first: tuple[Any, Any]  # updates and state after one step
    traces: list[None]  # an entry for each trace of `tx.update`


def make_case(
    tx: optax.GradientTransformationExtraArgs, params: Any, grads: Any, needs_params: bool
) -> CheckedTransformation:
    """Return the transformation with its compiled update and its first step."""
    traces = []

    def update(updates, state, params=None, **extra):
        traces.append(None)
        return tx.update(updates, state, params, **extra)

    compiled = optax.GradientTransformationExtraArgs(tx.init, jax.jit(update))
    state = tx.init(params)
    first = compiled.update(grads, state, params)
    return CheckedTransformation(compiled, params, grads, needs_params, state, first, traces)


def take_step(case: CheckedTransformation, grads: Any, params: Any = None) -> tuple[Any, Any]:
    """Return updates and state of a first step from `case.params` or other parameters."""
    if params is None:
        return case.tx.update(grads, case.state, case.params)
    state = start_anywhere(case.tx).init(params)  # zeros are off every sphere
    return case.tx.update(grads, state, params)


def zeros_like(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), tree)


def mask_first_leaf(tree: Any, hole: Any) -> Any:
    """Replace the first leaf of a tree by `None` or `MaskedNode`."""
    leaves, treedef = jax.tree.flatten(tree)
    return jax.tree.unflatten(treedef, [hole, *leaves[1:]])


def _init_abstract(case: CheckedTransformation) -> None:
    state = case.state
    kinds = {type(x) for x in jax.tree.leaves(state) if not isinstance(x, jax.Array | np.ndarray)}
    assert not kinds, f"the state holds more than arrays: {kinds}"
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), case.params)
    for other in (jax.jit(case.tx.init)(case.params), case.tx.init(shapes)):
        chex.assert_trees_all_equal_shapes_and_dtypes(state, other)


def _empty_trees(case: CheckedTransformation) -> None:
    nothing: list[Any] = [{}, [], optax.MaskedNode(), {"nothing": None}]
    for empty in nothing:
        updates, _ = jax.eval_shape(lambda tree: take_step(case, tree, tree), empty)
        chex.assert_trees_all_equal_structs(updates, empty)
    for empty in (*nothing, None):
        jax.eval_shape(case.tx.init, empty)


def _holes(case: CheckedTransformation) -> None:
    trees = case.grads, case.params, case.first[0]
    *masked, wanted = (mask_first_leaf(tree, optax.MaskedNode()) for tree in trees)
    chex.assert_trees_all_close(take_step(case, *masked)[0], wanted, **CLOSE)
    *missing, wanted = (mask_first_leaf(tree, None) for tree in trees)
    shapes = jax.eval_shape(lambda grads, params: take_step(case, grads, params)[0], *missing)
    chex.assert_trees_all_equal_shapes_and_dtypes(shapes, wanted)


def _dtypes(case: CheckedTransformation) -> None:
    def cast(tree, dtype):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), tree)

    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        params = cast(case.params, dtype)
        state = jax.eval_shape(case.tx.init, params)
        for grad_dtype in (jnp.float32, jnp.bfloat16):
            grads = cast(case.grads, grad_dtype)
            if dtype == grad_dtype == jnp.float32:
                updates, next_state = case.first
            else:
                updates, next_state = jax.eval_shape(case.tx.update, grads, state, params)
            chex.assert_trees_all_equal_dtypes(updates, params if case.needs_params else grads)
            chex.assert_trees_all_equal_shapes_and_dtypes(next_state, state)


def _tree_map_params(case: CheckedTransformation) -> None:
    state = case.state
    same = optax.tree_utils.tree_map_params(case.tx, lambda x: x, state)
    chex.assert_trees_all_equal(same, state)
    # Typical use: give every copy of the parameters' tree their shardings (here shapes).
    marks = jax.tree.map(lambda x: x.shape, case.params, is_leaf=lambda x: x is None)
    # `is_leaf`, as in Optax: a split masks parts of the state, but not of the second tree.
    marked = optax.tree_utils.tree_map_params(
        case.tx, _assert_shape, state, marks, is_leaf=lambda x: isinstance(x, optax.MaskedNode)
    )
    chex.assert_trees_all_equal(marked, state)


def _assert_shape(x: Any, shape: tuple[int, ...]) -> Any:
    assert isinstance(x, optax.MaskedNode) or x.shape == shape, (
        f"{x.shape} is given for a parameter of shape {shape}"
    )
    return x


def _degenerate(case: CheckedTransformation) -> None:
    # The gradient of the squared norm, which is normal to many manifolds.
    chex.assert_tree_all_finite(take_step(case, case.params))


def _nan_in_one_leaf(case: CheckedTransformation) -> None:
    clean, _ = case.first
    leaves, treedef = jax.tree.flatten(case.grads)
    for index in range(len(leaves)):
        if not leaves[index].size:
            continue
        bad = list(leaves)
        bad[index] = bad[index].copy()
        bad[index].flat[-1] = np.nan
        updates, _ = take_step(case, jax.tree.unflatten(treedef, bad))
        arrays = jax.tree.leaves(updates)
        assert np.any(np.isnan(arrays[index])), "a NaN in the gradient has disappeared"
        del arrays[index]
        others = [x for i, x in enumerate(jax.tree.leaves(clean)) if i != index]
        chex.assert_trees_all_close(arrays, others, **CLOSE)


def _errors(case: CheckedTransformation) -> None:
    leaves, treedef = jax.tree.flatten(case.params)
    integers = jax.tree.unflatten(treedef, [np.ones(leaves[0].shape, np.int32), *leaves[1:]])
    wrong: list[tuple[Any, Any]] = [(integers, integers)]
    if case.needs_params:
        wrong += [(case.grads, None), ({"another": np.ones(3, np.float32)}, case.params)]
    for grads, params in wrong:
        try:
            case.tx.update(grads, case.state, params)
        except (TypeError, ValueError):
            continue
        raise AssertionError(f"no error for {grads=} {params=}")


def _scale(case: CheckedTransformation) -> None:
    wanted, _ = case.first
    for power in (100, -100):  # powers of two scale without rounding
        grads = jax.tree.map(lambda g, c=np.float32(2.0**power): np.asarray(g * c), case.grads)
        updates, _ = take_step(case, grads)
        chex.assert_trees_all_close(updates, wanted, **CLOSE)


def _still(case: CheckedTransformation) -> None:
    zeros = zeros_like(case.grads)
    updates, state = take_step(case, zeros)
    chex.assert_trees_all_equal(updates, zeros)
    chex.assert_tree_all_finite(state)


def _ascends(case: CheckedTransformation, sign: int = 1) -> None:
    def gain(update, grad, param):
        """Return `<update, gradient>` where it is more than rounding of the moved parameter."""
        value = float(np.vdot(wide(update), wide(grad)))
        noise = 8 * EPS * np.linalg.norm(np.ravel(param)) * np.linalg.norm(np.ravel(grad))
        return value if abs(value) > noise else 0.0

    updates, _ = case.first
    gained = jax.tree.map(gain, updates, case.grads, case.params)
    assert any(jax.tree.leaves(gained)), "nothing moves"
    for path, value in jax.tree.leaves_with_path(gained):
        name = jax.tree_util.keystr(path)
        assert sign * value >= 0, (
            f"<update, gradient> is {value:.3g} at {name}; `descends` says which sign is wanted"
        )


def _descends(case: CheckedTransformation) -> None:
    _ascends(case, -1)


def _shard_map(case: CheckedTransformation) -> None:
    def update(grads, params, state):
        return case.tx.update(grads, state, params)

    def train(grads_and_params):
        def step(carry, _):
            params, state = carry
            updates, state = case.tx.update(grads, state, params)
            return (jax.tree.map(jnp.add, params, updates), state), None

        grads, params = grads_and_params
        return jax.lax.scan(step, (params, case.tx.init(params)), length=2)[0]

    check_inside_shard_map(update, case.grads, case.params, case.state)
    check_inside_shard_map(train, (case.grads, case.params))


def _compiles_once(case: CheckedTransformation) -> None:
    params, state = case.params, case.state
    before = len(case.traces)
    for _ in range(3):
        updates, state = case.tx.update(case.grads, state, params)
        params = jax.tree.map(lambda p, u: np.asarray(p) + np.asarray(u), params, updates)
    again = len(case.traces) - before
    assert again == 0, f"{again} more compilations in three steps"


BASICS = (
    _compiles_once,
    _init_abstract,
    _empty_trees,
    _holes,
    _dtypes,
    _tree_map_params,
    _degenerate,
    _nan_in_one_leaf,
    _errors,
    _shard_map,
)


def check_injected(injected: optax.GradientTransformation, case: CheckedTransformation) -> None:
    """Check `inject_hyperparams`, which remakes the transformation from traced numbers."""
    update = jax.jit(injected.update)
    state, injected_state = case.tx.init(case.params), jax.jit(injected.init)(case.params)
    for _ in range(2):
        wanted, state = case.tx.update(case.grads, state, case.params)
        updates, injected_state = update(case.grads, injected_state, case.params)
        chex.assert_trees_all_close(updates, wanted, **CLOSE)


def _masked_partition_and_chain(case: CheckedTransformation) -> None:
    wanted, _ = case.first
    mask = mask_first_leaf(jax.tree.map(lambda _: True, case.params), False)
    outside = jax.tree.map(lambda m, u, g: u if m else g, mask, wanted, case.grads)
    frozen = jax.tree.map(lambda m, u: u if m else zeros_like(u), mask, wanted)
    labels = jax.tree.map(lambda m: "moving" if m else "frozen", mask)
    optimizers: dict[Hashable, Any] = {"moving": case.tx, "frozen": optax.set_to_zero()}
    for wrapped, expected in (
        (optax.masked(case.tx, mask), outside),
        (optax.partition(optimizers, labels), frozen),
        (optax.chain(optax.identity(), case.tx), wanted),
    ):
        state = wrapped.init(case.params)
        optax.tree_utils.tree_map_params(wrapped, lambda x: x, state)
        updates, _ = wrapped.update(case.grads, state, case.params)
        chex.assert_trees_all_close(updates, expected, **CLOSE)


def _wrapped_donated_and_scanned(case: CheckedTransformation) -> None:
    """Check `MultiSteps` in `apply_if_finite` in `jax.lax.scan`, with donated buffers."""
    several: Any = optax.MultiSteps(case.tx, every_k_schedule=2)
    # Its gradient_transformation() would drop extra arguments.
    inner = optax.GradientTransformationExtraArgs(several.init, several.update)
    wrapped: Any = optax.apply_if_finite(inner, 2)

    def step(carry, grads):
        params, state = carry
        updates, state = wrapped.update(grads, state, params, unexpected=jnp.ones(()))
        return (params, state), updates  # the parameters stay on their manifolds

    bad = jax.tree.map(lambda g: np.full(g.shape, np.nan, g.dtype), case.grads)
    other = jax.tree.map(lambda g: np.asarray(g * g), case.grads)
    twice, nothing = jax.tree.map(lambda g: np.asarray(2 * g), case.grads), zeros_like(case.grads)
    # Two mini-steps with a skipped NaN between them, then two more.
    steps = (nothing, bad, twice, other, other)
    batches = jax.tree.map(lambda *g: np.stack(g), *steps)
    run = jax.jit(lambda carry, grads: jax.lax.scan(step, carry, grads), donate_argnums=0)
    carry = jax.tree.map(jnp.array, (case.params, wrapped.init(case.params)))
    _, updates = run(carry, batches)
    for index in (0, 1, 3):
        one = jax.tree.map(lambda u, i=index: u[i], jax.device_get(updates))
        chex.assert_trees_all_equal(one, zeros_like(case.params))
    wanted, state = case.first
    second, _ = case.tx.update(other, state, case.params)
    for index, expected in ((2, wanted), (4, second)):
        one = jax.tree.map(lambda u, i=index: u[i], jax.device_get(updates))
        chex.assert_trees_all_close(one, expected, rtol=1e-4, atol=1e-5)


def _vmap(case: CheckedTransformation) -> None:
    def once(params, grads):
        return case.tx.update(grads, case.tx.init(params), params)[0]

    others = jax.tree.map(lambda g: np.asarray(-g * g), case.grads)
    both = jax.tree.map(lambda a, b: np.stack([a, b]), case.grads, others)
    twins = jax.tree.map(lambda p: np.stack([p, p]), case.params)
    updates = jax.device_get(jax.jit(jax.vmap(once))(twins, both))
    for index, grads in enumerate((case.grads, others)):
        wanted, _ = take_step(case, grads)
        one = jax.tree.map(lambda x, i=index: x[i], updates)
        chex.assert_trees_all_close(one, wanted, rtol=1e-4, atol=1e-5)


WRAPPERS = (_masked_partition_and_chain, _wrapped_donated_and_scanned, _vmap)
