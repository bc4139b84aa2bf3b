"""Law: whatever memory budget a ZeRO-3 step keeps to, it equals the step on one device, and holds no more."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fparallel as fp
from fparallel.errors import LayoutError
from fparallel.schedule.memory import highest_peak
from fparallel.schedule.passes import run_passes
from fparallel.testing.problems import build
from tests.property.verdicts import check

ROOM = 10**9
SMALL = fp.testing.cases(kinds=("mlp", "relu", "glu", "attention"), dropout=True, microbatches=(0, 1, 2, 3))


def lower(case, budget):
    problem = build(case)
    step = fp.jit(
        problem.step,
        mesh=problem.mesh,
        rules=problem.rules,
        donate_argnums=0 if case.donate else (),
        pipeline=case.pipeline,
        memory_budget=budget,
    )
    return step.lower(problem.init(problem.args[0]), *problem.args[1:])


@pytest.mark.timeout(7200)
@given(case=st.one_of(SMALL, fp.testing.pipelined_cases()), at=st.sampled_from([0, 0.2, 0.5, 1]))
def test_equals_one_device_within_a_budget(case, at):
    axis = case.zero[1] if case.zero else case.mesh[0][0]
    if axis == "pp":
        axis = case.mesh[1][0]
    case = dataclasses.replace(case, zero=(3, axis, 0), steps=1)
    try:
        roomy = lower(case, ROOM)
    except LayoutError:
        return check(case)  # a legal refusal
    least = highest_peak(run_passes(roomy.program.schedule, memory_budget=0)).nbytes
    budget = int(least + at * (roomy.memory().peak() - least))
    low = lower(case, budget)
    low.schedule.verify(memory_budget=budget)
    check(case, memory_budget=budget)
    for op in ("all_gather", "send"):
        for program in low.schedule.programs if case.pipeline != "auto" else ():
            rank = low.schedule.first_rank(program)
            assert roomy.schedule.bytes(op, rank=rank) <= low.schedule.bytes(op, rank=rank)
    return None
