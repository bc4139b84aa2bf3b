"""Schedules as text: what is printed is what was there."""

import dataclasses
import textwrap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fparallel.errors import ScheduleError
from fparallel.layout import Layout
from fparallel.mesh import Mesh
from fparallel.schedule import Buffer, Collective, Free, Program, Recv, Run, Schedule, Segment, Send, Wait
from fparallel.schedule.names import names_text, parse_names
from fparallel.schedule.passes import run_passes
from fparallel.schedule.text import diff, instr_text, parse_instr, parse_schedule, rank_text, schedule_text
from tests.schedule.strategies import any_schedules

MESH = Mesh((2, 2, 2), ("dp", "pp", "tp"))


def text(schedule: str) -> str:
    return textwrap.dedent(schedule).lstrip("\n")


# The look of the design: a stage of a pipeline, its parameters sharded over dp.
GOLDEN = text("""
    schedule (dp=2, pp=2, tp=2)

    program pp=0  # ranks 0,1,4,5
      arguments  batch.x
      0000  send[pp 1]  batch.x    2.1 MB
      0001  wait        batch.x

    program pp=1  # ranks 2,3,6,7
      arguments  params.2.{up,down}
      donated    params.2.{up,down}
      results    res.2.mb0
      0000  all_gather[dp]             params.2.{up,down} -> params.2.{up,down}@full    2.1 MB  # prefetch for F block.2  ## model.py:31
      0001  recv[pp 0]                 batch.x                                          2.1 MB
      0002  wait                       params.2.{up,down}@full, batch.x
      0003  run F block.2 mb0 <mlp.F>  (batch.x, params.2.{up,down}@full) -> act.2.mb0, res.2.mb0
      0004  free                       params.2.{up,down}@full, batch.x, act.2.mb0
      0005  run update <sgd>           (params.2.{up,down}) -> new.up<=params.2.up, new.down<=params.2.down
      0006  free                       new.{up,down}

    buffers
      argument   f32[1024@dp,1024]:  batch.x
      argument   bf16[1024@dp,1024@tp]:  params.2.{up,down}
      temp       bf16[1024,1024@tp]:  params.2.{up,down}@full
      temp       f32[1024@dp,1024]:  act.2.mb0
      temp       bf16[1024@dp,1024@tp]:  new.{up,down}
      result     f32[1024@dp,(2 512@tp)] on pinned_host:  res.2.mb0

    segments
      <mlp.F>  (f32[1024@dp,1024], bf16[1024,1024@tp], bf16[1024,1024@tp]) -> (f32[1024@dp,1024], f32[1024@dp,(2 512@tp)])  2147483648 flops  0123456789ab
      <sgd>  (bf16[1024@dp,1024@tp], bf16[1024@dp,1024@tp]) -> (bf16[1024@dp,1024@tp], bf16[1024@dp,1024@tp])  0 flops  ba9876543210
""")  # noqa: E501


def test_the_text_of_a_schedule_is_its_golden_text():
    schedule = parse_schedule(GOLDEN)
    assert schedule_text(schedule) == GOLDEN
    assert parse_schedule(schedule_text(schedule)) == schedule


def test_what_is_parsed():
    schedule = parse_schedule(GOLDEN)
    assert schedule.mesh == MESH
    first, second = schedule.programs
    assert first == Program(
        (("pp", 0),),
        ("batch.x",),
        (),
        frozenset(),
        (Send(MESH.axis("pp"), 1, ("batch.x",)), Wait(("batch.x",))),
    )
    names = ("params.2.up", "params.2.down")
    full = tuple(f"{name}@full" for name in names)
    assert (second.arguments, second.donated, second.results) == (names, set(names), ("res.2.mb0",))
    assert second.instrs == (
        Collective("all_gather", (MESH.axis("dp"),), names, full,
                   cause="prefetch for F block.2", source="model.py:31"),
        Recv(MESH.axis("pp"), 0, ("batch.x",)),
        Wait((*full, "batch.x")),
        Run("mlp.F", ("batch.x", *full), ("act.2.mb0", "res.2.mb0"), "F block.2 mb0"),
        Free((*full, "batch.x", "act.2.mb0")),
        Run("sgd", names, ("new.up", "new.down"), "update", ((0, 0), (1, 1))),
        Free(("new.up", "new.down")),
    )  # fmt: skip
    assert schedule.buffers["res.2.mb0"].memory == "pinned_host"
    assert schedule.buffers["params.2.up"].dtype == torch.bfloat16
    assert schedule.segments["mlp.F"].flops == 2**31
    assert schedule.segments["mlp.F"].fingerprint == "0123456789ab"


def test_the_program_of_one_rank_has_its_coordinates_and_its_bytes():
    schedule = parse_schedule(GOLDEN)
    lines = rank_text(schedule, 3).splitlines()
    assert lines[0] == "rank 3  (dp=0 pp=1 tp=1)"
    assert lines[1].split()[:2] == ["0000", "all_gather[dp]"]
    assert lines[2].split() == ["0001", "recv[pp", "0]", "batch.x", "2.1", "MB"]
    assert len(lines) == 8


@given(any_schedules())
def test_a_schedule_parses_back_to_itself(schedule):
    assert parse_schedule(schedule_text(schedule)) == schedule
    assert parse_schedule(schedule_text(run_passes(schedule))) == run_passes(schedule)


@given(any_schedules(raw=True), st.data())
def test_a_rank_shows_the_lines_of_its_program(schedule, data):
    rank = data.draw(st.integers(0, schedule.mesh.size - 1))
    lines = rank_text(schedule, rank).splitlines()[1:]
    instrs = [parse_instr(line, schedule.mesh) for line in lines]
    assert tuple(instrs) == schedule.program(rank).instrs


