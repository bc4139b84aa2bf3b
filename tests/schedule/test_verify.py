"""The verifier accepts what is safe and names what is not."""

import dataclasses
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fparallel.errors import ScheduleError
from fparallel.layout import Layout
from fparallel.mesh import Mesh
from fparallel.schedule import Buffer, Collective, Free, Program, Recv, Run, Schedule, Send, Wait
from fparallel.schedule.deadlock import simulate
from fparallel.schedule.memory import memory
from fparallel.schedule.passes import run_passes
from fparallel.schedule.rendezvous import classes
from tests.schedule import mutations as m
from tests.schedule.examples import example
from tests.schedule.strategies import any_schedules, pipeline_raw, pipeline_schedules


@given(any_schedules())
def test_valid_schedules_pass(schedule):
    schedule.verify()


def rejected(schedule, problem):
    with pytest.raises(ScheduleError) as error:
        schedule.verify()
    lines = str(error.value).split("\n")
    assert lines[1].strip().startswith(problem), str(error.value)
    return lines


def test_a_message_names_rank_instruction_buffer_and_fix():
    schedule = example(
        "all_gather[dp] w -> w@full  # gather w  ## model.py:31\nrun F <f> (x, w@full) -> y\nfree w@full"
    )
    assert rejected(schedule, "read in flight") == [
        "rank 0 (dp=0), instruction 0001  run F <f>  (x, w@full) -> y",
        "  read in flight: w@full is written by all_gather 0000, which has not been waited for",
        "Fix: wait for the step before this instruction; the pass sink_waits places every wait",
    ]


def test_a_message_names_the_source_line_of_a_collective():
    schedule = example("all_gather[dp] w -> y  # gather w  ## model.py:31\nwait y\nrun F <f> (x) -> w@full")
    broken = dataclasses.replace(
        schedule, buffers={**schedule.buffers, "y": Buffer("y", torch.float64, schedule.buffers["y"].layout)}
    )
    assert "  at model.py:31" in rejected(broken, "wrong dtype")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("run F <f> (x) -> y\nfree y\nrun G <g> (y) -> z", "use after freed: y was freed by free 0001"),
        ("run F <f> (x) -> y<=x\nrun G <g> (x) -> z", "use after overwritten: x was overwritten by run 0000"),
        ("run F <f> (x, x) -> y<=(0)", "overwritten in use: x is overwritten and also another input"),
        ("run F <f> (x) -> y\nrun G <g> (x) -> y", "double write: y"),
        ("run F <f> (x) -> y\nwait y", "wait for nothing: no step is pending on y"),
        (
            "run F <f> (x) -> g\nreduce_scatter[dp sum] g -> g@shard\nfree g\nwait g@shard",
            "freed in flight: g is used by",
        ),
        ("run F <f> (x) -> g\nreduce_scatter[dp sum] g -> g@shard", "never waited for: the step on g@shard"),
        ("run F <f> (x) -> y\nfree y, y", "double free: y was freed by free 0001"),
    ],
)
def test_what_a_program_may_not_do(text, problem):
    rejected(example(text, mesh=Mesh((2,), ("dp",))), problem)


@pytest.mark.parametrize(
    "text",
    [
        # an input in flight may be read, by a run and by another step
        "all_gather[dp] w -> w@full\nrun F <f> (w) -> y\nall_gather[dp] w -> v\nwait v\nwait w@full",
        # one output stands for its bucket
        "all_gather[dp] w1, w2 -> w1@full, w2@full\nwait w2@full\nrun F <f> (w1@full) -> y",
        # a donated argument may end in place, by a free, or as a result
        "run F <f> (x, s) -> s'<=s\nfree x",
    ],
)
def test_what_a_program_may_do(text):
    example(text).verify()


def test_results_may_be_arguments_passed_through():
    schedule = example("run F <f> (x) -> y")
    program = dataclasses.replace(schedule.programs[0], results=("y", "x"), donated=frozenset({"x"}))
    dataclasses.replace(schedule, programs=(program,)).verify()


def test_unknown_names_are_named():
    schedule = example("run F <f> (x) -> y")
    rejected(dataclasses.replace(schedule, segments={}), "unknown segment: f")
    buffers = {name: buffer for name, buffer in schedule.buffers.items() if name != "y"}
    rejected(dataclasses.replace(schedule, buffers=buffers), "unknown buffer: y")


def test_a_buffer_on_the_host_is_not_read():
    schedule = example("run F <f> (x) -> y")
    host = dataclasses.replace(schedule.buffers["x"], memory="pinned_host")
    rejected(
        dataclasses.replace(schedule, buffers={**schedule.buffers, "x": host}),
        "wrong memory: x rests on pinned_host",
    )


def test_axes_and_roles_are_those_of_the_mesh():
    schedule = example("all_gather[dp] w -> w@full\nwait w@full")
    other = dataclasses.replace(schedule, mesh=Mesh((4,), ("dp",)))
    with pytest.raises(ScheduleError, match="unknown axis: w: f32"):
        other.verify()
    program = dataclasses.replace(schedule.programs[0], role=(("pp", 0),))
    with pytest.raises(ScheduleError, match="unknown role"):
        dataclasses.replace(schedule, programs=(program,)).verify()


def test_every_rank_has_exactly_one_program():
    schedule = example("run F <f> (x) -> y")
    first = dataclasses.replace(schedule.programs[0], role=(("dp", 0),))
    with pytest.raises(ScheduleError, match=r"(?s)rank 1 \(dp=1\).*0 programs for this rank"):
        dataclasses.replace(schedule, programs=(first,)).verify()
    with pytest.raises(ScheduleError, match=r"(?s)rank 0 \(dp=0\).*2 programs for this rank"):
        dataclasses.replace(schedule, programs=(first, schedule.programs[0])).verify()


