"""When buffers die."""

from fparallel.schedule.passes import complete, early_free
from tests.schedule.examples import example, instr_lines


def test_a_donated_argument_that_is_never_read_is_freed_at_once():
    schedule = example("run F <f> (x) -> y\nrun G <g> (y, s) -> z\nfree s, y")
    program = schedule.programs[0]
    unread = example(
        "run F <f> (x) -> y\nrun G <g> (y) -> z", like="run F <f> (x, s) -> y\nrun G <g> (y) -> z\nfree s, y"
    )
    assert program.donated == {"s"}
    assert instr_lines(early_free(unread)) == instr_lines(
        example("free s\nrun F <f> (x) -> y\nrun G <g> (y) -> z\nfree y")
    )


def test_steps_issued_together_are_one_batch():
    """Gradients of one run are reduced by two steps: the second does not wait for the first."""
    text = """
        run B2 <b>                (x) -> d, g1, g2
        reduce_scatter[dp sum]    g1 -> g1@shard
        reduce_scatter[dp sum]    g2 -> g2@shard
        run B1 <c>                (d) -> e, g3
        reduce_scatter[dp sum]    g3 -> g3@shard
        run U <u>                 (g1@shard, g2@shard, g3@shard) -> s'
    """
    freed = text + "wait g1@shard, g2@shard, g3@shard\nfree d, e, g1, g2, g3, g1@shard, g2@shard, g3@shard"
    assert instr_lines(early_free(complete(example(text, like=freed)))) == instr_lines(
        example("""
            run B2 <b>                (x) -> d, g1, g2
            reduce_scatter[dp sum]    g1 -> g1@shard
            reduce_scatter[dp sum]    g2 -> g2@shard
            run B1 <c>                (d) -> e, g3
            wait                      g1@shard, g2@shard
            free                      d, g1, g2, e
            reduce_scatter[dp sum]    g3 -> g3@shard
            wait                      g3@shard
            free                      g3
            run U <u>                 (g1@shard, g2@shard, g3@shard) -> s'
            free                      g1@shard, g2@shard, g3@shard
        """)
    )


def test_a_step_that_holds_nothing_is_not_waited_for_early():
    """The gather reads an argument, which stays: its wait sinks to the use of its output."""
    text = """
        all_gather[dp]            w1 -> w1@full
        run F <f>                 (x) -> y
        all_gather[dp]            w2 -> w2@full
        run G <g>                 (y) -> z
        wait                      w1@full, w2@full
        run H <h>                 (z, w1@full, w2@full) -> u
        free                      y, z, w1@full, w2@full
    """
    assert instr_lines(early_free(example(text))) == instr_lines(
        example("""
            all_gather[dp]            w1 -> w1@full
            run F <f>                 (x) -> y
            all_gather[dp]            w2 -> w2@full
            run G <g>                 (y) -> z
            free                      y
            wait                      w1@full, w2@full
            run H <h>                 (z, w1@full, w2@full) -> u
            free                      w1@full, w2@full, z
        """)
    )
