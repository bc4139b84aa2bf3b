"""Pipeline orders: known values, torch's orders, and what is said of wrong ones."""

import re

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

import fparallel as fp
from fparallel.errors import ScheduleError
from fparallel.schedule import orders as o
from fparallel.schedule import tasks as tk
from fparallel.schedule.tasks import Task


@pytest.fixture
def register(monkeypatch):
    """Registers rows under a name for the time of a test."""

    def add(rows, name="mine", **options):
        monkeypatch.setattr(o, "ORDERS", dict(o.ORDERS))
        fp.register_order(name, **options)(lambda ranks, micros, chunks: rows)

    return add


def tasks(text):
    return [Task(t[0], *map(int, t[1:].split("."))) for t in text.split()]


def refusal(text, ranks, micros):
    with pytest.raises(ScheduleError) as caught:
        o.make_plan(text, ranks, micros)
    assert str(caught.value).splitlines()[-1].startswith("Fix: ")
    return str(caught.value)


# ---------------------------------------------------------------- known values


def test_grid_of_1f1b_on_3_ranks_with_4_micro_batches():
    lines = tk.grid(o.make_plan("1f1b", 3, 4)).splitlines()
    assert lines == [
        "  rank 0  F0.0 F0.1 F0.2 .    .    B0.0 F0.3 B0.1 .    B0.2 .    B0.3",
        "  rank 1  .    F1.0 F1.1 .    B1.0 F1.2 B1.1 F1.3 B1.2 .    B1.3 .",
        "  rank 2  .    .    F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 F2.3 B2.3 .    .",
    ]


def test_two_stages_of_four_layers_and_three_micro_batches_are_idle_a_quarter_of_the_time():
    """Forward only, slots of time: (A, -) (B, A) (C, B) (-, C)."""
    place = o.balance([1] * 8, 2)
    assert place == [0, 0, 0, 0, 1, 1, 1, 1]
    rows = [[Task("F", stage, m) for m in range(3)] for stage in range(2)]
    layers = [place.count(stage) for stage in range(2)]
    done, _ = tk.times(rows, lambda task: tk.needs(task, 2), lambda task: layers[task.stage] / 4)
    slots = [
        tuple(
            next(("ABC"[task.micro] for task in row if done[task] == (slot, slot + 1)), "-") for row in rows
        )
        for slot in range(4)
    ]
    assert slots == [("A", "-"), ("B", "A"), ("C", "B"), ("-", "C")]
    assert max(end for _, end in done.values()) == 4
    assert sum(name == "-" for slot in slots for name in slot) / 8 == 0.25


def test_the_vee_puts_the_last_stage_with_the_first():
    assert o.vee(3, 2) == [0, 1, 2, 2, 1, 0]
    assert o.round_robin(3, 2) == [0, 1, 2, 0, 1, 2]


def test_balance():
    place = o.balance([1, 7, 2, 3], 3)
    assert place == [0, 1, 2, 2]  # 1, 7 and 5
    assert sorted(map(o.balance([1] * 5, 4).count, range(4))) == [1, 1, 1, 2]
    with pytest.raises(ScheduleError, match=r"3 layers cannot make 4 stages\nFix: "):
        o.balance([1, 1, 1], 4)


# ---------------------------------------------------------------- torch's orders


