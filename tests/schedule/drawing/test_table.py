"""The text table, by hand."""

import dataclasses

from fparallel.schedule import Program
from tests.runtime import schedules
from tests.schedule.examples import example
from tests.schedule.pipeline_orders import gpipe, one_f_one_b, pipeline


def test_table_of_1f1b():
    assert pipeline(one_f_one_b, stages=3, micros=4).table() == (
        "slot            0  1  2  3  4  5  6  7  8  9 10 11 12\n"
        "rank 0 (pp=0)  F0 F1 F2  .  . B0 F3 B1  . B2  . B3  U   idle 4 of 13\n"
        "rank 1 (pp=1)   . F0 F1  . B0 F2 B1 F3 B2  . B3  U  .   idle 4 of 13\n"
        "rank 2 (pp=2)   .  . F0 B0 F1 B1 F2 B2 F3 B3  U  .  .   idle 4 of 13\n"
        "\n"
        "F forward, B backward, U update, . idle; the number is the micro-batch\n"
    )


def test_table_of_gpipe_has_a_cell_per_stage_however_many_blocks_it_has():
    text = (
        "slot            0  1  2  3  4  5  6\n"
        "rank 0 (pp=0)  F0 F1  .  . B0 B1  U   idle 2 of 7\n"
        "rank 1 (pp=1)   . F0 F1 B0 B1  U  .   idle 2 of 7\n"
    )
    for blocks in (1, 4):
        assert pipeline(gpipe, stages=2, micros=2, blocks=blocks).table().startswith(text)


def test_a_table_is_broken_to_the_width_of_the_terminal():
    schedule = pipeline(one_f_one_b, stages=4, micros=12)
    whole, parts = schedule.table().splitlines(), schedule.table(80).splitlines()
    assert max(map(len, parts)) <= 80 < max(map(len, whole))
    for rank in range(4):
        joined = [line.split("   idle")[0] for line in parts if line.startswith(f"rank {rank}")]
        assert len(joined) > 1
        cells = " ".join(line.split(")")[1] for line in joined).split()
        assert cells == whole[1 + rank].split("   idle")[0].split(")")[1].split()


def test_table_of_steps_without_micro_batch():
    assert schedules.pipeline().table() == (
        "slot           0 1\n"
        "rank 0 (pp=0)  x .   idle 1 of 2\n"
        "rank 1 (pp=1)  . x   idle 1 of 2\n"
        "\n"
        "x other compute, . idle\n"
    )


def test_table_of_one_program_and_of_none():
    schedule = example("""
        run F block.0.mb0 <f> (x) -> y
        run B block.0.mb0 <b> (y) -> z
        run step.1 <u> (z) -> o
        free y
        free z
    """)
    assert schedule.table() == (
        "slot            0  1  2\n"
        "rank 0 (dp=0)  F0 B0  x   idle 0 of 3\n"
        "\n"
        "F forward, B backward, x other compute, . idle; the number is the micro-batch\n"
    )
    empty = dataclasses.replace(schedule, programs=(Program((), ("x",), (), frozenset(), ()),))
    assert empty.table() == "slot\nrank 0 (dp=0)    idle 0 of 0\n"
