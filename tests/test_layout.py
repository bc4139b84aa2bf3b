"""Layouts: what every rank holds, and the laws of sub-axes and text."""

import math

import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st

from fparallel.errors import LayoutError
from fparallel.layout import Layout, parse, same, typed
from fparallel.layout import mesh_atoms as atoms_in
from fparallel.mesh import make_mesh
from tests.strategies import (
    chains,
    groupings,
    index_sets,
    laid_out,
    laid_out_twice,
    layouts,
    meshes,
    shapes,
    spread,
    whole_numbers,
)

MESH = make_mesh((2, 4), ("dp", "tp"), kind="simulated")


def layout(text: str) -> Layout:
    return parse(text, MESH)[1]


def held(text: str) -> list[list[int]]:
    """What each rank holds of a one-dimensional layout."""
    return [layout(text).indices(coords)[0].tolist() for coords in MESH.rank_coords]


# ---------------------------------------------------------------- examples


def test_even_shards():
    assert held("[8@tp]") == [[0, 1], [2, 3], [4, 5], [6, 7]] * 2


def test_uneven_shards_are_ceil_chunks():
    assert held("[5@tp]") == [[0, 1], [2, 3], [4], []] * 2
    assert held("[2@tp]") == [[0], [1], [], []] * 2
    assert held("[0@tp]") == [[]] * 8


def test_several_axes_split_a_factor_nested():
    """Each axis cuts the current piece: gathering the minor one leaves the major one's shard (5@dp: 3, 2)."""
    assert held("[5@dp*tp]") == [[0], [1], [2], [], [3], [4], [], []]
    assert held("[8@tp*dp]") == [[0], [2], [4], [6], [1], [3], [5], [7]]


def test_a_sharded_inner_factor_is_a_strided_shard():
    assert held("[(2 4@tp)]") == [[0, 4], [1, 5], [2, 6], [3, 7]] * 2


def test_sub_axes_shard_over_a_digit():
    assert held("[4@tp:(1)2]") == [[0, 1], [0, 1], [2, 3], [2, 3]] * 2
    assert held("[4@tp:(2)2]") == [[0, 1], [2, 3], [0, 1], [2, 3]] * 2


def test_a_rank_of_an_unreduced_sum_holds_a_part():
    value = torch.tensor([1.0, 2.0])
    shards = [layout("[2]{unreduced: dp:sum}").shard(value, coords) for coords in MESH.rank_coords]
    assert [s.tolist() for s in shards] == [[1.0, 2.0]] * 4 + [[0.0, 0.0]] * 4


@pytest.mark.parametrize(
    ("reduction", "dtype", "empty"),
    [
        ("sum", torch.float32, 0.0),
        ("max", torch.float32, -math.inf),
        ("min", torch.float32, math.inf),
        ("max", torch.int8, -128),
        ("min", torch.int8, 127),
        ("max", torch.bool, False),
        ("min", torch.bool, True),
    ],
)
def test_unreduced_parts_are_the_identity_elsewhere(reduction, dtype, empty):
    part = layout(f"[1]{{unreduced: dp:{reduction}}}").shard(torch.ones(1, dtype=dtype), {"dp": 1, "tp": 0})
    assert part.item() == empty


def test_shapes_and_sizes():
    qkv = layout("[32@dp,(3 12@tp 64)]")
    assert qkv.shape == (32, 2304)
    assert qkv.local_shape({"dp": 1, "tp": 2}) == (16, 576)
    assert qkv.local_factors({"dp": 1, "tp": 2}) == ((16,), (3, 192))
    assert qkv.is_even and qkv.max_local_numel == 16 * 576
    assert not layout("[5@tp]").is_even and layout("[5@tp]").max_local_numel == 2
    assert layout("[]").local_shape({"dp": 0, "tp": 0}) == ()


def test_with_axes_keeps_the_rest():
    assert str(layout("[8@dp,4]{unreduced: tp:sum}").with_axes(1, 0, ())) == "[8@dp,4]{unreduced: tp:sum}"
    assert str(layout("[8@dp,4]").with_axes(1, 0, MESH.axes("tp"))) == "[8@dp,4@tp]"


def test_mesh_atoms_cut_at_every_boundary_in_use():
    atoms = atoms_in(MESH, [layout("[8@tp:(1)2]"), layout("[8@dp]")])
    assert [str(a) for a in atoms["tp"]] == ["tp:(1)2", "tp:(2)2"]
    assert [str(a) for a in atoms["dp"]] == ["dp"]


