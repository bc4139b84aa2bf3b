"""The predicted time of a step: by hand, against known formulas, and laws that hold for every schedule."""

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import fparallel as fp
from fparallel.errors import ScheduleError
from fparallel.mesh import Mesh
from fparallel.schedule import (
    Cluster,
    Collective,
    Free,
    Link,
    Run,
    Wait,
    deadlock,
)
from fparallel.schedule.costs import collective_seconds, segment_seconds
from fparallel.schedule.memory import memory
from fparallel.schedule.rendezvous import classes
from fparallel.schedule.simulate import Event, Simulation
from tests.runtime.schedules import Builder, crossed_waits, matmul_over, pipeline
from tests.schedule.examples import example
from tests.schedule.pipelines import stages
from tests.schedule.strategies import any_schedules, pipeline_schedules

INF = math.inf
# A rank multiplies 100 numbers and touches 1000 bytes a second; a message takes 1 s, its bytes 100 a second.
SLOW = Cluster(
    "slow", {"float64": 100.0, "float32": 100.0}, 1000.0, 1_000_000, 8, Link(1.0, 100.0), Link(2.0, 10.0),
    Link(0.0, 50.0), run_overhead=0.5, op_overhead=0.25,
)  # fmt: skip
# Only flops take time.
FREE = Cluster("free", {"float32": 1.0}, INF, 1, 1 << 30, Link(0.0, INF), Link(0.0, INF), Link(0.0, INF))


def test_ranks_that_share_cores_take_longer_by_as_much_as_the_cores_are_too_few():
    schedule, _, _ = matmul_over("dp", 4)
    host = dataclasses.replace(SLOW, overlap=False)
    alone, shared = schedule.simulate(host), schedule.simulate(dataclasses.replace(host, cores=2))
    busy = 4 * (alone.roles[0].compute + sum(e.end - e.start for e in alone.events if e.stream != "compute"))
    assert shared.time == pytest.approx(busy / 2) and shared.time > alone.time
    ratio = shared.time / alone.time
    assert [e.end for e in shared.events] == pytest.approx([e.end * ratio for e in alone.events])
    role = shared.roles[0]
    assert role.compute + role.exposed + role.bubble * shared.time == pytest.approx(shared.time)
    enough = schedule.simulate(dataclasses.replace(host, cores=4))
    assert enough.time == alone.time


def test_an_op_takes_its_factor_times_its_roofline():
    step = fp.jit(lambda x: torch.tanh(x @ x) + 1, mesh=fp.make_mesh((1,), ("dp",), kind="abstract"))
    (segment,) = step.lower(torch.ones(8, 8)).schedule.segments.values()
    product, pass_over = 2 * 8**3 / 100, 2 * 4 * 64 / 1000
    assert segment_seconds(segment, SLOW) == pytest.approx(product + 2 * pass_over + 3 * 0.25)
    slow = dataclasses.replace(SLOW, factors={"aten.tanh.default": 5.0, "aten.mm.default": 0.5})
    assert segment_seconds(segment, slow) == pytest.approx(product / 2 + 6 * pass_over + 3 * 0.25)


def test_runs_and_collectives_by_hand():
    schedule, _, _ = matmul_over("dp", 2)
    found = schedule.simulate(SLOW)
    gather = 1.0 + 120 / 2 / 100  # w is f64[3,5]
    product = 0.5 + 0.25 + (4 * 3 + 15 + 5) * 8 / 1000  # a rank has 4 of 7 rows
    scatter = 1.0 + 40 / 2 / 100
    ends = list(itertools.accumulate([gather, product, scatter]))
    assert found.events == (
        Event(0, 0, "comm:dp", 0.0, pytest.approx(ends[0])),
        Event(0, 3, "compute", pytest.approx(ends[0]), pytest.approx(ends[1])),
        Event(0, 5, "comm:dp", pytest.approx(ends[1]), pytest.approx(ends[2])),
    )
    assert found.time == pytest.approx(ends[2])
    assert found.exposed == {0: pytest.approx(gather + scatter)}
    assert found.bubble == {0: 0.0} and found.bubble_fraction == 0.0
    assert found.peak == {0: {"device": memory(schedule).peak()}}


