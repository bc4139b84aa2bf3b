"""Meshes: numbering of ranks, groups along axes, sub-axes as digits, and the errors."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fparallel.errors import MeshError
from fparallel.mesh import Axis, axes_text, make_mesh, merge_axes, resolve_sizes
from tests.strategies import axis_pieces, meshes


def abstract(**axes: int):
    return make_mesh(tuple(axes.values()), tuple(axes), kind="abstract")


def test_3d_numbering_dp_pp_tp():
    mesh = abstract(dp=2, pp=2, tp=2)
    assert mesh.groups("tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert mesh.groups("pp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert mesh.groups("dp") == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_3d_numbering_pp_dp_tp():
    mesh = abstract(pp=2, dp=2, tp=2)
    assert mesh.groups("tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert mesh.groups("dp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert mesh.groups("pp") == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_groups_over_several_axes_nest_in_the_order_given():
    mesh = abstract(dp=2, pp=2, tp=2)
    assert mesh.groups(["dp", "tp"]) == mesh.groups("dp*tp") == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert mesh.group(mesh.axes("tp*dp"), mesh.coords(0)) == (0, 4, 1, 5)


def test_a_mesh_prints_its_shape_and_counts_its_ranks():
    mesh = abstract(dp=4, tp=3)
    assert str(mesh) == "(dp=4, tp=3)"
    assert mesh.size == 12
    assert mesh.shape == {"dp": 4, "tp": 3}


def test_meshes_are_equal_by_shape_not_by_kind():
    assert make_mesh((2,), ("dp",), kind="simulated") == make_mesh((2,), ("dp",), kind="abstract")
    assert abstract(dp=2, tp=4) != abstract(dp=4, tp=2)


def test_sub_axes_are_the_digits_of_a_coordinate():
    tp = abstract(tp=12)
    major, middle, minor = tp.axes("tp:(1)2*tp:(2)3*tp:(6)2")
    for c in range(12):
        digits = [axis.digit({"tp": c}) for axis in (major, middle, minor)]
        assert digits == [c // 6, c // 2 % 3, c % 2]


def test_groups_along_a_sub_axis():
    mesh = abstract(dp=2, tp=4)
    assert mesh.groups("tp:(1)2") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert mesh.groups("tp:(2)2") == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_neighbouring_digits_merge():
    mesh = abstract(dp=2, tp=8)
    split = mesh.axes("tp:(1)2*tp:(2)2*tp:(4)2")
    assert merge_axes(split) == (Axis("tp", 8),)
    assert axes_text(mesh.axes("dp*tp:(1)2*tp:(2)2")) == "dp*tp:(1)4"
    assert axes_text(mesh.axes("tp:(2)2*tp:(1)2")) == "tp:(2)2*tp:(1)2"  # minor first is another order


def test_independent_digits():
    mesh = abstract(dp=2, tp=12)
    assert mesh.axis("dp").independent(mesh.axis("tp"))
    assert mesh.axis("tp:(1)2").independent(mesh.axis("tp:(2)3"))
    assert mesh.axis("tp:(1)2").independent(mesh.axis("tp:(4)3"))
    assert not mesh.axis("tp").independent(mesh.axis("tp:(2)3"))
    assert not mesh.axis("tp:(1)2").independent(mesh.axis("tp:(1)3"))
    assert not mesh.axis("tp").independent(mesh.axis("tp"))


@given(meshes())
def test_rank_and_coords_are_inverse(mesh):
    assert [mesh.rank(mesh.coords(rank)) for rank in range(mesh.size)] == list(range(mesh.size))
    assert mesh.rank_coords == tuple(mesh.coords(rank) for rank in range(mesh.size))


@given(st.data(), meshes())
def test_groups_partition_the_ranks_and_are_ordered_by_digits(data, mesh):
    axes = tuple(a for a in data.draw(axis_pieces(mesh)) if data.draw(st.booleans()))
    seen = set()
    for rank, coords in enumerate(mesh.rank_coords):
        group = mesh.group(axes, coords)
        assert len(set(group)) == math.prod(axis.size for axis in axes)
        assert rank in group
        assert all(mesh.group(axes, mesh.coords(other)) == group for other in group)
        digits = [tuple(axis.digit(mesh.coords(other)) for axis in axes) for other in group]
        assert digits == sorted(digits)
        seen |= set(group)
    assert seen == set(range(mesh.size))


@pytest.mark.parametrize(
    ("sizes", "names", "kind", "message"),
    [
        ((2, 2), ("dp",), "abstract", "2 sizes"),
        ((2, 2), ("dp", "dp"), "abstract", "occurs twice"),
        ((2,), ("d p",), "abstract", "not an axis name"),
        ((0,), ("dp",), "abstract", "has the size 0"),
        ((True,), ("dp",), "abstract", "has the size True"),
        ((-1, 2), ("dp", "tp"), "simulated", "no ranks to fill in the -1"),
        ((2,), ("dp",), "virtual", "no mesh kind 'virtual'"),
    ],
)
def test_malformed_meshes_are_refused(sizes, names, kind, message):
    with pytest.raises(MeshError, match=message) as error:
        make_mesh(sizes, names, kind=kind)
    assert str(error.value).splitlines()[-1].startswith("Fix: ")


@pytest.mark.parametrize("text", ["tp:(0)2", "tp:(3)2", "tp:(2)4", "tp:(1)0"])
def test_a_sub_axis_must_divide_its_axis(text):
    with pytest.raises(MeshError, match="does not divide the axis tp of 4 ranks"):
        abstract(tp=4).axis(text)


def test_an_unknown_axis_is_named_with_the_nearest():
    with pytest.raises(MeshError, match="has no axis 'tpp'") as error:
        abstract(dp=2, tp=2).axis("tpp")
    assert str(error.value).endswith("Fix: use one of its axes; did you mean 'tp'?")


def test_one_open_size_is_filled_in():
    assert resolve_sizes((2, -1), ("dp", "tp"), 8) == (2, 4)
    assert resolve_sizes((2, 4), ("dp", "tp"), 8) == (2, 4)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((-1, -1), "more than one -1"),
        ((3, -1), "8 ranks do not divide by 3"),
        ((2, 2), "has 4 ranks, the job has 8"),
    ],
)
def test_sizes_must_fit_the_job(sizes, message):
    with pytest.raises(MeshError, match=message):
        resolve_sizes(sizes, ("dp", "tp"), 8)