class TorchOrders:
    """The orders of torch.distributed.pipelining, from methods that torch keeps private.

    Their constructors want stages and process groups, so instances get the few attributes that the methods read.
    """

    @staticmethod
    def one_f_one_b(ranks, micros):
        order = object.__new__(torch_schedules.Schedule1F1B)
        order._num_stages, order._n_microbatches = ranks, micros
        made = order._get_pipeline_order()
        return [TorchOrders.row(made[rank], "B") for rank in range(ranks)]

    @staticmethod
    def per_rank(cls, ranks, micros, chunks, whole):
        rows = []
        for rank in range(ranks):
            order = object.__new__(cls)
            order.pp_group_size, order._n_microbatches, order.rank = ranks, micros, rank
            order.n_local_stages, order.num_stages = chunks, chunks * ranks
            order.number_of_rounds = max(1, micros // ranks)
            order.microbatches_per_round = micros // order.number_of_rounds
            rows.append(TorchOrders.row(order._calculate_single_rank_operations(rank), whole))
        return rows

    @staticmethod
    def row(actions, whole):
        """`whole`: the tasks of a whole backward."""
        kinds = {"FORWARD": "F", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": whole}
        return [
            Task(kind, action.stage_index, action.microbatch_index)
            for action in actions
            if action is not None
            for kind in kinds.get(action.computation_type.name, "")
        ]


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
@pytest.mark.parametrize("micros", [6, 8, 13])
def test_1f1b_is_torchs(ranks, micros):
    """On the last rank torch 2.13 counts the forwards from 1: there only the kinds can be compared."""
    rows, theirs = o.make_plan("1f1b", ranks, micros).rows, TorchOrders.one_f_one_b(ranks, micros)
    assert rows[:-1] == theirs[:-1]
    assert [task.kind for task in rows[-1]] == [task.kind for task in theirs[-1]]


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize(
    "ranks, micros", [(1, 3), (2, 2), (2, 4), (2, 3), (3, 6), (4, 4), (4, 8), (4, 6), (5, 3)]
)
def test_interleaved_is_torchs(ranks, micros, chunks):
    theirs = TorchOrders.per_rank(torch_schedules.ScheduleInterleaved1F1B, ranks, micros, chunks, "B")
    assert o.make_plan(f"interleaved:{chunks}", ranks, micros).rows == theirs


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("micros", [1, 2, 5, 8, 13])
def test_zb_v_is_torchs(ranks, micros):
    theirs = TorchOrders.per_rank(torch_schedules.ScheduleZBVZeroBubble, ranks, micros, 2, "BW")
    assert o.make_plan("zb_v", ranks, micros).rows == theirs


# ---------------------------------------------------------------- names


def test_names_and_chunks():
    assert [o.find_order(name, 4)[1] for name in ("1f1b", "interleaved", "interleaved:3", "zb_v", "zb_v:2")] == [
        1, 2, 3, 2, 2,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text, said",
    [
        ("1f1", "there is no pipeline order '1f1'; did you mean '1f1b'?"),
        ("interleave:2", "did you mean 'interleaved'?"),
        ("zebra", "The orders are gpipe, 1f1b, interleaved, zb_h1, zb_v"),
        ("zb_v:3", "the order zb_v needs 2 chunks a rank, 8 stages on 4 ranks, not 3"),
        ("1f1b:2", "the order 1f1b needs 1 chunk a rank, 4 stages on 4 ranks, not 2"),
        ("interleaved:x", "'x' is no number of chunks"),
        ("interleaved:0", "'0' is no number of chunks"),
        ("interleaved:", "'' is no number of chunks"),
    ],
)
def test_a_wrong_name(text, said):
    assert said in refusal(text, 4, 8)


# ---------------------------------------------------------------- wrong orders

GOOD = ["F0.0 F0.1 B0.0 F0.2 B0.1 B0.2", "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2"]


def test_a_registered_order_is_used(register):
    register([tasks(row) for row in GOOD])
    assert o.make_plan("mine", 2, 3).rows == o.make_plan("1f1b", 2, 3).rows


@pytest.mark.parametrize(
    "row, said, cell",
    [
        ("F1.0 B1.0 F1.1 B1.1 F1.2", "B1.2 is not run, rank 1", None),
        ("F1.0 B1.0 F1.1 B1.1", "F1.2, B1.2 are not run, rank 1", None),
        ("F1.0 B1.0 F1.1 B1.1 B1.1 F1.2 B1.2", "B1.1 is run twice, rank 1", ">B1.1<"),
        ("F1.0 B1.0 F1.1 B1.1 F1.2 B0.2", "B0.2 is no task of this rank, rank 1", ">B0.2<"),
        ("F1.0 B1.0 F1.1 B1.1 F1.2 B1.3", "B1.3 is no task of this rank, rank 1", ">B1.3<"),
        ("F1.0 B1.0 F1.1 B1.1 B1.2 F1.2", "B1.2 waits for F1.2, which cannot have run by then", ">B1.2<"),
        ("F1.0 B1.0 W1.0 F1.1 B1.1 F1.2 B1.2", "W1.0 is a W, but the order is registered without", ">W1.0<"),
    ],
)
def test_a_wrong_row_is_shown_with_its_cell(register, row, said, cell):
    register([tasks(GOOD[0]), tasks(row)])
    text = refusal("mine", 2, 3)
    assert text.startswith("the order mine for 2 ranks, 3 micro-batches and 1 chunk a rank: ")
    assert said in text
    assert re.findall(r">\w+\.\d+<", text) == ([cell] if cell else [])
    shown = text.splitlines()[1:3]
    assert shown[0].startswith("  rank 0  F0.0 ") and shown[1].startswith("> rank 1  ")
    if cell:
        assert cell in shown[1]


def test_ranks_that_wait_for_each_other(register):
    """Each rank alone is in order, but rank 0 wants B0.0 before F0.1 and rank 1 F1.1 before B1.0."""
    register([tasks("F0.0 B0.0 F0.1 B0.1"), tasks("F1.0 F1.1 B1.0 B1.1")])
    text = refusal("mine", 2, 2)
    assert "waits for B1.0, which cannot have run by then, rank 0" in text
    assert ">B0.0<" in text and "let no two ranks wait for each other" in text


def test_a_w_before_its_b(register):
    register([tasks("F0.0 W0.0 B0.0")], splits=True)
    text = refusal("mine", 1, 1)
    assert "W0.0 waits for B0.0" in text and "F0.0   >W0.0<" in text


def test_too_few_rows(register):
    register([tasks(GOOD[0])])
    assert "gives 1 rows for 2 ranks" in refusal("mine", 2, 3)