OVERLAPPED = """
    all_gather[dp]  w -> w@full
    run F <f>       (x) -> y
    wait            w@full
    run G <g>       (y, w@full) -> z
    free            y, w@full
"""


@pytest.mark.parametrize(
    ("overlap", "bandwidth", "exposed"),
    [
        (True, 100.0, 1.64 - 1.006),  # the gather: 1 + 64 / 100; F: 0.75 + 256 / 1000
        (True, 1e9, 0.0),  # a gather of 1 s is hidden
        (False, 100.0, 1.64),
        (False, 1e9, 1.0),
    ],
)
def test_communication_hides_behind_compute_only_where_it_overlaps(overlap, bandwidth, exposed):
    cluster = dataclasses.replace(SLOW, overlap=overlap, intra=Link(1.0, bandwidth))
    found = example(OVERLAPPED).simulate(cluster)
    assert found.exposed[0] == pytest.approx(exposed)
    assert found.time == pytest.approx(1.006 + 0.75 + 384 / 1000 + exposed)


def test_steps_of_one_communicator_follow_each_other_and_two_do_not():
    mesh = Mesh((2, 2), ("dp", "tp"))
    text = (
        "all_gather[dp] w1 -> w1@full\nall_gather[dp] w2 -> w2@full\nall_reduce[tp sum] h -> x\nwait w1@full"
    )
    schedule = example(text + "\nwait w2@full, x", mesh=mesh)
    starts = {event.number: (event.stream, event.start) for event in schedule.simulate(SLOW).events}
    assert starts == {0: ("comm:dp", 0.0), 1: ("comm:dp", pytest.approx(1.64)), 2: ("comm:tp", 0.0)}


def test_ops_cost_what_they_read_and_write():
    work = fp.schedule.segment.Work
    b = Builder(Mesh((1,), ("dp",)))
    relu = fp.schedule.LocalOp(
        "aten.relu.default", (fp.schedule.Ref(0),), (1,), work=work(0, 64, torch.float32)
    )
    product = fp.schedule.LocalOp("aten.mm.default", (), (2,), work=work(400, 100, torch.float64))
    b.segment("s", ["f32[8]"], ["f32[8]"], [relu, product], [2])
    assert segment_seconds(b.segments["s"], SLOW) == pytest.approx(0.064 + 4.0 + 2 * 0.25)


def test_the_compiler_says_what_ops_cost():
    mesh = fp.make_mesh((2,), ("dp",), kind="abstract")

    def step(w, x):
        return torch.relu(x @ w)

    specs = (fp.P(), fp.P("dp", None))
    lowered = fp.jit(step, mesh=mesh, in_shardings=specs, out_shardings=fp.P("dp", None)).lower(
        fp.ShapeDtypeStruct((4, 6), torch.float32), fp.ShapeDtypeStruct((8, 4), torch.float32)
    )
    (segment,) = lowered.schedule.segments.values()
    works = {op.target: op.work for op in segment.ops}
    assert works["aten.mm.default"] == fp.schedule.segment.Work(
        2 * 4 * 4 * 6, 4 * (24 + 16 + 24), torch.float32
    )
    assert works["aten.relu.default"].nbytes == 4 * (24 + 24)


def test_buffers_on_the_host_go_through_its_link():
    schedule = example("run F <f> (x) -> y")
    device = schedule.simulate(SLOW).time
    buffers = {**schedule.buffers, "x": dataclasses.replace(schedule.buffers["x"], memory="pinned_host")}
    found = dataclasses.replace(schedule, buffers=buffers).simulate(SLOW)
    assert found.time == pytest.approx(device + 128 / 50)
    assert found.peak == {0: {"device": 128, "pinned_host": 128}}


# ---------------------------------------------------------------- collectives


