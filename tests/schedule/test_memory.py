"""Live bytes by hand, and what they are for."""

import dataclasses
import re

import torch
from hypothesis import given
from hypothesis import strategies as st

from fparallel.layout import parse
from fparallel.mesh import Mesh
from fparallel.schedule import Buffer, Free, Program, Run, Schedule, Segment, Wait
from fparallel.schedule.memory import CAUSES, live_bytes, memory, rank_memory
from fparallel.schedule.text import parse_instr
from tests.schedule.examples import example
from tests.schedule.strategies import any_schedules


def test_outputs_count_from_their_instruction_and_frees_after_theirs():
    schedule = example("""
        all_gather[dp]  w -> w@full
        wait            w@full
        run F <f>       (x, w@full) -> y
        free            w@full
        run G <g>       (y, s) -> s'<=s
        free            y
    """)
    # w and s are f32[8@dp,4], 64 bytes on a rank; x, w@full and y are f32[8,4], 128 bytes
    assert live_bytes(schedule, 0) == [384, 384, 512, 384, 384, 256]
    assert memory(schedule).peak() == 512
    (row,) = memory(schedule).rows
    assert (row.rank, row.ranks, row.instruction, row.text) == (0, 2, 2, "run F <f>  (x, w@full) -> y")


def test_a_program_that_only_frees_peaks_at_its_start():
    schedule = example("free x")
    program = dataclasses.replace(schedule.programs[0], arguments=("x",), donated=frozenset({"x"}))
    buffers = {"x": Buffer("x", torch.float32, parse("[8]", schedule.mesh)[1], "argument")}
    schedule = dataclasses.replace(schedule, buffers=buffers, programs=(program,))
    (row,) = memory(schedule).rows
    assert (row.peak, row.instruction) == (32, None)
    assert live_bytes(schedule, 0) == [0]


def test_uneven_shards_are_counted_rank_by_rank():
    mesh = Mesh((4,), ("dp",))
    layout = parse("[7@dp]", mesh)[1]  # 2, 2, 2, 1
    buffers = {"x": Buffer("x", torch.float64, layout, "argument")}
    schedule = Schedule(mesh, buffers, {}, (Program((), ("x",), ("x",), frozenset(), ()),))
    assert [rank_memory(schedule, rank).peak for rank in range(4)] == [16, 16, 16, 8]
    (row,) = memory(schedule).rows
    assert (row.rank, row.ranks, row.peak) == (0, 4, 16)


def test_tiers_are_counted_apart():
    mesh = Mesh((2,), ("dp",))
    layout = parse("[8@dp]", mesh)[1]
    buffers = {
        "state.params.w": Buffer("state.params.w", torch.float32, layout, "argument"),
        "state.opt_state.mu.w": Buffer(
            "state.opt_state.mu.w", torch.float32, layout, "argument", "pinned_host"
        ),
        "state.opt_state.nu.w": Buffer(
            "state.opt_state.nu.w", torch.float32, layout, "argument", "pinned_host"
        ),
    }
    schedule = Schedule(mesh, buffers, {}, (Program((), tuple(buffers), tuple(buffers), frozenset(), ()),))
    assert (memory(schedule).peak(), memory(schedule).peak("pinned_host"), memory(schedule).peak("nvme")) == (
        16,
        32,
        0,
    )


