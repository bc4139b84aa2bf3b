"""The reshard planner: plans are right for every pair of layouts, and as cheap as they should be."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fparallel.compiler.reshard import cost, plan
from fparallel.errors import LayoutError
from fparallel.layout import Layout, parse, same
from fparallel.mesh import Mesh, axes_text, make_mesh
from fparallel.schedule.geometry import apply
from tests.strategies import laid_out, laid_out_twice, layouts, meshes, shapes, spread, whole_numbers

MESH = make_mesh((2, 2, 4), ("dp", "ep", "tp"), kind="simulated")


def layout(text: str) -> Layout:
    return parse(text, MESH)[1]


def written(steps) -> list[str]:
    return [f"{step.kind}[{axes_text(step.axes)}]" for step in steps]


def reshard(shards: list[torch.Tensor], src: Layout, dst: Layout, mesh: Mesh) -> list[torch.Tensor]:
    for step in plan(src, dst):
        shards = apply(step.kind, step.axes, step.reduce, step.src, step.dst, mesh, shards)
    return shards


# ---------------------------------------------------------------- examples

# One-byte elements; n = 2 along dp and ep, 4 along tp. A group of n sends (n-1)/n of what is whole.
CASES = [
    # Free: cutting what is replicated, writing a replicated value as a sum of one part.
    ("[8,4]", "[8@dp,4@tp]", ["slice[dp*tp]"], 0),
    ("[8@dp,4]", "[8@dp*tp,4]", ["slice[tp]"], 0),
    ("[8,4]", "[8,4]{unreduced: dp:sum}", ["mask[dp]"], 0),
    # One collective.
    ("[8@dp,4]", "[8,4]", ["all_gather[dp]"], 32 / 2),
    ("[8@tp,4]", "[8,4]", ["all_gather[tp]"], 32 * 3 / 4),
    ("[8@dp*tp,4]", "[8,4]", ["all_gather[dp*tp]"], 32 * 7 / 8),
    ("[8@dp*tp,4]", "[8@dp,4]", ["all_gather[tp]"], 16 * 3 / 4),
    ("[8@tp,4@dp]", "[8,4@dp]", ["all_gather[tp]"], 16 * 3 / 4),
    ("[8@tp,4]", "[8@tp:(1)2,4]", ["all_gather[tp:(2)2]"], 16 / 2),
    ("[8,4]{unreduced: tp:sum}", "[8,4]", ["all_reduce[tp]"], 2 * 32 * 3 / 4),
    ("[8,4]{unreduced: dp:sum, tp:sum}", "[8,4]", ["all_reduce[dp*tp]"], 2 * 32 * 7 / 8),
    ("[8,4]{unreduced: dp:sum, tp:sum}", "[8,4]{unreduced: dp:sum}", ["all_reduce[tp]"], 2 * 32 * 3 / 4),
    ("[8,4]{unreduced: dp:sum}", "[8@dp,4]", ["reduce_scatter[dp]"], 32 / 2),
    ("[8,4]{unreduced: dp:max, tp:max}", "[8@dp*tp,4]", ["reduce_scatter[dp*tp]"], 32 * 7 / 8),
    ("[8@dp,4]{unreduced: tp:sum}", "[8@dp,4@tp]", ["reduce_scatter[tp]"], 16 * 3 / 4),
    ("[8@tp,4]", "[8,4@tp]", ["all_to_all[tp]"], 8 * 3 / 4),
    ("[8@dp*tp,4]", "[8@dp,4@tp]", ["all_to_all[tp]"], 4 * 3 / 4),
    ("[8@dp*ep,4]", "[8,4@dp*ep]", ["all_to_all[dp*ep]"], 8 * 3 / 4),
    ("[8@dp*tp,4]", "[8@tp*dp,4]", ["permute[dp*tp]"], 4 * 7 / 8),
    ("[8@dp,4]", "[8@ep,4]", ["permute[dp*ep]"], 16 * 3 / 4),
    ("[8@dp,4@ep]", "[8@ep,4@dp]", ["permute[dp*ep]"], 8 * 3 / 4),
    # Within one dim: only the part that differs moves.
    ("[8@dp*tp,4]", "[(2 4@tp),4]", ["all_gather[dp]"], 8 / 2),
    ("[(4@tp 2),4]", "[(4 2@dp),4]", ["slice[dp]", "all_gather[tp]"], 16 * 3 / 4),
    # Shrink first, grow last.
    ("[8@dp,4]", "[8,4@tp]", ["slice[tp]", "all_gather[dp]"], 8 / 2),
    ("[8@tp,4]{unreduced: dp:sum}", "[8,4@dp]", ["reduce_scatter[dp]", "all_gather[tp]"], 8 / 2 + 16 * 3 / 4),
    ("[8@tp,4]{unreduced: dp:sum}", "[8,4]", ["all_reduce[dp]", "all_gather[tp]"], 8 + 32 * 3 / 4),
    ("[8@dp,4]{unreduced: tp:sum}", "[8@tp*dp,4]", ["reduce_scatter[tp]", "permute[dp*tp]"], 12 + 3.5),
    # Uneven: the average over the group is charged, not padding.
    ("[5@tp,4]", "[5,4]", ["all_gather[tp]"], 20 * 3 / 4),
    ("[5@tp,4]", "[5,4@tp]", ["all_to_all[tp]"], 5 * 3 / 4),
    ("[5,4]{unreduced: tp:sum}", "[5@tp,4]", ["reduce_scatter[tp]"], 20 * 3 / 4),
    ("[8,4]{unreduced: dp:sum}", "[8,4]{unreduced: dp:max}", ["all_reduce[dp]", "mask[dp]"], 2 * 32 / 2),
]


@pytest.mark.parametrize(("src", "dst", "steps", "sent"), CASES, ids=[f"{a}->{b}" for a, b, _, _ in CASES])
def test_known_plans_and_their_payload(src, dst, steps, sent):
    assert written(plan(layout(src), layout(dst))) == steps
    assert cost(layout(src), layout(dst), 1) == sent
    assert cost(layout(src), layout(dst), 4) == 4 * sent


def test_no_step_where_every_rank_has_its_part():
    assert plan(layout("[8@dp,4]"), layout("[8@dp,4]")) == ()
    assert plan(layout("[8@tp,4]"), layout("[8@tp:(1)2*tp:(2)2,4]")) == ()
    assert plan(layout("[1@dp*tp]"), layout("[1@tp*dp]")) == ()
    assert plan(layout("[0@dp]"), layout("[0@tp]")) == ()


def test_dims_without_common_factors_are_gathered():
    steps = plan(layout("[(4@dp 6@ep)]"), layout("[(3@tp 8)]"))
    assert {step.kind for step in steps[:-1]} == {"all_gather"}
    assert written(steps[-1:]) == ["slice[tp]"]


def test_a_permutation_is_preferred_only_where_it_sends_less():
    mesh = make_mesh((8, 2), ("dp", "tp"), kind="abstract")
    src, dst = (parse(text, mesh)[1] for text in ("[16@tp]", "[16@dp]"))
    # All elements to halves and back: 8 of 16 sent; or a slice to 1/16 each, then one element each.
    assert written(plan(src, dst)) == ["slice[dp]", "permute[dp*tp]", "all_gather[tp]"]
    assert cost(src, dst, 1) == 1 * 15 / 16 + 2 / 2


AWKWARD = [
    # A sharded factor of 1 says the same anywhere in its dim.
    ((4, 2), ("dp", "tp"), "[(1@tp 4@dp)]", "[(4@dp:(2)2 1@tp)]"),
    ((4, 2), ("dp", "tp"), "[4@dp*tp]", "[(1@tp 4@dp:(2)2)]"),
    ((4,), ("dp",), "[(2 1@dp)]", "[2@dp:(2)2]"),
    # Uneven factors whose axis the other layout cuts into digits.
    ((2, 6), ("dp", "tp"), "[4@tp,6]", "[(2 2@tp:(3)2),6@tp:(1)3]{unreduced: dp:sum}"),
    ((4, 4), ("dp", "tp"), "[6@dp]", "[(3@dp:(1)2 2)]"),
    ((4, 4), ("dp", "tp"), "[(4 2@tp:(2)2)]", "[8@dp:(2)2*tp]"),
    ((4,), ("dp",), "[1@dp,2]", "[1,2@dp:(1)2*dp:(2)2]"),
    # The axis of a pending sum that another axis gives way to.
    ((2, 4), ("dp", "tp"), "[2@dp]{unreduced: tp:sum}", "[2@tp:(2)2]"),
    # Digits that do not nest are no independent axes.
    ((6,), ("dp",), "[6@dp:(3)2]", "[6@dp:(2)3]"),
]


@pytest.mark.parametrize(("sizes", "names", "src", "dst"), AWKWARD)
def test_awkward_pairs(sizes, names, src, dst):
    mesh = make_mesh(sizes, names, kind="simulated")
    for a, b in ((src, dst), (dst, src)):
        before, after = parse(a, mesh)[1], parse(b, mesh)[1]
        value = whole_numbers(before.shape)
        shards = reshard(spread(value, before, mesh), before, after, mesh)
        assert [shard.shape for shard in shards] == [after.local_shape(at) for at in mesh.rank_coords]
        assert torch.equal(after.unshard(shards, mesh), value)


def test_shapes_must_agree():
    with pytest.raises(LayoutError, match="their shapes differ") as error:
        plan(layout("[8]"), layout("[4]"))
    assert str(error.value).endswith("Fix: reshape before resharding")


def test_steps_print_with_their_layouts():
    (step,) = plan(layout("[8@dp,4]"), layout("[8,4@dp]"))
    assert str(step) == "all_to_all[dp] [8@dp,4] -> [8,4@dp]"


# ---------------------------------------------------------------- laws


@given(laid_out_twice())
def test_a_plan_gives_every_rank_its_part(case):
    mesh, src, dst = case
    value = whole_numbers(src.shape)
    shards = reshard(spread(value, src, mesh), src, dst, mesh)
    for coords, shard in zip(mesh.rank_coords, shards, strict=True):
        assert shard.shape == dst.local_shape(coords)
        if not dst.unreduced:
            assert torch.equal(shard, dst.shard(value, coords))
    assert torch.equal(dst.unshard(shards, mesh), value)


@given(laid_out_twice())
def test_steps_chain(case):
    _, src, dst = case
    steps = plan(src, dst)
    assert [step.src for step in steps] == [src, *[step.dst for step in steps]][: len(steps)]
    assert not steps or steps[-1].dst == dst
    for step in steps:
        assert not same(step.src, step.dst)
        assert all(axis.size > 1 for axis in step.axes)
        assert bool(step.reduce) == (step.kind in ("all_reduce", "reduce_scatter", "mask"))


@given(laid_out())
def test_nothing_to_do_from_a_layout_to_itself(case):
    _, layout = case
    assert plan(layout, layout) == ()


@given(st.data(), meshes(), shapes())
def test_reshard_paths_commute(data, mesh, shape):
    src, via, dst = (data.draw(layouts(mesh, shape, unreduced=False)) for _ in range(3))
    shards = spread(whole_numbers(shape), src, mesh)
    direct = reshard(shards, src, dst, mesh)
    detour = reshard(reshard(shards, src, via, mesh), via, dst, mesh)
    assert all(torch.equal(a, b) for a, b in zip(direct, detour, strict=True))


@given(laid_out_twice())
def test_only_local_plans_cost_nothing(case):
    _, src, dst = case
    if 0 not in src.shape:
        assert (cost(src, dst, 1) == 0) == all(step.local for step in plan(src, dst))


@given(laid_out_twice())
def test_no_plan_costs_more_than_gathering_everything(case):
    _, src, dst = case
    kept = src.unreduced if src.unreduced == dst.unreduced else ()
    whole = Layout(Layout.replicated(src.shape).dims, kept)
    assert cost(src, dst, 1) <= cost(src, whole, 1)


@given(laid_out_twice(unreduced=False))
def test_what_every_rank_holds_already_is_never_sent(case):
    """If every rank's part lies in its old one, the plan is local."""
    mesh, src, dst = case
    inside = all(
        set(new.tolist()) <= set(old.tolist())
        for coords in mesh.rank_coords
        for old, new in zip(src.indices(coords), dst.indices(coords), strict=True)
    )
    if inside and 0 not in src.shape and src.is_even and dst.is_even:
        assert cost(src, dst, 1) == 0