@pytest.mark.parametrize(
    ("kind", "src", "dst", "seconds"),
    [
        ("all_gather", "f32[8@dp,4]", "f32[8,4]", 3 * 1 + 128 * 3 / 4 / 100),
        ("reduce_scatter", "f32[8,4]{unreduced: dp:sum}", "f32[8@dp,4]", 3 * 1 + 128 * 3 / 4 / 100),
        ("all_reduce", "f32[8,4]{unreduced: dp:sum}", "f32[8,4]", 2 * (3 * 1 + 128 * 3 / 4 / 100)),
        ("all_to_all", "f32[8@dp,4]", "f32[8,4@dp]", 3 * 1 + 32 * 3 / 4 / 100),
        ("permute", "f32[8@dp,4]", "f32[8@dp,4]", 1 + 32 / 100),
    ],
)
def test_rings_on_one_node(kind, src, dst, seconds):
    assert collective(Mesh((4,), ("dp",)), kind, src, dst, SLOW) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("kind", "src", "dst", "seconds"),
    [
        # 2 nodes of 4: 6 steps inside, 1 between, where the links of 4 ranks give 40 bytes/s
        ("all_gather", "f32[8@dp,4]", "f32[8,4]", 6 * 1 + 2 + 128 * 7 / 8 / 40),
        ("all_reduce", "f32[8,4]{unreduced: dp:sum}", "f32[8,4]", 2 * (3 + 2) + 2 * 128 / 40),  # a tree
        ("all_reduce", "f32[800,4]{unreduced: dp:sum}", "f32[800,4]", 2 * (8 + 12800 * 7 / 8 / 40)),  # a ring
        # 3 of 8 parts stay on the node, 4 leave it by the rank's own link
        ("all_to_all", "f32[8@dp,8]", "f32[8,8@dp]", 3 * 1 + 4 * 2 + 32 * 4 / 8 / 10),
        ("permute", "f32[8@dp,4]", "f32[8@dp,4]", 2 + 16 / 10),
    ],
)
def test_groups_over_several_nodes(kind, src, dst, seconds):
    cluster = dataclasses.replace(SLOW, ranks_per_node=4)
    assert collective(Mesh((8,), ("dp",)), kind, src, dst, cluster) == pytest.approx(seconds)


def collective(mesh, kind, src, dst, cluster):
    b = Builder(mesh)
    b.buffer("x", src, "argument"), b.buffer("y", dst, "result")
    instr = Collective(kind, (mesh.axis("dp"),), ("x",), ("y",), "sum" if "reduce" in kind else "")
    return collective_seconds(b.schedule(), instr, cluster)


@pytest.mark.parametrize(
    ("axes", "per_node", "nodes"),
    [
        ("tp", 8, 1), ("tp", 4, 1), ("tp", 2, 2), ("tp:(1)2", 2, 2), ("tp:(2)2", 2, 1), ("dp", 4, 2), ("pp", 8, 2),
        ("dp", 8, 1), ("dp*tp", 8, 1), ("pp*tp", 8, 2), ("pp*dp*tp", 2, 8), ("pp*dp*tp", 16, 1), ("tp", 3, 2),
        ("dp", 3, 2),
    ],
)  # fmt: skip
def test_nodes_of_a_group(axes, per_node, nodes):
    mesh = Mesh((2, 2, 4), ("pp", "dp", "tp"))
    assert dataclasses.replace(SLOW, ranks_per_node=per_node).nodes(mesh, mesh.axes(axes)) == nodes