def test_a_budget_is_kept_to_the_byte():
    schedule = example("run F <f> (x) -> y\nrun G <g> (y) -> z\nfree y")
    assert memory(schedule).peak() == 3 * 128  # x, y and z: f32[8,4]
    schedule.verify(memory_budget=384)
    with pytest.raises(
        ScheduleError, match=r"(?s)instruction 0001  run G.*memory budget exceeded.* 1 bytes more"
    ):
        schedule.verify(memory_budget=383)


# ---------------------------------------------------------------- sends and receives


def two_stages(first, second, buffers=("x", "y")):
    mesh = Mesh((2, 2), ("pp", "dp"))
    made = {name: Buffer(name, torch.float32, Layout.replicated((4,)), "argument") for name in buffers}
    made |= {
        f"{name}.in": dataclasses.replace(made[name], name=f"{name}.in", kind="result") for name in buffers
    }
    programs = []
    for stage, steps in enumerate((first, second)):
        arguments = tuple(name for step in steps if isinstance(step, Send) for name in step.ins)
        results = tuple(name for step in steps if isinstance(step, Recv) for name in step.outs)
        programs.append(Program((("pp", stage),), arguments, results, frozenset(), tuple(steps)))
    return Schedule(mesh, made, {}, tuple(programs))


PP = Mesh((2, 2), ("pp", "dp")).axis("pp")


def test_a_rank_does_not_send_to_itself():
    rejected(two_stages([Send(PP, 0, ("x",)), Wait(("x",))], []), "wrong peer: the rank sends to itself")


def test_a_peer_exists():
    rejected(two_stages([Send(PP, 2, ("x",)), Wait(("x",))], []), "wrong peer: pp has no coordinate 2")


def test_sends_and_receives_facing_each_other_need_an_order():
    steps = [
        [Send(PP, 1, ("x",)), Wait(("x",)), Recv(PP, 1, ("y",)), Wait(("y",))],
        [Send(PP, 0, ("y",)), Wait(("y",)), Recv(PP, 0, ("x",)), Wait(("x",))],
    ]
    buffers = {
        n: Buffer(n, torch.float32, Layout.replicated((4,)), k) for n, k in (("x", "temp"), ("y", "temp"))
    }
    mesh = Mesh((2,), ("pp",))
    segment = m.Segment("f", (), ((torch.float32, Layout.replicated((4,))),), (), (), 0, "0" * 12)

    def program(stage, order):
        make, got = ("x", "y") if stage == 0 else ("y", "x")
        return Program(
            (("pp", stage),), (), (), frozenset(), (Run("f", (), (make,)), *order, Free((make, got)))
        )

    facing = Schedule(
        mesh, buffers, {"f": segment}, tuple(program(s, order) for s, order in enumerate(steps))
    )
    lines = rejected(facing, "deadlock under blocking and asynchronous issue")
    assert [line.strip() for line in lines[2:4]] == [
        "(pp=0) waits at 0001 send[pp 1]  x for (pp=1)",
        "(pp=1) waits at 0001 send[pp 0]  y for (pp=0)",
    ]
    steps[1] = steps[1][2:] + steps[1][:2]
    Schedule(
        mesh, buffers, {"f": segment}, tuple(program(s, order) for s, order in enumerate(steps))
    ).verify()


# ---------------------------------------------------------------- deadlock


@given(pipeline_schedules(), st.randoms(use_true_random=False))
def test_what_is_free_of_deadlock_under_blocking_issue_is_so_under_asynchronous_issue(schedule, rng):
    """Asynchronous issue has a part of the order that blocking issue has."""
    programs = []
    for program in schedule.programs:
        places = [i for i, instr in enumerate(program.instrs) if schedule.crosses_roles(instr)]
        order = rng.sample(places, len(places)) if rng.random() < 0.5 else places
        instrs = list(program.instrs)
        for i, j in zip(places, order, strict=True):
            instrs[i] = program.instrs[j]
        programs.append(dataclasses.replace(program, instrs=tuple(instrs)))
    shuffled = dataclasses.replace(schedule, programs=tuple(programs))
    ranks = classes(shuffled, pytest.fail)
    if not simulate(ranks, blocking=True):
        assert not simulate(ranks, blocking=False)


def test_the_cost_does_not_grow_with_the_ranks_of_a_role():
    """The same pipeline over 8 and over 2,048 ranks is checked on as many classes of ranks: one per stage."""
    small = run_passes(pipeline_raw(random.Random(0), 2, 2))
    sizes = {"pp": 2, "dp": 2, "tp": small.mesh.shape["tp"]}
    assert small.role_axes == ("pp",)
    assert len(classes(small, pytest.fail)) == sizes["pp"]
    mesh = Mesh((2, 1024), ("pp", "dp"))
    pp, dp = mesh.axis("pp"), mesh.axis("dp")
    scalar = Layout.of([], [(dp, "sum"), (pp, "sum")])
    buffers = {
        "x": Buffer("x", torch.float32, scalar, "argument"),
        "y": Buffer("y", torch.float32, Layout.of([]), "result"),
    }
    steps = (Collective("all_reduce", (dp, pp), ("x",), ("y",), "sum"), Wait(("y",)))
    programs = tuple(Program((("pp", stage),), ("x",), ("y",), frozenset(), steps) for stage in range(2))
    large = Schedule(mesh, buffers, {}, programs)
    large.verify()
    assert len(classes(large, pytest.fail)) == 2
