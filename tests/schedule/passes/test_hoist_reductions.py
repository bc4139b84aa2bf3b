"""What is issued earlier, and what is not."""

from fparallel.schedule.passes import hoist_reductions
from tests.schedule.examples import example, instr_lines


def test_a_collective_on_the_output_of_another_stays():
    """Issued right behind the first it would wait for it there."""
    schedule = example("""
        run B2 <b>                (x) -> d, g1
        reduce_scatter[dp sum]    g1 -> g1@shard
        run B1 <c>                (d) -> e
        wait                      g1@shard
        all_gather[dp]            g1@shard -> f
        wait                      f
    """)
    assert hoist_reductions(schedule) == schedule


def test_a_collective_waits_for_the_last_of_its_inputs():
    schedule = example("""
        run B2 <b>                (x) -> d, g1
        run B1 <b>                (d) -> e, g2
        run C <c>                 (e) -> f
        reduce_scatter[dp sum]    g1, g2 -> g1@shard, g2@shard
        wait                      g1@shard, g2@shard
    """)
    assert instr_lines(hoist_reductions(schedule)) == instr_lines(
        example("""
            run B2 <b>                (x) -> d, g1
            run B1 <b>                (d) -> e, g2
            reduce_scatter[dp sum]    g1, g2 -> g1@shard, g2@shard
            run C <c>                 (e) -> f
            wait                      g1@shard, g2@shard
        """)
    )
