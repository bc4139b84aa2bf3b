"""Layouts: what every rank holds, and the laws of factors, sub-axes and text."""

import itertools
import math

import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st

from fparallel.errors import LayoutError
from fparallel.factors import (
    Factor,
    align,
    chunk_sizes,
    common_refinement,
    compact,
    normal_dim,
    regroup,
    split_factor,
)
from fparallel.layout import Layout, parse, same, typed
from fparallel.layout import mesh_atoms as atoms_in
from fparallel.mesh import make_mesh
from tests.strategies import (
    chains,
    factorizations,
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


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("[(2 4)]", "[8]"),
        ("[(2@dp 4)]", "[8@dp]"),
        ("[(2@dp 4@tp)]", "[8@dp*tp]"),  # 2@dp is fully sharded
        ("[(4@dp 4@tp)]", "[(4@dp 4@tp)]"),  # two rows a rank: not an interval
        ("[(3@tp 2)]", "[6@tp]"),  # pieces of 2, 2, 2, 0
        ("[(5@tp 3)]", "[(5@tp 3)]"),  # pieces of 6, 6, 3, 0 are not those of 15@tp
        ("[(1 8@tp 1)]", "[8@tp]"),
        ("[(6@dp 1@tp)]", "[(1@tp 6@dp)]"),  # one rank has it, wherever the factor of 1 stands
        ("[(0@tp 3@dp)]", "[0]"),
        ("[8@tp:(1)2*tp:(2)2]", "[8@tp]"),
        ("[5@tp:(1)2*tp:(2)2]", "[5@tp:(1)2*tp:(2)2]"),  # pieces of 2, 1, 1, 1; those of 5@tp are 2, 2, 1, 0
    ],
)
def test_normal_forms(text, normal):
    assert str(layout(text)) == normal


def test_common_refinement():
    assert common_refinement((6, 4), (3, 8)) == (3, 2, 4)
    assert common_refinement((4, 6), (3, 8)) is None
    assert common_refinement((24,), (2, 12), (4, 6)) == (2, 2, 6)


@pytest.mark.parametrize(
    ("factor", "major", "parts"),
    [
        ("8@dp", 4, "4@dp 2"),
        ("8@dp*tp", 2, "2@dp 4@tp"),
        ("8@dp*tp", 4, None),
        ("6@tp", 3, "3@tp 2"),
        ("6@tp", 2, None),
    ],
)
def test_split_factor(factor, major, parts):
    split = split_factor(layout(f"[{factor}]").dims[0][0], major)
    assert (None if split is None else " ".join(map(str, split))) == parts


def test_align_puts_two_dims_on_one_chain():
    def aligned(a: str, b: str):
        pair = align(layout(a).dims[0], layout(b).dims[0])
        return None if pair is None else tuple(" ".join(map(str, dim)) for dim in pair)

    assert aligned("[8@dp*tp]", "[(2 4@tp)]") == ("2@dp 4@tp", "2 4@tp")
    assert aligned("[8@tp]", "[(2 4@dp)]") == ("2@tp:(1)2 4@tp:(2)2", "2 4@dp")
    assert aligned("[6]", "[(1@dp 6@tp)]") == ("1 6", "1@dp 6@tp")
    assert aligned("[(4@dp 6@tp)]", "[(3@dp 8)]") is None


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
def test_normal_form_keeps_index_sets_and_is_its_own(data, mesh):
    chain = data.draw(chains(mesh))
    normal = normal_dim(chain)
    assert index_sets(Layout((tuple(chain),)), mesh) == index_sets(Layout((normal,)), mesh)
    assert normal_dim(normal) == normal
    assert len(normal) <= len(chain)


@given(st.data(), meshes())
def test_a_view_of_shards_is_the_shards_of_the_view(data, mesh):
    """Two groupings of one chain of factors into dims are one layout of two shapes: the view is local."""
    chain = data.draw(chains(mesh))
    before, after = (Layout.of(data.draw(groupings(chain))) for _ in range(2))
    value = whole_numbers(before.shape)
    for coords in mesh.rank_coords:
        view = before.shard(value, coords).reshape(after.local_shape(coords))
        assert torch.equal(view, after.shard(value.reshape(after.shape), coords))


@given(st.data(), meshes())
def test_regroup_keeps_index_sets(data, mesh):
    dim = data.draw(layouts(mesh, (data.draw(st.sampled_from([8, 12, 16, 24])),))).dims[0]
    sizes = data.draw(factorizations(math.prod(f.size for f in dim)))
    for cut_axes in (False, True):
        regrouped = regroup(dim, sizes, cut_axes=cut_axes)
        if regrouped is not None:
            assert tuple(f.size for f in regrouped) == sizes
            assert index_sets(Layout((regrouped,)), mesh) == index_sets(Layout((dim,)), mesh)


@given(st.data(), meshes())
def test_regroup_undoes_normalising(data, mesh):
    chain = [f for f in data.draw(chains(mesh)) if f.size > 1]
    regrouped = regroup(normal_dim(chain), [f.size for f in chain])
    assert regrouped is not None
    assert index_sets(Layout((regrouped,)), mesh) == index_sets(Layout((tuple(chain),)), mesh)


@given(st.data(), meshes())
def test_split_factor_keeps_index_sets(data, mesh):
    (factor,) = data.draw(chains(mesh, max_factors=1))
    for major, cut_axes in itertools.product((1, 2, 3), (False, True)):
        parts = split_factor(factor, major, cut_axes=cut_axes)
        if parts is not None:
            assert parts[0].size == major
            assert index_sets(Layout((parts,)), mesh) == index_sets(Layout(((factor,),)), mesh)


@given(laid_out_twice(unreduced=False))
def test_aligned_dims_have_one_chain_and_keep_index_sets(case):
    mesh, a, b = case
    for x, y in zip(a.dims, b.dims, strict=True):
        pair = align(x, y)
        if pair is not None:
            assert [f.size for f in pair[0]] == [f.size for f in pair[1]]
            for dim, aligned in zip((x, y), pair, strict=True):
                assert index_sets(Layout((dim,)), mesh) == index_sets(Layout((aligned,)), mesh)


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


@given(st.data(), meshes())
def test_compact_keeps_pieces(data, mesh):
    (factor,) = data.draw(chains(mesh, max_factors=1))
    joined = Factor(factor.size, compact(factor.size, factor.axes))
    assert chunk_sizes(joined.size, joined.axes) == chunk_sizes(factor.size, factor.axes)
    assert index_sets(Layout(((joined,),)), mesh) == index_sets(Layout(((factor,),)), mesh)