def test_ten_thousand_names_share_a_line():
    assert names_text(["a.b", "a.c", "a.d", "x"]) == "a.{b,c,d}, x"
    assert names_text([f"p.blocks.{i}.{leaf}@full" for i in range(96) for leaf in ("up", "down")]) == (
        "p.blocks.{0..95}.{up,down}@full"
    )
    assert names_text(["l.0", "l.1", "l.2", "l.7", "l.8"]) == "l.{0..2,7,8}"
    assert names_text(["b", "c"]) == "b, c"
    assert names_text([]) == "()"


def test_braces_keep_the_order():
    """The rightmost brace varies fastest, so that leaf-major lists are not joined to block-major ones."""
    names = [f"p.{i}.{leaf}" for leaf in ("up", "down") for i in range(3)]
    assert names_text(names) == "p.{0..2}.up, p.{0..2}.down"
    assert parse_names(names_text(names)) == tuple(names)


_part = st.sampled_from(
    ["a", "b", "0", "1", "2", "10", "01", "", "x y", "{", "}", ",", "%", "%41", "é", "->", "<=", "#"]
)
_name = (
    st.lists(_part, min_size=1, max_size=4)
    .flatmap(
        lambda parts: st.lists(st.sampled_from(".@:"), min_size=len(parts) - 1, max_size=len(parts) - 1).map(
            lambda seps: parts[0] + "".join(s + p for s, p in zip(seps, parts[1:], strict=True))
        )
    )
    .filter(bool)
)


@given(st.lists(_name, max_size=12))
def test_names_parse_back(names):
    assert parse_names(names_text(names)) == tuple(names)


_anything = st.text(st.characters(codec="utf-8"), max_size=12) | st.text("ab #%<>()[]\n\u2028.", max_size=12)


@given(
    names=st.lists(_name, max_size=4),
    segment=_name,
    label=_anything,
    cause=_anything,
    source=_anything,
    axes=st.sampled_from(["dp", "dp*tp", "", "tp"]),
)
def test_instructions_parse_back(names, segment, label, cause, source, axes):
    names = tuple(names)
    outs = tuple(f"{name}.{i}" for i, name in enumerate(names))
    inplace = tuple((i, i) for i in range(0, len(names), 2))
    for instr in (
        Run(segment, names, outs, label, inplace, cause),
        Collective("reduce_scatter", MESH.axes(axes), names, outs, "sum", cause, source),
        Send(MESH.axis("pp"), 1, names, cause),
        Recv(MESH.axis("pp"), 0, names, cause),
        Wait(names, cause),
        Free(names, cause),
    ):
        line = parse_line(instr)
        assert parse_instr(line, MESH) == instr


def parse_line(instr):
    """The line of an instruction as it stands in the text of a schedule."""
    schedule = Schedule(MESH, {}, {}, (Program((), (), (), frozenset(), (instr,)),))
    return schedule_text(schedule).split("\n")[3]


@pytest.mark.parametrize(
    "line",
    [
        "gather[dp] x -> y",
        "all_gather[xp] x -> y",
        "all_gather[dp] x",
        "run F (x) -> y",
        "send[pp] x",
        "wait",
        "0012",
    ],
)
def test_a_line_that_is_no_instruction_is_an_error_that_shows_it(line):
    with pytest.raises(ScheduleError, match="cannot be read") as error:
        parse_schedule(f"schedule {MESH}\nprogram\n  {line}")
    assert "line 3" in str(error.value) and line in str(error.value)


@pytest.mark.parametrize(
    ("body", "number"),
    [
        ("", 0),
        ("program", 1),
        ("schedule (dp=2)\nprograms", 2),
        ("schedule (dp=2)\nbuffers\n  temp f32[8: x", 3),
    ],
)
def test_text_that_is_no_schedule_is_an_error(body, number):
    with pytest.raises(ScheduleError, match=f"line {number}" if number else "it is empty"):
        parse_schedule(body)


def test_a_diff_is_aligned_by_instruction():
    before = parse_schedule(GOLDEN)
    second = before.programs[1]
    moved = dataclasses.replace(second, instrs=(second.instrs[1], second.instrs[0], *second.instrs[2:]))
    after = dataclasses.replace(before, programs=(before.programs[0], moved))
    assert diff(before, before) == ""
    assert diff(before, after) == text("""
        program pp=1  # ranks 2,3,6,7
        @@
        - 0000       all_gather[dp]  params.2.{up,down} -> params.2.{up,down}@full  # prefetch for F block.2  ## model.py:31
          0001 0000  recv[pp 0]  batch.x
        +      0001  all_gather[dp]  params.2.{up,down} -> params.2.{up,down}@full  # prefetch for F block.2  ## model.py:31
          0002 0002  wait  params.2.{up,down}@full, batch.x
          0003 0003  run F block.2 mb0 <mlp.F>  (batch.x, params.2.{up,down}@full) -> act.2.mb0, res.2.mb0
    """)  # noqa: E501


def test_a_diff_lists_what_else_differs():
    before = parse_schedule(GOLDEN)
    extra = Buffer("extra", torch.float32, Layout.replicated((3,)))
    after = dataclasses.replace(
        before,
        buffers={**before.buffers, "extra": extra},
        segments={"mlp.F": dataclasses.replace(before.segments["mlp.F"], fingerprint="f" * 12)},
    )
    lines = diff(before, after).splitlines()
    assert "+   temp       f32[3]:  extra" in lines
    assert (
        sum(line.startswith("- ") for line in lines) == 2
    )  # the segment that is gone, and the one that has changed


def test_instr_text_is_one_line():
    segment = Segment("f", (), (), (), ())
    assert instr_text(Run(segment.name, (), ("x",), "a\nb")) == "run a%0Ab <f>  () -> x"
