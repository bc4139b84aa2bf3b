"""Pipeline schedules of any size, built from instructions: the orders of the literature."""

from __future__ import annotations

import torch

from fparallel.layout import parse
from fparallel.mesh import Mesh
from fparallel.schedule import Buffer, Free, Instr, Program, Recv, Run, Schedule, Segment, Send, Wait

# A stage does this in order: ("F" or "B", micro-batch).
Order = list[tuple[str, int]]


def gpipe(stage: int, stages: int, micros: int) -> Order:
    """All forwards, then all backwards (Huang et al., 2019)."""
    return [("F", m) for m in range(micros)] + [("B", m) for m in range(micros)]


def one_f_one_b(stage: int, stages: int, micros: int) -> Order:
    """As many forwards as there are stages after this one, then one forward, one backward (PipeDream-flush)."""
    ahead = min(micros, stages - 1 - stage)
    order = [("F", m) for m in range(ahead)]
    for m in range(micros - ahead):
        order += [("F", ahead + m), ("B", m)]
    return order + [("B", m) for m in range(micros - ahead, micros)]


def pipeline(order=one_f_one_b, stages: int = 8, micros: int = 16, blocks: int = 1) -> Schedule:
    """A pipeline of `stages` roles pp=0, 1, ... that pass activations down and gradients up.

    Every stage keeps its input and its blocks' outputs until the backward of the micro-batch; at the end an update
    writes over its parameters. Between two stages there is one queue for both directions, so a stage asks for its next
    input before it sends a gradient up, in the order in which the stage before sends and receives.
    """
    mesh = Mesh((stages,), ("pp",))
    pp = mesh.axis("pp")
    buffers: dict[str, Buffer] = {}
    layout = parse("[256,4]", mesh)[1]

    def buffer(name: str, kind: str = "temp") -> str:
        return buffers.setdefault(name, Buffer(name, torch.float32, layout, kind)).name

    value = (torch.float32, layout)
    segments = {
        name: Segment(name, (value,) * ins, (value,) * outs, (), (), 1000, f"{i:012x}")
        for i, (name, ins, outs) in enumerate((("F", 2, 1), ("B", 3, 1), ("update", 2, 1)))
    }
    programs = []
    for stage in range(stages):
        first, last = stage == 0, stage == stages - 1
        weight = buffer(f"state.params.s{stage}", "argument")
        arguments = [weight, *(buffer(f"batch.x.mb{m}", "argument") for m in range(micros) if first)]
        instrs: list[Instr] = []
        grad = ""
        steps = order(stage, stages, micros)
        asked: set[int] = set()
        for (kind, m), (next_kind, next_m) in zip(steps, [*steps[1:], ("", -1)], strict=True):
            acts = [f"batch.x.mb{m}" if first else buffer(f"act.s{stage}.mb{m}")]
            acts += [buffer(f"out.s{stage}.{k}.mb{m}") for k in range(blocks - 1)]
            acts.append(buffer(f"act.s{stage + 1}.mb{m}"))
            if kind == "F":
                if not first:
                    if m not in asked:
                        instrs.append(Recv(pp, stage - 1, (acts[0],), "input of the stage"))
                    instrs.append(Wait((acts[0],)))
                for k in range(blocks):
                    label = f"F block.{stage * blocks + k}.mb{m}"
                    instrs.append(Run("F", (acts[k], weight), (acts[k + 1],), label))
                if not last:
                    instrs += [Send(pp, stage + 1, (acts[-1],)), Wait((acts[-1],))]
                continue
            up = acts[-1]
            if not last:
                up = buffer(f"grad.s{stage + 1}.mb{m}")
                instrs += [Recv(pp, stage + 1, (up,)), Wait((up,))]
            for k in reversed(range(blocks)):
                out = buffer(f"grad.s{stage}.mb{m}" if k == 0 else f"grad.s{stage}.{k}.mb{m}")
                label = f"B block.{stage * blocks + k}.mb{m}"
                instrs.append(Run("B", (up, acts[k], weight), (out,), label))
                if up not in acts:
                    instrs.append(Free((up,)))
                up = out
            instrs.append(Free(tuple(acts[first:])))
            if not first and next_kind == "F":
                asked.add(next_m)
                ask = buffer(f"act.s{stage}.mb{next_m}")
                instrs.append(Recv(pp, stage - 1, (ask,), "input of the stage"))
            if not first:
                instrs += [Send(pp, stage - 1, (up,)), Wait((up,))]
            if grad:
                instrs.append(Free((grad,)))
            grad = up
        new = buffer(f"params.s{stage}", "result")
        instrs += [Run("update", (weight, grad), (new,), "step.9", ((0, 0),)), Free((grad,))]
        programs.append(
            Program((("pp", stage),), tuple(arguments), (new,), frozenset({weight}), tuple(instrs))
        )
    return Schedule(mesh, buffers, segments, tuple(programs))
