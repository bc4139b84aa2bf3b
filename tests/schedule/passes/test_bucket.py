"""What merges, and what does not."""

import dataclasses

import torch

from fparallel.schedule import Collective
from fparallel.schedule.passes import bucket
from tests.schedule.examples import example, instr_lines

TWO_GRADIENTS = """
    run B2 <b>                (x, w) -> d, g2
    reduce_scatter[dp sum]    g2 -> g2@shard
    run B1 <b>                (d, w) -> e, g1
    reduce_scatter[dp sum]    g1 -> g1@shard
    wait                      g2@shard, g1@shard
"""


def collectives(schedule):
    return [instr.ins for instr in schedule.programs[0].instrs if isinstance(instr, Collective)]


def test_the_bound_is_on_the_whole_tensors_of_a_bucket():
    schedule = example(TWO_GRADIENTS)  # g1 and g2: 128 bytes each
    assert collectives(bucket(schedule, max_bytes=256)) == [("g2", "g1")]
    assert collectives(bucket(schedule, max_bytes=255)) == [("g2",), ("g1",)]


def test_a_bucket_has_one_dtype():
    schedule = example(TWO_GRADIENTS)
    buffers = {
        name: dataclasses.replace(buffer, dtype=torch.bfloat16) if name.startswith("g1") else buffer
        for name, buffer in schedule.buffers.items()
    }
    segments = {**schedule.segments}
    assert collectives(bucket(dataclasses.replace(schedule, buffers=buffers, segments=segments))) == [
        ("g2",),
        ("g1",),
    ]


def test_a_step_is_not_delayed_past_a_read_of_its_output():
    schedule = example("""
        run B2 <b>                (x, w) -> d, g2
        reduce_scatter[dp sum]    g2 -> g2@shard
        wait                      g2@shard
        run B1 <c>                (d, g2@shard) -> e, g1
        reduce_scatter[dp sum]    g1 -> g1@shard
        wait                      g1@shard
    """)
    assert bucket(schedule) == schedule


def test_a_step_is_not_delayed_past_a_write_over_its_input():
    schedule = example("""
        run B2 <b>                (x, w) -> d, g2
        reduce_scatter[dp sum]    g2 -> g2@shard
        wait                      g2@shard
        run add <c>               (g2, d) -> g1<=g2
        reduce_scatter[dp sum]    g1 -> g1@shard
        wait                      g1@shard
    """)
    assert bucket(schedule) == schedule


def test_gathers_of_arguments_merge_for_one_run_and_not_past_another():
    schedule = example("""
        all_gather[dp]  w1 -> w1@full
        all_gather[dp]  w2 -> w2@full
        run F <f>       (x) -> y
        all_gather[dp]  w3 -> w3@full
        wait            w1@full, w2@full, w3@full
        run G <g>       (y, w1@full, w2@full, w3@full) -> z
    """)
    assert collectives(bucket(schedule)) == [("w1", "w2"), ("w3",)]


def test_a_free_that_comes_too_early_for_the_bucket_moves_behind_it():
    schedule = example("""
        run B2 <b>                (x, w) -> d, g2
        reduce_scatter[dp sum]    g2 -> g2@shard
        wait                      g2@shard
        free                      g2
        run B1 <b>                (d, w) -> e, g1
        free                      d
        reduce_scatter[dp sum]    g1 -> g1@shard
        wait                      g1@shard
        free                      g1
    """)
    assert instr_lines(bucket(schedule)) == instr_lines(
        example("""
            run B2 <b>                (x, w) -> d, g2
            run B1 <b>                (d, w) -> e, g1
            free                      d
            reduce_scatter[dp sum]    g2, g1 -> g2@shard, g1@shard
            wait                      g2@shard, g1@shard
            free                      g2
            free                      g1
        """)
    )


def test_a_bucket_names_the_causes_of_its_members():
    lines = [f"reduce_scatter[dp sum] g{i} -> g{i}@shard  # cause {i}  ## step.py:{i}" for i in range(1, 7)]
    run = "run B <b> (x) -> " + ", ".join(f"g{i}" for i in range(1, 7))
    merged = bucket(example("\n".join([run, *lines])))
    (step,) = (instr for instr in merged.programs[0].instrs if isinstance(instr, Collective))
    assert step.cause == "cause 1; cause 2; cause 3; and 3 more"
    assert step.source == "step.py:1"