def test_sub_axes_that_do_not_nest_are_refused():
    mesh = make_mesh((12,), ("tp",), kind="abstract")
    cuts = [parse(text, mesh)[1] for text in ("[12@tp:(1)4]", "[12@tp:(1)6]")]
    with pytest.raises(LayoutError, match=r"cut at 4 by .*4.* and at 6 by .*do not nest"):
        atoms_in(mesh, cuts)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("f32", "is not a layout"),
        ("f33[8]", "unknown dtype 'f33'"),
        ("[8@]", "is not a factor"),
        ("[a]", "is not a factor"),
        ("[8@tp,4@tp]", "uses tp twice"),
        ("[8@tp,4@tp:(2)2]", "uses tp and tp:.2.2, which share ranks"),
        ("[8@tp]{unreduced: tp:sum}", "uses tp twice"),
        ("[8]{unreduced: tp:mean}", "is unreduced by 'mean'"),
        ("[8]{unreduced: dp:max, tp:sum}", "is unreduced by 'max' and 'sum'"),
    ],
)
def test_malformed_text_is_refused(text, message):
    with pytest.raises(LayoutError, match=message) as error:
        parse(text, MESH)
    assert str(error.value).splitlines()[-1].startswith("Fix: ")


# ---------------------------------------------------------------- laws


@given(laid_out())
def test_unshard_inverts_shard(case):
    mesh, layout = case
    value = whole_numbers(layout.shape)
    shards = [layout.shard(value, coords) for coords in mesh.rank_coords]
    for coords, shard in zip(mesh.rank_coords, shards, strict=True):
        assert shard.shape == layout.local_shape(coords)
    assert torch.equal(layout.unshard(shards, mesh), value)


@given(laid_out())
def test_unshard_reduces(case):
    mesh, layout = case
    value = whole_numbers(layout.shape)
    assert torch.equal(layout.unshard(spread(value, layout, mesh), mesh), value)


@given(laid_out(unreduced=False))
def test_index_sets_tile_the_tensor_once_per_replica(case):
    mesh, layout = case
    counts = torch.zeros(math.prod(layout.shape), dtype=torch.int64)
    for held in index_sets(layout, mesh):
        counts[list(held)] += 1
    replicas = mesh.size // math.prod(axis.size for axis in layout.sharded_axes)
    assert (counts == replicas).all()


@given(laid_out())
def test_the_fullest_rank_is_the_first(case):
    mesh, layout = case
    numels = [math.prod(layout.local_shape(coords)) for coords in mesh.rank_coords]
    assert numels[0] == max(numels) == layout.max_local_numel
    if layout.is_even:
        assert len(set(numels)) == 1


@given(laid_out())
def test_text_parses_back(case):
    mesh, layout = case
    for dtype in (None, torch.float32, torch.bfloat16, torch.bool):
        text = typed(dtype, layout)
        parsed_dtype, parsed = parse(text, mesh)
        assert parsed_dtype == dtype
        assert same(parsed, layout)
        assert typed(dtype, parsed) == text


@given(st.data(), meshes())
def test_a_view_of_shards_is_the_shards_of_the_view(data, mesh):
    """Two groupings of one chain of factors into dims are one layout of two shapes: the view is local."""
    chain = data.draw(chains(mesh))
    before, after = (Layout.of(data.draw(groupings(chain))) for _ in range(2))
    value = whole_numbers(before.shape)
    for coords in mesh.rank_coords:
        view = before.shard(value, coords).reshape(after.local_shape(coords))
        assert torch.equal(view, after.shard(value.reshape(after.shape), coords))


@given(laid_out_twice())
def test_same_means_equal_index_sets(case):
    mesh, a, b = case

    def dims_held(layout: Layout) -> list:
        return [[i.tolist() for i in layout.indices(coords)] for coords in mesh.rank_coords]

    def pending(layout: Layout) -> set:
        digits = [tuple(axis.digit(at) for axis in layout.unreduced_axes) for at in mesh.rank_coords]
        return {tuple(r for r, d in enumerate(digits) if d == one) for one in set(digits)}

    equal = dims_held(a) == dims_held(b) and pending(a) == pending(b)
    kinds = {r for _, r in a.unreduced} == {r for _, r in b.unreduced}
    assert same(a, b) == (equal and kinds)


@given(st.data(), meshes(), shapes())
def test_same_sees_through_how_a_layout_is_written(data, mesh, shape):
    layout = data.draw(layouts(mesh, shape))
    other = data.draw(layouts(mesh, shape))
    try:
        atoms = atoms_in(mesh, [layout, other])
    except LayoutError:
        reject()  # cuts that do not nest
    assert same(layout, layout.split_axes(atoms))
    assert index_sets(layout, mesh) == index_sets(layout.split_axes(atoms), mesh)
