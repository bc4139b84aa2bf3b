"""What collectives move, from layouts alone."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fparallel.layout import Layout, parse
from fparallel.mesh import make_mesh
from fparallel.schedule.geometry import (
    all_to_all_geometry,
    apply,
    gather_geometry,
    member_coords,
    permute_sources,
    scatter_geometry,
)
from tests.strategies import axis_pieces, meshes, whole_numbers

MESH = make_mesh((2, 4), ("dp", "tp"), kind="simulated")
FIRST = {"dp": 0, "tp": 0}


def layout(text: str) -> Layout:
    return parse(text, MESH)[1]


@pytest.mark.parametrize(
    ("text", "axes", "view"),
    [
        ("[3,8@tp,5]", "tp", (3, (2, 2, 2, 2), 5)),
        ("[3,7@tp]", "tp", (3, (2, 2, 2, 1), 1)),
        ("[3,2@tp]", "tp", (3, (1, 1, 0, 0), 1)),
        ("[6@tp,8@dp]", "dp", (2, (4, 4), 1)),
        ("[16@dp*tp,3]", "tp", (1, (2, 2, 2, 2), 3)),
        ("[16@dp*tp,3]", "dp*tp", (1, (2,) * 8, 3)),
        ("[5@dp*tp]", "tp", (1, (1, 1, 1, 0), 1)),
        ("[(3 8@tp 5),7]", "tp", (3, (10,) * 4, 7)),
        ("[16@tp,3]", "tp:(2)2", (1, (4, 4), 3)),
        ("[16@dp*tp,3]", "dp", (1, (1, 1), 6)),  # 16@dp*tp is (2@dp 8@tp): leaves (2 8@tp)
    ],
)
def test_views_of_gathers_and_scatters(text, axes, view):
    assert gather_geometry(layout(text), MESH.axes(axes), FIRST) == view
    assert scatter_geometry(layout(text), MESH.axes(axes), FIRST) == view


def test_views_depend_on_the_rank_where_pieces_are_uneven():
    at = {"dp": 1, "tp": 0}
    assert gather_geometry(layout("[5@dp*tp]"), MESH.axes("tp"), at) == (1, (1, 1, 0, 0), 1)


def test_no_geometry_for_axes_that_shard_nothing():
    with pytest.raises(AssertionError, match=r"no factor of \[8@tp\] ends with the axes dp"):
        gather_geometry(layout("[8@tp]"), MESH.axes("dp"), FIRST)


def test_blocks_of_an_all_to_all():
    move = all_to_all_geometry(layout("[5@tp,6,2]"), layout("[5,6@tp,2]"), MESH.axes("tp"), FIRST)
    assert move.split == (2, (2, 2, 2, 0), 2)  # two rows of 6 columns
    assert move.concat == (1, (2, 2, 1, 0), 4)  # two columns of 5 rows
    assert move.send_shape(3) == (2, 0, 2)
    assert move.recv_shape(2) == (1, 1, 4)


@given(st.data(), st.integers(0, 9), st.integers(0, 9))
def test_blocks_of_an_all_to_all_match_between_peers(data, rows, columns):
    src, dst = layout(f"[{rows}@tp,3,{columns}]"), layout(f"[{rows},3,{columns}@tp]")
    axes = MESH.axes("tp")
    if 0 in (rows, columns):
        return  # an empty dim has no axes to move
    moves = [all_to_all_geometry(src, dst, axes, at) for at in member_coords(axes, FIRST)]
    for i, mine in enumerate(moves):
        for j, theirs in enumerate(moves):
            assert math.prod(mine.send_shape(j)) == math.prod(theirs.recv_shape(i))


@given(st.data(), meshes())
def test_members_are_the_group_of_the_mesh(data, mesh):
    axes = tuple(a for a in data.draw(axis_pieces(mesh)) if data.draw(st.booleans()))
    for coords in mesh.rank_coords:
        assert [mesh.rank(at) for at in member_coords(axes, coords)] == list(mesh.group(axes, coords))


def test_a_permutation_takes_every_shard_once():
    src, dst, axes = layout("[8@dp*tp]"), layout("[8@tp*dp]"), MESH.axes("dp*tp")
    # Rank (dp, tp) has element 4 dp + tp and needs element 2 tp + dp.
    assert permute_sources(src, dst, axes, FIRST) == (0, 2, 4, 6, 1, 3, 5, 7)
    assert permute_sources(src, layout("[8@tp]"), axes, FIRST) is None


def test_a_permutation_keeps_what_is_in_place():
    mesh = make_mesh((2, 2), ("a", "b"), kind="simulated")
    src, dst = (parse(text, mesh)[1] for text in ("[4@a]", "[4@b]"))
    assert permute_sources(src, dst, mesh.axes("a*b"), {"a": 0, "b": 0}) == (0, 2, 1, 3)


def test_sums_are_in_absolute_rank_order_whatever_the_order_of_the_group():
    parts = [torch.tensor([x]) for x in (1e8, 1.0, -1e8, 1.0)]
    mesh = make_mesh((2, 2), ("a", "b"), kind="simulated")
    whole = parse("[1]", mesh)[1]
    summed = parse("[1]{unreduced: a:sum, b:sum}", mesh)[1]
    ascending = parts[0] + parts[1] + parts[2] + parts[3]
    for axes in ("a*b", "b*a"):
        results = apply("all_reduce", mesh.axes(axes), "sum", summed, whole, mesh, parts)
        assert all(torch.equal(x, ascending) for x in results)


@pytest.mark.parametrize("kind", ["all_gather", "all_reduce", "permute", "slice", "mask"])
def test_results_share_no_storage(kind):
    mesh = make_mesh((2,), ("a",), kind="simulated")
    texts = {
        "all_gather": ("[2@a]", "[2]"),
        "all_reduce": ("[2]{unreduced: a:sum}", "[2]"),
        "permute": ("[2@a]", "[2@a]"),
        "slice": ("[2]", "[2@a]"),
        "mask": ("[2]", "[2]{unreduced: a:sum}"),
    }
    src, dst = (parse(text, mesh)[1] for text in texts[kind])
    shards = [src.drop_unreduced().shard(whole_numbers((2,)), at).clone() for at in mesh.rank_coords]
    results = apply(kind, mesh.axes("a"), "sum", src, dst, mesh, shards)
    pointers = [x.untyped_storage().data_ptr() for x in shards + results]
    assert len(set(pointers)) == 4
