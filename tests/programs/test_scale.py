"""The benchmark of large models: costs read from compiled programs."""

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks._programs import read
from benchmarks.scale import Row, compiled, link_seconds, optimizers
from benchmarks.steps import step_of, tree

# Two matrices, 8 x 16 by 16 x 4: five products of highest precision in a loop, each with a gather
# of 64 x 4 by four chips, and a product in a loop of unknown length. Outside the loops: an
# all-to-all by eight; a gather, written twice because it overlaps with the bfloat16 product; two
# conditionals between nothing, and a copy followed by the loop of unknown length; and an
# asynchronous permutation and all-reduce. Instructions that are not read are left out.
PROGRAM = """
%fused (p.0: f32[2,8,16], p.1: f32[2,16,4]) -> f32[2,8,4] {
  %p.0 = f32[2,8,16]{2,1,0:T(8,128)} parameter(0)
  %p.1 = f32[2,16,4]{2,1,0:T(8,128)S(1)} parameter(1)
  ROOT %c.0 = f32[2,8,4]{2,1,0:T(8,128)S(1)} convolution(%p.0, %p.1), window={size=2 stride=1 lhs_dilate=2}, dim_labels=0bf_0io->0bf, operand_precision={highest,highest}
}
%body.1 (carry: (s32[], f32[2,8,16], f32[2,16,4])) -> (s32[], f32[2,8,16], f32[2,16,4]) {
  %f.0 = f32[2,8,4] fusion(%a, %b), kind=kOutput, calls=%fused, backend_config={"estimated_cycles":"100"}
  %g.0 = f32[64,4] all-gather(%x), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}
  ROOT %t = (s32[], f32[2,8,16], f32[2,16,4]) tuple(%i, %a, %b)
}
%condition.1 (carry.1: (s32[], f32[2,8,16], f32[2,16,4])) -> pred[] {
  %i.1 = s32[] get-tuple-element(%carry.1), index=0
  %six = s32[] constant(6)
  ROOT %lt = pred[] compare(%i.1, %six), direction=LT
}
%condition.2 (carry.2: (s32[], f32[2,8,16], f32[2,16,4])) -> pred[] {
  ROOT %some = pred[] and(%i, %i)
}
%start (q.0: bf16[8,8]) -> (bf16[8,8], bf16[32,8]) {
  %q.0 = bf16[8,8] parameter(0)
  %g.1 = bf16[32,8] all-gather(%q.0), channel_id=2, replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
}
%async_collective_fusion.1 (q.1: bf16[8,8]) -> bf16[8,8] {
  %q.1 = bf16[8,8] parameter(0)
  %g.2 = bf16[32,8] all-gather(%q.1), channel_id=2, replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
  ROOT %c.1 = bf16[8,8] convolution(%q.1, %q.1), dim_labels=bf_io->bf, operand_precision={highest,highest}
}
%near (n: (s32[], f32[2,8,16], f32[2,16,4])) -> (s32[], f32[2,8,16], f32[2,16,4]) {
  ROOT %n = (s32[], f32[2,8,16], f32[2,16,4]) parameter(0)
}
%far (m: (s32[], f32[2,8,16], f32[2,16,4])) -> (s32[], f32[2,8,16], f32[2,16,4]) {
  %m = (s32[], f32[2,8,16], f32[2,16,4]) parameter(0)
  %m.1 = (s32[], f32[2,8,16], f32[2,16,4]) copy(%m), backend_config={"estimated_cycles":"30"}
  ROOT %w.3 = (s32[], f32[2,8,16], f32[2,16,4]) while(%m.1), condition=%condition.2, body=%body.1
}
ENTRY %main (x.0: f32[2,8,16], x.1: f32[2,16,4]) -> f32[8,32] {
  %one = s32[] constant(1)
  %first = s32[] copy(%one)
  %init = (s32[], f32[2,8,16], f32[2,16,4]) tuple(%first, %x.0, %x.1)
  %w.1 = (s32[], f32[2,8,16], f32[2,16,4]) while(%init), condition=%condition.1, body=%body.1
  %w.2 = (s32[], f32[2,8,16], f32[2,16,4]) while(%init), condition=%condition.2, body=%body.1
  %if = (s32[], f32[2,8,16], f32[2,16,4]) conditional(%far.1, %w.2, %w.2), branch_computations={%far, %near}
  %if.1 = (s32[], f32[2,8,16], f32[2,16,4]) conditional(%far.2, %if, %if), true_computation=%near, false_computation=%far
  %f.1 = (bf16[8,8], bf16[32,8]) fusion(%x.0), kind=kCustom, calls=%start
  %f.2 = bf16[8,8] fusion(%x.0), kind=kCustom, calls=%async_collective_fusion.1, backend_config={"estimated_cycles":"7"}
  %cp = (f32[8,4], f32[8,4], u32[], u32[]) collective-permute-start(%x.0), channel_id=4, source_target_pairs={{0,1},{1,0}}
  %ar = (f32[8,2], f32[8,2]) all-reduce-start(%x.0, %x.0), channel_id=5, replica_groups=[1,8]<=[8], to_apply=%near
  ROOT %a2a = f32[8,32] all-to-all(%x.0), channel_id=3, replica_groups=mesh['axis_0'=8,'axis_1'=1] {'axis_0'}, dimensions={0}
}
"""  # noqa: E501


