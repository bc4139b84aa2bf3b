"""Which layouts each collective may lead from and to."""

import pytest
from hypothesis import given

from fparallel.compiler.reshard import plan
from fparallel.layout import parse
from fparallel.mesh import Mesh
from fparallel.schedule.legality import fault
from tests.strategies import laid_out_twice

MESH = Mesh((2, 4), ("dp", "tp"))

LEGAL = [
    ("all_gather", "dp", "", "[8@dp,4]", "[8,4]"),
    ("all_gather", "tp", "", "[8@dp*tp,4]", "[8@dp,4]"),
    ("all_gather", "dp", "", "[8@dp*tp,4]", "[(2 4@tp),4]"),
    ("all_gather", "dp", "", "[7@dp]", "[7]"),
    ("all_gather", "dp", "", "[1@dp,4]", "[1,4]"),
    ("all_gather", "tp:(2)2", "", "[8@tp]", "[8@tp:(1)2]"),
    ("all_gather", "dp", "", "[4,(3 4@dp 2)]{unreduced: tp:sum}", "[4,24]{unreduced: tp:sum}"),
    ("reduce_scatter", "dp", "sum", "[8,4]{unreduced: dp:sum}", "[8@dp,4]"),
    ("reduce_scatter", "dp", "max", "[8@tp]{unreduced: dp:max}", "[8@tp*dp]"),
    ("all_reduce", "dp", "sum", "[8,4@tp]{unreduced: dp:sum}", "[8,4@tp]"),
    ("all_reduce", "dp*tp", "min", "[]{unreduced: dp:min, tp:min}", "[]"),
    ("all_reduce", "tp", "sum", "[5]{unreduced: dp:sum, tp:sum}", "[5]{unreduced: dp:sum}"),
    ("all_to_all", "dp", "", "[8@dp,4]", "[8,4@dp]"),
    ("all_to_all", "tp", "", "[(2 6@tp),4@dp]", "[12,4@dp*tp]"),
    ("permute", "dp*tp", "", "[8@dp*tp]", "[8@tp*dp]"),
    ("permute", "dp*tp", "", "[8@dp,4@tp:(1)2]", "[8@tp:(1)2,4@dp]"),
]

ILLEGAL = [
    ("all_gather", "dp", "", "[8@dp*tp]", "[8@dp]", "wrong axes"),  # the last axis goes first
    ("all_gather", "tp", "", "[8@dp]", "[8]", "wrong axes"),
    ("all_gather", "dp*tp", "", "[8@dp]", "[8]", "wrong axes"),
    ("all_gather", "dp*tp", "", "[8@dp,4@tp]", "[8,4]", "wrong axes"),  # one factor at a time
    ("all_gather", "dp", "", "[8@dp,4]", "[4,8]", "wrong shape"),
    ("all_gather", "dp", "sum", "[8@dp]", "[8]", "wrong reduce op"),
    ("all_gather", "dp", "", "[8@dp]{unreduced: tp:sum}", "[8]", "wrong axes"),
    ("reduce_scatter", "dp", "max", "[8,4]{unreduced: dp:sum}", "[8@dp,4]", "wrong reduce op"),
    ("reduce_scatter", "dp", "", "[8,4]{unreduced: dp:sum}", "[8@dp,4]", "wrong reduce op"),
    ("reduce_scatter", "tp", "sum", "[8,4]{unreduced: dp:sum}", "[8@dp,4]", "wrong axes"),
    ("reduce_scatter", "dp", "sum", "[8@tp]{unreduced: dp:sum}", "[8@dp*tp]", "wrong axes"),
    ("all_reduce", "dp", "sum", "[8]{unreduced: dp:sum, tp:sum}", "[8]", "wrong axes"),
    ("all_reduce", "dp", "sum", "[8]", "[8]", "wrong axes"),
    ("all_reduce", "dp", "sum", "[8]{unreduced: dp:sum}", "[8@tp]", "wrong axes"),
    ("all_to_all", "dp", "", "[8@dp,4]", "[8,4]", "wrong axes"),
    ("all_to_all", "dp", "", "[8@dp*tp,4]", "[8@tp,4@dp]", "wrong axes"),
    ("permute", "dp", "", "[8@dp*tp]", "[8@tp*dp]", "wrong axes"),
    ("permute", "dp*tp", "", "[8@dp]", "[8@tp]", "wrong axes"),  # 2 shards are not 4
]


def fault_of(kind, axes, reduce, src, dst):
    return fault(kind, MESH.axes(axes), reduce, parse(src, MESH)[1], parse(dst, MESH)[1])


@pytest.mark.parametrize("case", LEGAL, ids=str)
def test_legal(case):
    assert fault_of(*case) is None


@pytest.mark.parametrize("case", ILLEGAL, ids=str)
def test_illegal(case):
    assert (fault_of(*case[:-1]) or "").startswith(case[-1])


@given(laid_out_twice())
def test_every_step_of_the_reshard_planner_is_legal(case):
    _, src, dst = case
    for step in plan(src, dst):
        if not step.local:
            assert fault(step.kind, step.axes, step.reduce, step.src, step.dst) is None, str(step)