def test_the_report_names_what_the_memory_is_for():
    mesh = Mesh((2,), ("dp",))
    types = {
        "state.params.w": ("argument", "[8@dp,4]"),
        "state.params.v": ("argument", "[2@dp,4]"),
        "state.opt_state.mu.w": ("argument", "[8@dp,4]"),
        "batch.x": ("argument", "[2@dp,4]"),
        "state.step": ("argument", "[]"),
        "mask": ("constant", "[4]"),
        "params.w@full": ("temp", "[8,4]"),
        "params.w@half": ("temp", "[8,4]"),
        "params.v@full": ("temp", "[2,4]"),
        "act": ("temp", "[2@dp,8]"),
        "act@all": ("temp", "[2,8]"),
        "grads.w": ("temp", "[8,4]{unreduced: dp:sum}"),
        "g@shard": ("temp", "[8@dp,4]"),
        "loss": ("result", "[]"),
        "norm": ("result", "[]"),
        "new.w": ("result", "[8@dp,4]"),
    }
    buffers = {
        n: Buffer(n, torch.float32, parse(layout, mesh)[1], kind) for n, (kind, layout) in types.items()
    }
    lines = """
        all_gather[dp] state.params.w -> params.w@full
        all_gather[dp] state.params.v -> params.v@full
        wait params.w@full, params.v@full
        run cast <cast> (params.w@full, mask) -> params.w@half
        run F <f> (batch.x, params.w@half, params.v@full) -> act, loss
        all_gather[dp] act -> act@all
        wait act@all
        run B <b> (act, act@all, params.w@half) -> grads.w
        reduce_scatter[dp sum] grads.w -> g@shard
        wait g@shard
        run update <u> (state.params.w, state.opt_state.mu.w, g@shard) -> new.w<=state.params.w
        free params.w@full, params.w@half, act, act@all, grads.w, g@shard
        run norm <n> (params.v@full) -> norm
        free params.v@full
    """
    instrs = tuple(parse_instr(line, mesh) for line in lines.strip().split("\n"))
    segments = {}
    for instr in instrs:
        if isinstance(instr, Run):
            ins, outs = (
                tuple((buffers[n].dtype, buffers[n].layout) for n in ns) for ns in (instr.ins, instr.outs)
            )
            segments[instr.segment] = Segment(instr.segment, ins, outs, (), (), 0, "0" * 12)
    arguments = tuple(name for name, (kind, _) in types.items() if kind in ("argument", "constant"))
    results = ("loss", "norm", "new.w")
    program = Program((), arguments, results, frozenset({"state.params.w"}), instrs)
    schedule = Schedule(mesh, buffers, segments, (program,))
    schedule.verify()
    (row,) = memory(schedule).rows
    assert row.by_cause == {
        "parameters": 80,  # and the storage that new.w takes over
        "optimizer state": 64,
        "batch": 16,
        "other arguments": 4,
        "constants": 16,
        "gathered parameters": 256,
        "kept parameters": 32,  # v, between F and norm
        "activations": 32,
        "gradients": 192,
        "communication": 64,
        "results": 4,
    }
    assert row.peak == sum(row.by_cause.values())
    head, line = (re.split(r"\s{2,}", text) for text in str(memory(schedule)).splitlines())
    assert head == ["rank", "tier", "peak", *CAUSES, "kept at most", "peak at"]
    assert line[:5] == ["0 (dp=0) and 1 more", "device", "760 B", "80 B", "64 B"]
    assert line[-4] == "32 B"  # v while B and update run
    assert line[-3:] == ["0008", "reduce_scatter[dp sum]", "grads.w -> g@shard"]


@given(any_schedules(), st.data())
def test_live_bytes_are_the_sizes_of_what_is_alive(schedule, data):
    """Against a plain interpretation: a set of live names, summed at every instruction."""
    rank = data.draw(st.integers(0, schedule.mesh.size - 1))
    program, coords = schedule.program(rank), schedule.mesh.coords(rank)
    alive = set(program.arguments)
    expected = []
    for instr in program.instrs:
        if isinstance(instr, Free):
            alive -= set(instr.bufs)
        elif not isinstance(instr, Wait):
            alive |= set(instr.writes)
            if isinstance(instr, Run):
                alive -= {instr.ins[source] for _, source in instr.inplace}
        expected.append(sum(schedule.buffers[name].local_bytes(coords) for name in alive))
    assert live_bytes(schedule, rank) == expected


@given(any_schedules())
def test_the_row_of_a_role_is_its_largest_rank(schedule):
    for row, program in zip(memory(schedule).rows, schedule.programs, strict=True):
        assert row.peak == max(rank_memory(schedule, rank).peak for rank in schedule.ranks(program))
        assert tuple(row.by_cause) == CAUSES and sum(row.by_cause.values()) == row.peak
