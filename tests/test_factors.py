"""Factors: the forms of a dim, and when two of them say the same."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from fparallel.layout import Layout, parse
from fparallel.mesh import make_mesh
from tests.strategies import chains, factorizations, index_sets, laid_out_twice, layouts, meshes

MESH = make_mesh((2, 4), ("dp", "tp"), kind="simulated")


def layout(text: str) -> Layout:
    return parse(text, MESH)[1]


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


@given(st.data(), meshes())
def test_normal_form_keeps_index_sets_and_is_its_own(data, mesh):
    chain = data.draw(chains(mesh))
    normal = normal_dim(chain)
    assert index_sets(Layout((tuple(chain),)), mesh) == index_sets(Layout((normal,)), mesh)
    assert normal_dim(normal) == normal
    assert len(normal) <= len(chain)


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


@given(st.data(), meshes())
def test_compact_keeps_pieces(data, mesh):
    (factor,) = data.draw(chains(mesh, max_factors=1))
    joined = Factor(factor.size, compact(factor.size, factor.axes))
    assert chunk_sizes(joined.size, joined.axes) == chunk_sizes(factor.size, factor.axes)
    assert index_sets(Layout(((joined,),)), mesh) == index_sets(Layout(((factor,),)), mesh)
