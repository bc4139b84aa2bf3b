"""The executor on the simulated transport, with hand-written schedules."""

import pytest
import torch

from fparallel.errors import ExecutionError
from fparallel.mesh import make_mesh
from fparallel.runtime.executor import Executor
from fparallel.runtime.transport.simulated import SimulatedTransport
from fparallel.schedule import Collective, Free, LocalOp, Recv, Ref, Run, Send, Wait
from fparallel.schedule.memory import live_bytes
from tests.runtime.schedules import Builder, matmul_over, pipeline

MODES = ["buffered", "rendezvous"]


def shards(schedule, names, values):
    return [
        [schedule.buffers[name].layout.shard(v, at).clone() for name, v in zip(names, values, strict=True)]
        for at in schedule.mesh.rank_coords
    ]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_step_equals_its_one_device_meaning(size, mode, seed):
    schedule, arguments, expected = matmul_over(size=size)
    schedule.verify()
    executor = Executor(schedule, SimulatedTransport(size, mode, seed=seed), check=True)
    for _ in range(2):
        results = executor.run(shards(schedule, ("x", "w"), arguments))
        total = schedule.buffers["total"].layout.unshard([r[0] for r in results], schedule.mesh)
        torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)


def test_live_bytes_are_the_planned_ones():
    schedule, arguments, _ = matmul_over(size=4)
    executor = Executor(schedule, SimulatedTransport(4), trace=True)
    executor.run(shards(schedule, ("x", "w"), arguments))
    for rank in range(4):
        assert executor.live_bytes[rank] == live_bytes(schedule, rank)
        assert executor.storage_bytes[rank] == live_bytes(schedule, rank)


def test_donated_arguments_are_taken_and_others_left():
    schedule, arguments, _ = matmul_over()
    given = shards(schedule, ("x", "w"), arguments)
    Executor(schedule, SimulatedTransport(2)).run(given)
    assert [[x is None for x in per_rank] for per_rank in given] == [[False, True]] * 2


@pytest.mark.parametrize("mode", MODES)
def test_a_pipeline_sends_and_receives(mode):
    schedule = pipeline()
    schedule.verify()
    x = torch.arange(4.0)
    first, second = Executor(schedule, SimulatedTransport(2, mode), check=True).run([[x], [x]])
    assert torch.equal(first[0], x * 2 + 1) and second == []


@pytest.mark.parametrize("mode", MODES)
def test_both_sending_first_is_a_deadlock_that_shows_both_ranks(mode):
    with pytest.raises(ExecutionError) as caught:
        Executor(pipeline("crossed"), SimulatedTransport(2, mode)).run([[torch.zeros(4)], [torch.zeros(4)]])
    text = str(caught.value)
    assert "deadlock" in text and "rank 0  (pp=0)" in text and "rank 1  (pp=1)" in text
    assert "send[pp 1]  y" in text and "send[pp 0]  back" in text and "peers: 1" in text


def test_a_rendezvous_that_buffers_would_forgive():
    """Both ranks send, then receive, over two different axes' pairs: only blocking sends get stuck."""
    mesh = make_mesh((3,), ("pp",), kind="simulated")
    b, pp = Builder(mesh), mesh.axis("pp")
    for name in ("a", "b"):
        b.buffer(name, "f32[2]", "argument" if name == "a" else "result")
    programs = [
        b.program(
            ("a",),
            ("b",),
            [Send(pp, (at + 1) % 3, ("a",)), Recv(pp, (at - 1) % 3, ("b",)), Wait(("a", "b"))],
            role=(("pp", at),),
        )
        for at in range(3)
    ]
    schedule = b.schedule(*programs)
    arguments = [[torch.full((2,), float(rank))] for rank in range(3)]
    results = Executor(schedule, SimulatedTransport(3, "buffered")).run(arguments)
    assert [r[0][0].item() for r in results] == [2.0, 0.0, 1.0]
    with pytest.raises(ExecutionError, match="deadlock"):
        Executor(schedule, SimulatedTransport(3, "rendezvous")).run(arguments)


def test_members_that_disagree_are_shown():
    mesh = make_mesh((2,), ("pp",), kind="simulated")
    b, along = Builder(mesh), (mesh.axis("pp"),)
    for name in ("x", "y"):
        b.buffer(name, "f32[2]{unreduced: pp:sum}", "argument")
        b.buffer(name + "r", "f32[2]", "result")
    programs = [
        b.program(
            (n,),
            (n + "r",),
            [Collective("all_reduce", along, (n,), (n + "r",), "sum"), Wait((n + "r",))],
            role=(("pp", i),),
        )
        for i, n in enumerate(("x", "y"))
    ]
    with pytest.raises(ExecutionError) as caught:
        Executor(b.schedule(*programs), SimulatedTransport(2)).run([[torch.zeros(2)], [torch.zeros(2)]])
    assert "rank 0: all_reduce[pp]" in str(caught.value) and "rank 1: all_reduce[pp]" in str(caught.value)


