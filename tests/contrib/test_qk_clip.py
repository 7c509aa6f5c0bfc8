"""QK-Clip against attention logits computed in NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manifoldmuon import contrib, optim
from manifoldmuon.manifolds import Euclidean, Layout, Stiefel
from manifoldmuon.norms import RMSToRMS

D, HEADS, WIDTH, GROUPS = 8, 4, 3, 2
FLAT = Euclidean(RMSToRMS())
TOKENS = np.random.default_rng(0).standard_normal((5, D))
APART, FUSED = Layout(0, 2), Layout(out_blocks=HEADS)
HEADS_OF = optim.by_path(
    {"q": APART, "k": FUSED, "shared": Layout(out_blocks=GROUPS), "v": None, "qkv": None}
)
SHAPES = {
    "q": (D, HEADS, WIDTH),
    "k": (HEADS * WIDTH, D),
    "shared": (GROUPS * WIDTH, D),
    "v": (HEADS * WIDTH, D),
    "qkv": (3 * HEADS * WIDTH, D),
}
NO_GROUPS = optim.by_path({"q": APART, "k": FUSED, "**": None})


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def largest(q: Any, k: Any) -> np.ndarray:
    """Compute the largest logit per head, `(heads,)`, from weights `(heads, head_dim, d)`."""
    queries, keys = (np.einsum("hwd,td->htw", np.asarray(x, float), TOKENS) for x in (q, k))
    return (queries @ keys.swapaxes(-1, -2) / np.sqrt(WIDTH)).max(axis=(1, 2))


def query(params: Any) -> np.ndarray:
    return np.asarray(params["q"]).transpose(1, 2, 0)


def key(params: Any, name: str = "k") -> np.ndarray:
    return np.asarray(params[name]).reshape(-1, WIDTH, D)


def clip(params: Any, max_logits: Any, step: float = 0.0, **options: Any) -> Any:
    """Return the parameters after a step of gradient descent with gradient 1."""
    heads = options.pop("heads", HEADS_OF)
    tx = contrib.with_qk_clip(optax.sgd(step), FLAT, heads, **options)

    @jax.jit
    def after(params, max_logits):
        grads = jax.tree.map(jnp.ones_like, params)
        updates, _ = tx.update(grads, tx.init(params), params, max_logits=max_logits)
        return optax.apply_updates(params, updates)

    return after(params, max_logits)


def test_grouped_queries_are_clipped_to_threshold():
    before = weights()
    grouped = lambda x: np.repeat(key(x, "shared"), HEADS // GROUPS, axis=0)  # noqa: E731
    found = largest(query(before), grouped(before))
    threshold = float(found.max() / 3)
    logits = {"q": found, "k": 0.0, "shared": found.reshape(GROUPS, -1).max(-1)}
    after = clip(before, logits, threshold=threshold)
    assert largest(query(after), grouped(after)).max() == pytest.approx(threshold, rel=1e-5)


def test_clipping_scales_weights_after_step():
    """Expected weight of each head: `(W - rate) * (threshold / S)^power`."""
    before, logits = weights(), np.array([50.0, 400.0, 100.0, 200.0])
    for power in (0.5, 1.0):
        after = clip(before, {"q": logits, "k": logits}, 0.25, power=power, heads=NO_GROUPS)
        factor = np.minimum(1, 100 / logits) ** power
        for name, cut in (("q", query), ("k", key)):
            wanted = factor[:, None, None] * (cut(before) - np.float32(0.25))
            np.testing.assert_allclose(cut(after), wanted, rtol=1e-6, atol=1e-7, err_msg=name)
        np.testing.assert_array_equal(after["v"], before["v"] - np.float32(0.25))


def test_fused_qkv_keeps_values():
    before, logits = weights(), np.full(HEADS, 400.0)
    heads = optim.by_path({"qkv": Layout(out_blocks=3 * HEADS), "**": None})
    numbers = {"qkv": jnp.concatenate([logits, logits, 0 * logits])}
    after = np.split(np.asarray(clip(before, numbers, heads=heads)["qkv"]), 3)
    start = np.split(before["qkv"], 3)
    for part in (0, 1):
        np.testing.assert_array_equal(after[part], start[part] / 2)
    np.testing.assert_array_equal(after[2], start[2])


def test_stacked_layers_accept_logit_prefix():
    params = {"attention": {"q": np.ones((2, D, HEADS, WIDTH), np.float32), "v": np.ones(3)}}
    heads = optim.by_path({"**/q": Layout(-3, -1), "**": None})
    geometry = {"attention": {"q": FLAT.with_axes(-3, (-2, -1)), "v": Euclidean()}}
    tx = contrib.with_qk_clip(optax.sgd(0.0), geometry, heads)
    logits = np.arange(2 * HEADS).reshape(2, HEADS) * 100.0
    given: Any = {"max_logits": {"attention": logits}}
    updates: Any = tx.update(params, tx.init(params), params, **given)[0]
    wanted = 1 / np.sqrt(np.maximum(logits / 100, 1))
    found = np.asarray(updates["attention"]["q"])[:, 0, :, 0] + 1
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_none_in_heads_is_not_clipped():
    """`None` excludes a parameter or a whole branch."""
    weight = np.ones((D, HEADS, WIDTH), np.float32)
    params = {"attention": {"q": weight, "v": weight}, "mlp": {"up": weight, "bias": np.ones(3)}}
    heads = {"attention": {"q": APART, "v": None}, "mlp": None}
    tx = contrib.with_qk_clip(optax.sgd(0.0), Euclidean(), heads)
    for logits in ({"attention": 400.0}, {"attention/q": 400.0, "attention/v": None}):
        updates: Any = tx.update(params, tx.init(params), params, max_logits=logits)[0]
        np.testing.assert_array_equal(updates["attention"]["q"], -0.5)
        assert not any(np.any(x) for x in (updates["attention"]["v"], *updates["mlp"].values()))


def test_nested_wrappers_clip_shared_rotary_keys():
    """Multi-head latent attention: two wrappers read the same tree of logits."""
    before, logits = weights(), np.array([50.0, 400.0, 100.0, 1600.0])
    tx = contrib.with_qk_clip(optax.sgd(0.0), FLAT, optim.by_path({"k": FUSED, "**": None}))
    tx = contrib.with_qk_clip(tx, FLAT, optim.by_path({"q": APART, "**": None}), power=1.0)
    given: Any = {"max_logits": {"q": logits, "k": logits}}
    updates: Any = jax.jit(tx.update)(before, tx.init(before), before, **given)[0]
    factors = {"q": [1, 1 / 4, 1, 1 / 16], "k": [1, 1 / 2, 1, 1 / 4]}
    for name, cut in (("q", query), ("k", key)):
        after = {name: before[name] + np.asarray(updates[name])}
        wanted = np.array(factors[name])[:, None, None] * cut(before)
        np.testing.assert_allclose(cut(after), wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("logit", [np.nan, np.inf, -np.inf, 0.0, -400.0])
def test_small_or_invalid_logits_clip_nothing(logit):
    before = weights()
    after = clip(before, logit, heads=NO_GROUPS)
    for name in SHAPES:
        np.testing.assert_array_equal(after[name], before[name])


def test_master_copies_are_clipped_in_float32():
    """The bfloat16 parameters are the rounded copies."""
    params = {"q": jnp.asarray(weights()["q"], jnp.bfloat16)}
    inner = contrib.with_qk_clip(optim.muon(0.01, FLAT.with_axes(0, (1, 2))), FLAT, {"q": APART})
    tx: Any = optim.with_master_copies(inner)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, state = tx.update(zeros, tx.init(params), params, max_logits={"q": 300.0})
    wanted = np.asarray(params["q"], np.float32) / np.sqrt(np.float32(3))
    np.testing.assert_allclose(state.copies["q"], wanted, rtol=1e-6)
    found: Any = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(found["q"], jnp.asarray(wanted, jnp.bfloat16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_logits": None}, "with_qk_clip needs max_logits: call tx.update"),
        ({"max_logits": {"q": np.ones(3)}}, r"of 'q' must have .* \(4,\), .* got shape \(3,\)"),
        ({"max_logits": {"q": None}}, r"shape of its heads, \(4,\), .* got shape None"),
        ({"max_logits": {"v": 1.0}}, "max_logits has no entry for the parameter 'q'"),
        ({"max_logits": {"q": 1.0, "w": 1.0}}, r"the entries \['w'\] describe no parameter"),
        ({"geometry": {"q": Stiefel().with_axes(0, (1, 2)), "v": FLAT}}, r"\['q'\] are con"),
        ({"heads": optim.by_path({"q": 4, "v": None})}, "the entry of 'q' is 4; give a Layout"),
        ({"heads": {"q": Layout(in_blocks=2), "v": FUSED}}, "parameter 'q': .* does not divide"),
        ({"heads": optim.by_path({"q": FUSED, "v": None})}, r"\(8, 4\), .* got shape \(4,\)"),
        ({"heads": optim.by_path({"q": APART})}, r"no pattern matches the parameters \['v'\]"),
    ],
)
def test_invalid_arguments_raise(change, message):
    params = {"q": np.ones((D, HEADS, WIDTH), np.float32), "v": np.ones((D, D), np.float32)}
    given: dict[str, Any] = {
        "geometry": {"q": FLAT.with_axes(0, (1, 2)), "v": FLAT},
        "heads": optim.by_path({"q": APART, "v": None}),
        "max_logits": {"q": np.ones(HEADS)},
    } | change
    logits = given.pop("max_logits")

    def step():
        tx = contrib.with_qk_clip(optax.sgd(0.1), **given)
        tx.update(params, tx.init(params), params, max_logits=logits)

    with pytest.raises((ValueError, TypeError), match=message):
        step()
