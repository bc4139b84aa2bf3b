"""Permutes with sources: shards that move from rank to rank while the layout stays."""

import dataclasses

import pytest
import torch

from fparallel.errors import ScheduleError
from fparallel.layout import parse
from fparallel.mesh import Mesh
from fparallel.runtime.executor import Executor
from fparallel.runtime.transport.simulated import SimulatedTransport
from fparallel.schedule.ir import Buffer, Collective, Program, Schedule, Wait
from fparallel.schedule.legality import fault
from fparallel.schedule.text import instr_text, parse_instr

MESH = Mesh((2, 3), ("dp", "tp"), "simulated")
SHARDS = parse("[12@dp*tp]", MESH)[1]


def schedule(sources, axes="tp"):
    buffers = {
        "x": Buffer("x", torch.float32, SHARDS, "argument"),
        "y": Buffer("y", torch.float32, SHARDS, "result"),
    }
    permute = Collective("permute", MESH.axes(axes), ("x",), ("y",), sources=sources)
    program = Program((), ("x",), ("y",), frozenset(), (permute, Wait(("y",))))
    return Schedule(MESH, buffers, {}, (program,))


def run(made):
    made.verify()
    shards = [[torch.full((2,), float(rank))] for rank in range(MESH.size)]
    outs = Executor(made, SimulatedTransport(MESH.size), check=True).run(shards)
    return [out[0][0].item() for out in outs]


def test_each_member_takes_the_shard_of_its_source():
    assert run(schedule((2, 0, 1))) == [2, 0, 1, 5, 3, 4]
    assert run(schedule((1, 0, 2))) == [1, 0, 2, 4, 3, 5]
    assert run(schedule((1, 0), "dp")) == [3, 4, 5, 0, 1, 2]
    assert run(schedule((5, 4, 3, 2, 1, 0), "dp*tp")) == [5, 4, 3, 2, 1, 0]


def test_members_are_in_the_order_of_the_axes():
    """Along tp*dp the ranks are 0, 3, 1, 4, 2, 5."""
    assert run(schedule((1, 2, 3, 4, 5, 0), "tp*dp")) == [3, 4, 5, 1, 2, 0]


def test_a_member_without_a_source_gets_nothing():
    got = run(schedule((-1, 0, -1)))
    assert (got[1], got[4]) == (0, 3)


def test_only_shards_that_move_are_counted():
    assert schedule((2, 0, 1)).bytes() == 8
    assert schedule((1, 0, 2)).bytes() == pytest.approx(8 * 2 / 3)
    assert schedule((-1, 0, -1)).bytes() == pytest.approx(8 / 3)


def test_text():
    instr = schedule((2, -1, 1)).programs[0].instrs[0]
    assert instr_text(instr) == "permute[tp from 2,-1,1]  x -> y"
    assert parse_instr(instr_text(instr), MESH) == instr


@pytest.mark.parametrize(
    ("sources", "kind", "dst", "problem"),
    [
        ((0, 1), "permute", "[12@dp*tp]", "wrong sources"),
        ((0, 0, 1), "permute", "[12@dp*tp]", "wrong sources"),
        ((0, 1, 3), "permute", "[12@dp*tp]", "wrong sources"),
        ((0, 1, 2), "all_gather", "[12@dp]", "wrong sources"),
        ((0, 1, 2), "permute", "[12@tp*dp]", "wrong axes"),
    ],
)
def test_illegal(sources, kind, dst, problem):
    found = fault(kind, MESH.axes("tp"), "", SHARDS, parse(dst, MESH)[1], sources)
    assert found is not None and found.startswith(problem)


def test_uneven_shards_are_refused():
    uneven = parse("[13@dp*tp]", MESH)[1]
    assert "uneven" in str(fault("permute", MESH.axes("tp"), "", uneven, uneven, (1, 2, 0)))


def test_verify_refuses_a_source_that_is_taken_twice():
    made = schedule((0, 0, 1))
    with pytest.raises(ScheduleError, match="wrong sources"):
        made.verify()


def test_ranks_that_disagree_on_sources_are_found():
    made = schedule((2, 0, 1))
    (program,) = made.programs
    other = dataclasses.replace(program.instrs[0], sources=(1, 2, 0))
    programs = (
        dataclasses.replace(program, role=(("tp", 0),)),
        dataclasses.replace(program, role=(("tp", 1),), instrs=(other, program.instrs[1])),
        dataclasses.replace(program, role=(("tp", 2),)),
    )
    with pytest.raises(ScheduleError, match="sources"):
        dataclasses.replace(made, programs=programs).verify()