def test_costs_are_read_from_program():
    work = read(PROGRAM)
    product, other = 2 * 2 * 8 * 16 * 4, 2 * 8 * 8 * 8
    assert work.flops == {6: (5 + 1) * product, 1: other}
    assert work.flops_once == 2 * product + other
    assert work.multiplier_flops == 36 * product + other
    assert work.cycles == 6 * 100 + 7
    in_loop, beside, all_to_all = 64 * 4 * 4 * 3 / 4, 32 * 8 * 2 * 3 / 4, 8 * 32 * 4 * 7 / 8
    permuted, reduced = 8 * 4 * 4, 2 * 8 * 2 * 4 * 2 * 7 / 8
    assert work.collectives == {
        "all-gather": [7, 6 * in_loop + beside],
        "all-to-all": [1, all_to_all],
        "collective-permute": [1, permuted],
        "all-reduce": [1, reduced],
    }
    assert work.moved == 6 * in_loop + beside + all_to_all + permuted + reduced
    assert (work.collectives_in_loops, work.unknown_loops) == (2, 1)
    costliest = read(PROGRAM, max)
    assert costliest.flops == {6: (5 + 1 + 2) * product, 1: other}
    assert costliest.flops_once == 4 * product + other
    assert costliest.cycles == work.cycles + 2 * (30 + 100)
    assert costliest.moved == work.moved + 2 * in_loop
    assert (costliest.collectives_in_loops, costliest.unknown_loops) == (4, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "without_tangent_part"),
    [("manifold_muon, ProjectedPolar()", {False, True}), ("manifold_muon, ClosedForm()", {False})],
)
def test_training_steps_take_cheap_branches(monkeypatch, name, without_tangent_part):
    """The cost of a program counts the cheap branches; a false predicate selects them."""
    found, cond = set(), jax.lax.cond

    def listen(predicate, *branches_and_operands):
        jax.debug.callback(lambda taken: found.add(bool(taken)), predicate)
        return cond(predicate, *branches_and_operands)

    monkeypatch.setattr(jax.lax, "cond", listen)
    params, tx = tree(2, 20, stacked=True), optimizers()[name]
    state, step, rng = tx.init(params), jax.jit(step_of(tx)), np.random.default_rng(0)
    for _ in range(10):
        grads = {k: np.float32(rng.standard_normal(x.shape)) for k, x in params.items()}
        params, state = step(params, state, grads)
    jax.effects_barrier()
    assert found == {False}
    step(params, tx.init(params), params)  # gradients without a tangent part
    jax.effects_barrier()
    assert found == without_tangent_part


def test_text_without_program_raises():
    with pytest.raises(ValueError, match="no ENTRY"):
        read("")


def test_products_on_cpus_count_every_iteration():
    power = jax.jit(lambda x: jax.lax.fori_loop(0, 7, lambda _, y: y @ x, x) @ jnp.ones((64, 3)))
    text = power.lower(jnp.ones((64, 64))).compile().as_text()
    assert text is not None
    assert read(text).multiplier_flops == 2 * (7 * 64**3 + 64 * 64 * 3)


def test_all_to_all_is_limited_by_bisection():
    all_to_all, gather = {"all-to-all": [1.0, 9e9]}, {"all-gather": [1.0, 9e9]}
    # An open line of eight: four chips each send half of 9 GB over a single link of 45 GB/s.
    assert link_seconds(Row(1, 1, "v5e:8x8"), all_to_all) == pytest.approx(4 * 4.5 / 45)
    # A ring of sixteen: eight chips send, over two crossings.
    assert link_seconds(Row(1, 1, "v5e:16x16"), all_to_all) == pytest.approx(8 * 4.5 / 45 / 2)
    # Six links of 90 GB/s, in three rings.
    assert link_seconds(Row(1, 1, "v5p:4x4x4"), gather) == pytest.approx(9 / (6 * 90))
    both = link_seconds(Row(1, 1, "v5e:8x8"), all_to_all | gather)
    assert both == pytest.approx(0.4 + 9 / 90)


def test_experts_are_counted_and_not_gathered():
    """Eight CPU devices as chips: four groups with two experts per layer, in two columns."""
    row = Row(2, 64, "v5e:2x4", experts=8, hidden=32, active=2, parts=4)
    attention, expert = 2 * 4 * 64**2, 2 * 2 * 64 * 32
    assert (row.parameters, row.taken) == (attention + 8 * expert, attention + 2 * expert)
    chips: Any = types.SimpleNamespace(devices=jax.devices()[:8])
    text = compiled(row, chips, "float32", optimizers()["muon"]).as_text()
    assert text.count(" all-to-all(") > 0
    assert "all-gather" not in text


@pytest.mark.parametrize(
    ("row", "share"),
    [
        # Per chip: one of twelve squares, plus another square or one of three tall or three wide
        # matrices. A square costs 14 d^3, the others 20 d^3.
        (Row(3, 256, "v5e:2x4"), (14 + 14 + 20) / (14 + 14 + 20 + 20)),
        (Row(8, 256, "v5e:2x4"), 1),
        (Row(2, 64, "v5e:2x4", experts=8, hidden=32, active=2, parts=4), 1),
    ],
    ids=["uneven", "even", "experts"],
)
def test_busiest_chip_shares_work_over_shapes(row, share):
    assert row.busiest == pytest.approx(share)