def test_in_place_writes_go_into_the_callers_tensor():
    mesh = make_mesh((1,), ("dp",), kind="simulated")
    b = Builder(mesh)
    b.buffer("p", "f32[4]", "argument")
    b.buffer("p'", "f32[4]", "result")
    b.segment("sgd", ["f32[4]"], ["f32[4]"], [LocalOp("aten.mul.Tensor", (Ref(0), 0.5), (1,))], [1])
    program = b.program(("p",), ("p'",), [Run("sgd", ("p",), ("p'",), inplace=((0, 0),))], donated=("p",))
    p = torch.full((4,), 8.0)
    ((result,),) = Executor(b.schedule(program), SimulatedTransport(1), check=True, trace=True).run([[p]])
    assert result is p and torch.equal(p, torch.full((4,), 4.0))


def test_constants_are_sharded_once_and_passed_through():
    mesh = make_mesh((2,), ("dp",), kind="simulated")
    b = Builder(mesh)
    b.buffer("x", "f32[4@dp]", "argument")
    b.buffer("c", "f32[4@dp]", "constant")
    b.buffer("y", "f32[4@dp]", "result")
    b.segment(
        "add", ["f32[4@dp]"] * 2, ["f32[4@dp]"], [LocalOp("aten.add.Tensor", (Ref(0), Ref(1)), (2,))], [2]
    )
    schedule = b.schedule(b.program(("x", "c"), ("y", "x"), [Run("add", ("x", "c"), ("y",))]))
    arguments = [[torch.zeros(2)], [torch.zeros(2)]]
    results = Executor(schedule, SimulatedTransport(2), {"c": torch.arange(4.0)}).run(arguments)
    assert [r[0].tolist() for r in results] == [[0, 1], [2, 3]]
    assert all(r[1] is given[0] for r, given in zip(results, arguments, strict=True))
    with pytest.raises(ExecutionError, match="constant 'c'"):
        Executor(schedule, SimulatedTransport(2))


def broken(*instrs):
    """y = 2x, then the given steps, on one rank."""
    mesh = make_mesh((1,), ("dp",), kind="simulated")
    b = Builder(mesh)
    for name, kind in (("x", "argument"), ("y", "temp"), ("z", "result")):
        b.buffer(name, "f32[2]", kind)
    op = LocalOp("aten.mul.Tensor", (Ref(0), 2), (1,), source="model.py:9")
    b.segment("double", ["f32[2]"], ["f32[2]"], [op], [1])
    b.segment(
        "bad",
        ["f32[2]"],
        ["f32[2]"],
        [LocalOp("aten.mm.default", (Ref(0), Ref(0)), (1,), source="model.py:10")],
        [1],
    )
    return b.schedule(b.program(("x",), ("z",), [Run("double", ("x",), ("y",)), *instrs]))


def test_reading_a_freed_buffer_names_it():
    schedule = broken(Free(("y",)), Run("double", ("y",), ("z",)))
    with pytest.raises(ExecutionError, match="buffer y was freed") as caught:
        Executor(schedule, SimulatedTransport(1), check=True).run([[torch.ones(2)]])
    assert "0002  run <double>  (y) -> z" in str(caught.value)


def test_a_failing_op_is_reported_with_instruction_and_source_line():
    schedule = broken(Run("bad", ("y",), ("z",), "F block.3"))
    with pytest.raises(ExecutionError) as caught:
        Executor(schedule, SimulatedTransport(1)).run([[torch.ones(2)]])
    text = str(caught.value)
    assert "rank 0  (dp=0)  0001  run F block.3 <bad>  (y) -> z" in text
    assert "aten.mm.default" in text and "model.py:10" in text and text.splitlines()[-1].startswith("Fix: ")


def test_an_argument_of_another_shape_is_named():
    schedule = broken(Run("double", ("y",), ("z",)))
    with pytest.raises(ExecutionError, match=r"argument x: f32\[2\]"):
        Executor(schedule, SimulatedTransport(1)).run([[torch.ones(3)]])
    with pytest.raises(ExecutionError, match="got 0 arguments"):
        Executor(schedule, SimulatedTransport(1)).run([[]])


def test_freed_memory_is_poisoned_for_whoever_still_uses_it():
    """A reduce_scatter whose input is freed before its wait gives NaN under `check` in buffered mode."""
    schedule, arguments, _ = matmul_over()
    program = schedule.programs[0]
    instrs = list(program.instrs)
    instrs[6], instrs[7] = instrs[7], instrs[6]
    wrong = type(schedule)(
        schedule.mesh, schedule.buffers, schedule.segments,
        (type(program)(program.role, program.arguments, program.results, program.donated, tuple(instrs)),),
    )  # fmt: skip
    results = Executor(wrong, SimulatedTransport(2), check=True).run(shards(wrong, ("x", "w"), arguments))
    assert any(r[0].isnan().any() for r in results)
