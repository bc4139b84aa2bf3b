"""Hand-written schedules, small enough to check by eye."""

from __future__ import annotations

import torch
from torch import Tensor

from fparallel.layout import parse
from fparallel.mesh import Mesh, make_mesh
from fparallel.schedule import (
    Buffer,
    Collective,
    Free,
    Instr,
    LocalOp,
    Program,
    Recv,
    Ref,
    Run,
    Schedule,
    Segment,
    Send,
    Wait,
)


class Builder:
    """Names buffers by their types: `Builder(mesh).buffer("x", "f32[8@dp,3]", "argument")`."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.buffers: dict[str, Buffer] = {}
        self.segments: dict[str, Segment] = {}

    def buffer(self, name: str, text: str, kind: str = "temp") -> str:
        dtype, layout = parse(text, self.mesh)
        assert dtype is not None
        self.buffers[name] = Buffer(name, dtype, layout, kind)
        return name

    def segment(
        self, name: str, ins: list[str], outs: list[str], ops: list[LocalOp], results: list[int]
    ) -> str:
        types = [[parse(text, self.mesh) for text in texts] for texts in (ins, outs)]
        self.segments[name] = Segment(name, tuple(types[0]), tuple(types[1]), tuple(ops), tuple(results))
        return name

    def program(
        self,
        arguments: tuple[str, ...],
        results: tuple[str, ...],
        instrs: list[Instr],
        *,
        donated: tuple[str, ...] = (),
        role: tuple[tuple[str, int], ...] = (),
    ) -> Program:
        return Program(role, arguments, results, frozenset(donated), tuple(instrs))

    def schedule(self, *programs: Program) -> Schedule:
        return Schedule(self.mesh, self.buffers, self.segments, programs)


def matmul_over(axis: str = "dp", size: int = 2) -> tuple[Schedule, tuple[Tensor, Tensor], Tensor]:
    """Gather w, multiply by x, reduce_scatter the sum over rows; w is donated.

    Returns:
      (schedule, global x and w, the expected global result).
    """
    mesh = make_mesh((size,), (axis,), kind="simulated")
    b, along = Builder(mesh), (mesh.axis(axis),)
    b.buffer("x", f"f64[7@{axis},3]", "argument")
    b.buffer("w", f"f64[3,5@{axis}]", "argument")
    b.buffer("w@full", "f64[3,5]")
    b.buffer("partial", f"f64[5]{{unreduced: {axis}:sum}}")
    b.buffer("total", f"f64[5@{axis}]", "result")
    b.segment(
        "product", [f"f64[7@{axis},3]", "f64[3,5]"], [f"f64[5]{{unreduced: {axis}:sum}}"],
        [
            LocalOp("aten.mm.default", (Ref(0), Ref(1)), (2,), source="model.py:3"),
            LocalOp("aten.sum.dim_IntList", (Ref(2), [0]), (3,), source="model.py:4"),
        ],
        [3],
    )  # fmt: skip
    program = b.program(
        ("x", "w"),
        ("total",),
        [
            Collective("all_gather", along, ("w",), ("w@full",), source="model.py:2"),
            Wait(("w@full",)),
            Free(("w",)),
            Run("product", ("x", "w@full"), ("partial",), "F"),
            Free(("w@full",)),
            Collective("reduce_scatter", along, ("partial",), ("total",), "sum", source="model.py:4"),
            Wait(("total",)),
            Free(("partial",)),
        ],
        donated=("w",),
    )
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 3, dtype=torch.float64, generator=generator)
    w = torch.randn(3, 5, dtype=torch.float64, generator=generator)
    return b.schedule(program), (x, w), (x @ w).sum(0)


def sums_in_place(size: int, numel: int) -> Schedule:
    """Three sums over all ranks, two of them in one bucket, each in the place of its doubled terms."""
    mesh = make_mesh((size,), ("dp",), kind="simulated")
    b, dp = Builder(mesh), (mesh.axis("dp"),)
    shapes = {"x": f"{numel}", "y": "3,2", "z": f"2,{numel}"}
    for name, shape in shapes.items():
        b.buffer(name, f"f32[{shape}]{{unreduced: dp:sum}}", "argument")
        b.buffer(f"{name}2", f"f32[{shape}]{{unreduced: dp:sum}}")
        b.buffer(f"{name}@sum", f"f32[{shape}]", "result")
    pending = [f"f32[{shape}]{{unreduced: dp:sum}}" for shape in shapes.values()]
    double = [LocalOp("aten.mul.Tensor", (Ref(i), 2), (3 + i,)) for i in range(3)]
    b.segment("double", pending, pending, double, [3, 4, 5])
    program = b.program(
        ("x", "y", "z"),
        ("x@sum", "y@sum", "z@sum"),
        [
            Run("double", ("x", "y", "z"), ("x2", "y2", "z2")),
            Collective("all_reduce", dp, ("x2", "y2"), ("x@sum", "y@sum"), "sum", inplace=True),
            Collective("all_reduce", dp, ("z2",), ("z@sum",), "sum", inplace=True),
            Wait(("x@sum", "z@sum")),
        ],
    )
    return b.schedule(program)


def pipeline(order: str = "good") -> Schedule:
    """Two stages: x is doubled on the first, the second adds one and sends it back.

    With `order` "crossed" both stages send first.
    """
    mesh = make_mesh((2,), ("pp",), kind="simulated")
    b, pp = Builder(mesh), mesh.axis("pp")
    for name, kind in (("x", "argument"), ("y", "temp"), ("back", "result")):
        b.buffer(name, "f32[4]", kind)
    b.segment("double", ["f32[4]"], ["f32[4]"], [LocalOp("aten.mul.Tensor", (Ref(0), 2), (1,))], [1])
    b.segment("increment", ["f32[4]"], ["f32[4]"], [LocalOp("aten.add.Tensor", (Ref(0), 1), (1,))], [1])
    send, recv = [Send(pp, 1, ("y",)), Wait(("y",)), Free(("y",))], [Recv(pp, 1, ("back",)), Wait(("back",))]
    first = [Run("double", ("x",), ("y",)), *send, *recv]
    recv, send = (
        [Recv(pp, 0, ("y",)), Wait(("y",))],
        [Send(pp, 0, ("back",)), Wait(("back",)), Free(("back",))],
    )
    if order == "good":
        second = [*recv, Run("increment", ("y",), ("back",)), Free(("y",)), *send]
    else:
        second = [Run("increment", ("x",), ("back",)), *send, *recv, Free(("y",))]
    return b.schedule(
        b.program(("x",), ("back",), first, role=(("pp", 0),)),
        b.program(("x",), (), second, role=(("pp", 1),)),
    )


def crossed_waits() -> Schedule:
    """Three stages all_reduce x and y; the second waits for a note that the first sends after it has waited.

    By the schedule's semantics a step completes when all members have issued it, so this does not hang.
    """
    mesh = make_mesh((3,), ("pp",), kind="simulated")
    b, pp = Builder(mesh), mesh.axis("pp")
    for name, out, reduce in (("x", "total", "sum"), ("y", "top", "max")):
        b.buffer(name, f"f64[50000]{{unreduced: pp:{reduce}}}", "argument")
        b.buffer(out, "f64[50000]", "result")
    b.buffer("start", "f64[4]", "argument")
    b.buffer("note", "f64[4]", "result")
    b.segment("write", ["f64[4]"], ["f64[4]"], [LocalOp("aten.mul.Tensor", (Ref(0), 2), (1,))], [1])
    reduces: list[Instr] = [
        Collective("all_reduce", (pp,), ("x",), ("total",), "sum"),
        Collective("all_reduce", (pp,), ("y",), ("top",), "max"),
    ]
    both, note = [Wait(("total", "top"))], [Wait(("note",))]
    send = [Run("write", ("start",), ("note",)), Send(pp, 1, ("note",)), *note, Free(("note",))]
    first = [*reduces, *both, *send]
    second = [*reduces, Recv(pp, 0, ("note",)), *note, *both]
    arguments, sums = ("x", "y", "start"), ("total", "top")
    return b.schedule(
        b.program(arguments, sums, first, role=(("pp", 0),)),
        b.program(arguments, (*sums, "note"), second, role=(("pp", 1),)),
        b.program(arguments, sums, [*reduces, *both], role=(("pp", 2),)),
    )