@given(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3), st.integers(1, 30), st.data())
def test_a_group_is_on_one_node_exactly_if_its_ranks_are(sizes, per_node, data):
    mesh = Mesh(tuple(sizes), ("a", "b", "c")[: len(sizes)])
    names = data.draw(st.lists(st.sampled_from(mesh.names), min_size=1, unique=True))
    cluster = dataclasses.replace(SLOW, ranks_per_node=per_node)
    spread = [len({rank // per_node for rank in group}) for group in mesh.groups(names)]
    found = cluster.nodes(mesh, [mesh.axis(name) for name in names])
    assert (found == 1) == (max(spread) == 1)


# ---------------------------------------------------------------- pipelines


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
@given(st.integers(2, 5), st.integers(1, 8), st.integers(1, 5), st.integers(1, 5))
def test_the_bubble_of_a_pipeline(order, p, m, f, b):
    """(m + p - 1)(f + b) for p stages and m micro-batches (Huang et al., GPipe; Narayanan et al., PipeDream)."""
    assume(order == "gpipe" or m >= p)
    found = stages(order, p, m, f, b).simulate(FREE)
    assert found.time == pytest.approx((m + p - 1) * (f + b))
    bubble = pytest.approx((p - 1) / (m + p - 1))
    assert found.bubble == {stage: bubble for stage in range(p)} and found.bubble_fraction == bubble
    assert set(found.exposed.values()) == {0.0}


def test_a_message_between_stages_takes_the_link_between_their_ranks():
    schedule = stages("gpipe", 4, 1, 0, 0)
    cluster = dataclasses.replace(FREE, ranks_per_node=2, intra=Link(1.0, INF), inter=Link(10.0, INF))
    times = [
        event.end - event.start for event in schedule.simulate(cluster).events if event.stream == "p2p:pp"
    ]
    assert sorted(times) == [1.0] * 8 + [10.0] * 4  # on both ends, there and back


def test_send_and_receive_by_hand():
    found = pipeline().simulate(SLOW)
    run, message = 0.75 + 0.032, 1.16
    assert found.time == pytest.approx(2 * run + 2 * message)
    first, second = found.roles
    assert (first.rank, first.text, first.ranks, second.rank, second.text) == (0, "pp=0", 1, 1, "pp=1")
    assert first.compute == second.compute == pytest.approx(run)
    assert first.bubble == second.bubble == pytest.approx((run + 2 * message) / found.time)


def test_waiting_for_a_stage_to_join_a_collective_is_no_communication():
    mesh = Mesh((2,), ("pp",))
    b, pp = Builder(mesh), (mesh.axis("pp"),)
    b.buffer("x", "f32[8]{unreduced: pp:sum}", "argument"), b.buffer("y", "f32[8]", "result")
    b.buffer("z", "f32[8]")
    b.segment("slow", ["f32[8]{unreduced: pp:sum}"], ["f32[8]"], [], [])
    b.segments["slow"] = dataclasses.replace(b.segments["slow"], flops=900)
    reduce = [Collective("all_reduce", pp, ("x",), ("y",), "sum"), Wait(("y",))]
    busy = [Run("slow", ("x",), ("z",)), Free(("z",)), *reduce]
    schedule = b.schedule(
        b.program(("x",), ("y",), busy, role=(("pp", 0),)),
        b.program(("x",), ("y",), reduce, role=(("pp", 1),)),
    )
    schedule.verify()
    found = schedule.simulate(SLOW)
    transfer, run = 2 * (1 + 16 / 100), 9.75
    assert found.time == pytest.approx(run + transfer)
    assert found.exposed == {0: pytest.approx(transfer), 1: pytest.approx(transfer)}
    assert found.bubble == {0: 0.0, 1: pytest.approx(run / (run + transfer))}


def test_a_thousand_ranks_cost_what_four_do():
    small, large = (stages("1f1b", 2, 4, 1, 2, dp=dp).simulate(SLOW) for dp in (2, 512))
    assert len(small.events) == len(large.events) and len(large.roles) == 2
    assert [role.ranks for role in large.roles] == [512, 512]
    assert [e.rank for e in large.events if e.number == 0 and e.stream == "compute"] == [0]
    assert {event.rank for event in large.events} == {0, 512}
    mesh = fp.make_mesh((1024,), ("dp",), kind="abstract")
    assert len(example(OVERLAPPED, mesh=mesh).simulate(SLOW).events) == 3


# ---------------------------------------------------------------- what cannot run


def test_what_deadlocks_is_an_error_that_names_the_step():
    with pytest.raises(ScheduleError, match="waits for never happens") as error:
        pipeline("crossed").simulate(SLOW)
    assert "rank 0 (pp=0), instruction 0002  wait" in str(error.value)
    assert crossed_waits().simulate(SLOW).time > 0


@given(pipeline_schedules(), st.data())
def test_what_cannot_run_is_what_deadlocks(schedule, data):
    """With two instructions of one stage exchanged; issue does not block."""
    index = data.draw(st.integers(0, len(schedule.programs) - 1))
    program = schedule.programs[index]
    i, j = (data.draw(st.integers(0, len(program) - 1)) for _ in range(2))
    instrs = list(program.instrs)
    instrs[i], instrs[j] = instrs[j], instrs[i]
    programs = list(schedule.programs)
    programs[index] = dataclasses.replace(program, instrs=tuple(instrs))
    schedule = dataclasses.replace(schedule, programs=tuple(programs))

    def fail(*problem):
        raise AssertionError(problem)

    stuck = deadlock.simulate(classes(schedule, fail), blocking=False)
    try:
        schedule.simulate(SLOW)
    except ScheduleError as error:
        assert stuck or "never happens: not all members" in str(error)
    else:
        assert not stuck


# ---------------------------------------------------------------- laws

seconds = st.floats(0, 10)
rates = st.floats(1, 1e6)
links = st.builds(Link, seconds, rates)
clusters = st.builds(
    Cluster,
    st.just("any"),
    st.fixed_dictionaries({name: rates for name in ("float32", "bfloat16")}),
    rates,
    st.just(1),
    st.integers(1, 16),
    links,
    links,
    links,
    seconds,
    seconds,
    st.booleans(),
)


@given(any_schedules(), clusters)
def test_all_of_the_time_is_accounted_for(schedule, cluster):
    found = schedule.simulate(cluster)
    for role in found.roles:
        assert role.exposed >= -1e-9 and role.bubble >= -1e-9
        total = role.compute + role.exposed + role.bubble * found.time
        assert total == pytest.approx(found.time, abs=1e-9)
        runs = [e for e in found.events if (e.rank, e.stream) == (role.rank, "compute")]
        assert role.compute == pytest.approx(sum(e.end - e.start for e in runs))
        assert all(before.end <= after.start for before, after in itertools.pairwise(runs))
        assert [e.number for e in runs] == sorted(e.number for e in runs)
    steps = sum(not isinstance(i, (Wait, Free)) for program in schedule.programs for i in program.instrs)
    assert len(found.events) == steps
    assert max(e.end for e in found.events) <= found.time if found.events else found.time == 0


@given(any_schedules(), clusters, st.floats(1, 100), st.floats(1, 100), st.floats(0, 1))
def test_a_faster_cluster_is_never_slower(schedule, cluster, more, wider, sooner):
    faster = dataclasses.replace(
        cluster,
        flops={name: rate * more for name, rate in cluster.flops.items()},
        bandwidth=cluster.bandwidth * wider,
        **{
            name: Link(link.latency * sooner, link.bandwidth * wider)
            for name in ("intra", "inter", "host")
            for link in [getattr(cluster, name)]
        },
        overlap=True,
    )
    assert schedule.simulate(faster).time <= schedule.simulate(cluster).time * (1 + 1e-9)


# ---------------------------------------------------------------- text


def test_it_prints_a_row_per_role():
    found = pipeline().simulate(dataclasses.replace(SLOW, memory=8))
    assert isinstance(found, Simulation)
    assert str(found).splitlines() == [
        "3.88 s a step on slow, bubble 79.9%; does not fit: 48 B in 8 B of device memory",
        "rank        compute  exposed  bubble  peak device",
        "0 (pp=0)  782.00 ms  0.00 us   79.9%         32 B",
        "1 (pp=1)  782.00 ms  0.00 us   79.9%         48 B",
    ]
