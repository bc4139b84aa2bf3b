"""What a label says, and which runs belong together."""

import dataclasses
import itertools

import pytest

from fparallel.mesh import Mesh
from fparallel.schedule import Collective, Program, Run
from fparallel.schedule.drawing.groups import groups
from fparallel.schedule.drawing.kinds import IDLE, STYLES, kind_of, micro_of
from tests.schedule.pipeline_orders import gpipe, pipeline


def run(label: str, inplace=()) -> Run:
    return Run("s", ("a",), ("b",), label, inplace)


def program(*instrs, donated=()) -> Program:
    return Program((), ("a",), (), frozenset(donated), tuple(instrs))


@pytest.mark.parametrize(
    ("label", "kind", "micro"),
    [
        ("F block.2.mb0", "forward", 0),
        ("B block.2.mb13", "backward", 13),
        ("W block.0.mb3", "weight", 3),
        ("F block.2", "forward", None),
        ("F3", "forward", 3),
        ("step.7 mb2", "other", 2),
        ("Find mb1", "other", 1),
        ("numb3", "other", None),
        ("update params", "update", None),
        ("", "other", None),
    ],
)
def test_the_label_says_kind_and_micro_batch(label, kind, micro):
    assert (kind_of(run(label), program()), micro_of(run(label))) == (kind, micro)


def test_a_run_over_a_donated_argument_is_an_update():
    over = run("step.9", ((0, 0),))
    assert kind_of(over, program(donated=("a",))) == "update"
    assert kind_of(over, program()) == "other"


def test_communication_has_the_micro_batch_of_its_buffers():
    dp = Mesh((2,), ("dp",)).axes("dp")
    assert micro_of(Collective("all_gather", dp, ("act.mb2", "b.mb2.3"), ("c.mb2", "d.mb2"))) == 2
    assert micro_of(Collective("all_gather", dp, ("act.mb2",), ("act.mb3",))) is None
    assert micro_of(Collective("all_gather", dp, ("w",), ("act.mb3",))) is None


def test_a_group_is_the_work_of_a_stage_on_a_micro_batch():
    labels = ["step.0 mb0", "F block.0.mb0", "F block.1.mb0", "step.1 mb0", "B block.1.mb0", "B block.0.mb0"]
    labels += ["step.2 mb0", "step.3 mb1", "F block.0.mb1", "step.4", "step.5"]
    made = groups(program(*map(run, labels), run("step.6", ((0, 0),)), donated=("a",)))
    assert [(group.text, group.numbers) for group in made] == [
        ("F0", (0, 1, 2, 3)), ("B0", (4, 5, 6)), ("F1", (7, 8)), ("x", (9, 10)), ("U", (11,)),
    ]  # fmt: skip


def test_a_wait_for_a_receive_begins_another_group():
    schedule = pipeline(gpipe, stages=3, micros=1, blocks=2)
    middle = schedule.programs[1]
    recv = middle.instrs[:2]
    twice = dataclasses.replace(
        middle, instrs=(*recv, run("F c0.mb0"), run("F c0.mb0"), *recv, run("F c1.mb0"))
    )
    assert [group.numbers for group in groups(twice)] == [(2, 3), (6,)]


def test_kinds_differ_without_colour():
    """By lightness (CIE L*) or by hatching: boxes of one row are told apart in black and white."""

    def lightness(style):
        rgb = [int(style.colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb)
        return 116 * (0.2126 * r + 0.7152 * g + 0.0722 * b) ** (1 / 3) - 16

    compute = [STYLES[kind] for kind in ("forward", "backward", "weight", "update", "other", "wait")]
    talk = [STYLES[kind] for kind in ("collective", "send", "recv")]
    for row in ([*compute, IDLE], [*talk, IDLE]):
        for one, other in itertools.combinations(row, 2):
            assert one.hatch != other.hatch or abs(lightness(one) - lightness(other)) > 5, (one, other)
