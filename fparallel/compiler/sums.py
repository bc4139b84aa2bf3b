"""Sums over micro-batches are taken where their terms are made, so that no term needs a buffer of its own.

    run B  (...) -> (g)             run B.sum  (..., s) -> (s')
    run S  (s, g, ...) -> (s')      run S      (...)

The run that makes a term gets the sum so far as one more input. Where the term is a matrix product, as the gradient of
a weight is, the product is added onto the sum as it is computed (`addmm`), and where it is the gradient of an embedding
its rows are added to the sum's; any other term is added as soon as it is made. A term stays where it is if something
else reads it, if it is reduced over ranks before it is added, or if the sum so far is not there yet when it is made.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fparallel.schedule.ir import Buffer, Instr, Run
from fparallel.schedule.segment import (
    ADD,
    ADD_PRODUCT,
    ADD_ROWS,
    LocalOp,
    Ref,
    Segment,
    Work,
    map_refs,
    refs_of,
)

_SHAPES = ("local.reshape", "aten.view.default")


@dataclass
class _Moved:
    """What a run takes over: (position of the term in its outs, the sum so far, the new sum)."""

    into: dict[int, list[tuple[int, str, str]]] = field(default_factory=dict)
    away: dict[int, set[str]] = field(default_factory=dict)  # the new sums that a run no longer makes


def sums_where_made(
    instrs: Sequence[Instr],
    buffers: Mapping[str, Buffer],
    segments: dict[str, Segment],
    results: Iterable[str],
) -> list[Instr]:
    """The instructions of a program with its sums moved; segments that this makes are added to `segments`."""
    reads = Counter(name for instr in instrs for name in instr.reads)
    reads.update(results)
    made: dict[str, tuple[int, int]] = {}  # by buffer, the instruction that writes it, and where in its outs
    moved = _Moved()
    for i, instr in enumerate(instrs):
        for place, name in enumerate(instr.writes):
            made[name] = i, place
        if not isinstance(instr, Run):
            continue
        for before, term, after in _added(instr, segments[instr.segment]):
            maker, place = made.get(term, (i, 0))
            run = instrs[maker]
            if (
                maker < i
                and isinstance(run, Run)
                and reads[term] == reads[before] == 1
                and buffers[term].kind == buffers[before].kind == "temp"
                and made.get(before, (maker, 0))[0] < maker
            ):
                moved.into.setdefault(maker, []).append((place, before, after))
                moved.away.setdefault(i, set()).add(after)
                made[after] = maker, place
    done: list[Instr] = []
    for i, instr in enumerate(instrs):
        if isinstance(instr, Run) and i in moved.away:
            left = _without(instr, moved.away[i], segments)
            if left is None:
                continue
            instr = left
        if isinstance(instr, Run) and i in moved.into:
            instr = _with(instr, sorted(moved.into[i]), buffers, segments)
        done.append(instr)
    for name in {instr.segment for instr in done if isinstance(instr, Run)}:
        segments[name] = _folded(segments[name])
    return done


def _added(run: Run, segment: Segment) -> list[tuple[str, str, str]]:
    """(sum so far, term, new sum) of every sum to which a run adds a term that it is given; both are read once."""
    found = []
    readers = _readers(segment.ops)
    for op in segment.ops:
        if op.target != ADD or segment.results.count(op.outs[0]) != 1 or readers[op.outs[0]]:
            continue
        before, term = op.args[0].index, op.args[1].index
        if max(before, term) < len(run.ins) and readers[before] == readers[term] == 1:
            found.append((run.ins[before], run.ins[term], run.outs[segment.results.index(op.outs[0])]))
    return found


def _without(run: Run, sums: set[str], segments: dict[str, Segment]) -> Run | None:
    """A run that does not make these sums any more; None if it makes nothing else."""
    segment = segments[run.segment]
    gone = {result for result, name in zip(segment.results, run.outs, strict=True) if name in sums}
    outs = [i for i, name in enumerate(run.outs) if name not in sums]
    if not outs:
        return None
    moved = [i for i in range(len(run.outs)) if i not in outs]
    name = f"{segment.name}.less{_ranges(moved, len(run.outs))}"
    ops = [op for op in segment.ops if not (op.target == ADD and op.outs[0] in gone)]
    read = {ref.index for op in ops for ref in refs_of([*op.args, dict(op.kwargs)])}
    ins = [i for i in range(len(run.ins)) if i in read]
    if name not in segments:
        place = {old: new for new, old in enumerate(ins)}
        shift = len(ins) - len(run.ins)
        segments[name] = _rebuilt(
            segment,
            name,
            [segment.inputs[i] for i in ins],
            [segment.outputs[i] for i in outs],
            [_renumbered(op, place, shift) for op in ops],
            [segment.results[i] + shift for i in outs],
        )
    return dataclasses.replace(
        run, segment=name, ins=tuple(run.ins[i] for i in ins), outs=tuple(run.outs[i] for i in outs)
    )


def _with(
    run: Run,
    sums: Sequence[tuple[int, str, str]],
    buffers: Mapping[str, Buffer],
    segments: dict[str, Segment],
) -> Run:
    """A run that adds the terms that it makes onto sums, and gives these."""
    segment = segments[run.segment]
    values = [(buffers[after].dtype, buffers[after].layout) for _, _, after in sums]
    name = f"{segment.name}.sum{_ranges([place for place, _, _ in sums], len(run.outs))}"
    if any(value[0] != segment.outputs[place][0] for value, (place, _, _) in zip(values, sums, strict=True)):
        name += ".wide"
    if name not in segments:
        start, many = len(run.ins), len(sums)
        ops = [_renumbered(op, {i: i for i in range(start)}, many) for op in segment.ops]
        results = [result + many for result in segment.results]
        outputs = list(segment.outputs)
        for k, (place, _, _) in enumerate(sums):
            outputs[place] = values[k]
            free = 1 + max([start + many, *(out for op in ops for out in op.outs if out is not None)])
            work = Work(0, 3 * values[k][0].itemsize * values[k][1].max_local_numel, values[k][0])
            at = next(at for at, op in enumerate(ops) if results[place] in op.outs)
            args = (Ref(start + k), Ref(results[place]))
            ops.insert(at + 1, LocalOp(ADD, args, (free,), source=ops[at].source, work=work))
            results[place] = free
        segments[name] = _rebuilt(segment, name, [*segment.inputs, *values], outputs, ops, results)
    outs = list(run.outs)
    for place, _, after in sums:
        outs[place] = after
    return dataclasses.replace(
        run, segment=name, ins=(*run.ins, *(before for _, before, _ in sums)), outs=tuple(outs)
    )


def _folded(segment: Segment) -> Segment:
    """The segment, with products and rows that nothing but a sum reads added onto it as they are computed."""
    ops = list(segment.ops)
    dtypes = [dtype for dtype, _ in segment.inputs]
    for add in segment.ops:
        if add.target != ADD or add.args[0].index >= len(dtypes):
            continue
        maker = {made: at for at, op in enumerate(ops) for made in op.outs if made is not None}
        readers = _readers(ops)
        chain, value = [], add.args[1].index
        while value in maker and readers[value] == 1 and value not in segment.results:
            chain.append(maker[value])
            if ops[chain[-1]].target not in _SHAPES:
                break
            value = ops[chain[-1]].args[0].index
        folded = _onto(add, ops[chain[-1]], len(chain) > 1, dtypes[add.args[0].index]) if chain else None
        if folded is not None:
            ops[chain[-1]] = folded
            for at in sorted([*chain[:-1], ops.index(add)], reverse=True):
                del ops[at]
    if len(ops) == len(segment.ops):
        return segment
    return Segment(segment.name, segment.inputs, segment.outputs, tuple(ops), segment.results, segment.flops)


def _onto(add: LocalOp, maker: LocalOp, reshaped: bool, dtype: torch.dtype) -> LocalOp | None:
    """What makes a term (and reshapes it) and adds it at once; None where there is no such op."""
    if maker.work is None or maker.work.dtype != dtype:
        return None
    total, term = add.args[0], add.work.nbytes // 3 if add.work is not None else 0
    if maker.target == "aten.mm.default":
        work = dataclasses.replace(maker.work, nbytes=maker.work.nbytes + term)
        return LocalOp(ADD_PRODUCT, (total, *maker.args), add.outs, source=maker.source, work=work)
    if maker.target == "aten.embedding_dense_backward.default" and not reshaped:
        grad, rows, _, padding, scale = maker.args
        if padding < 0 and not scale:  # no row is left out
            work = dataclasses.replace(maker.work, nbytes=3 * max(0, maker.work.nbytes - term))
            return LocalOp(ADD_ROWS, (total, grad, rows), add.outs, source=maker.source, work=work)
    return None


def _readers(ops: Iterable[LocalOp]) -> Counter[int | None]:
    """How often every value is read."""
    return Counter(ref.index for op in ops for ref in refs_of([*op.args, dict(op.kwargs)]))


def _ranges(places: Sequence[int], many: int) -> str:
    """ "0-3,5" for 0, 1, 2, 3, 5; nothing for all of `many`."""
    if len(places) == many:
        return ""
    first = [i for i in places if i - 1 not in places]
    last = [i for i in places if i + 1 not in places]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(first, last, strict=True))


def _renumbered(op: LocalOp, place: Mapping[int, int], shift: int) -> LocalOp:
    """The op where inputs have other numbers, and what ops make is shifted."""

    def ref(old: Ref) -> Ref:
        return Ref(place[old.index] if old.index in place else old.index + shift)

    return dataclasses.replace(
        op,
        args=map_refs(ref, op.args),
        kwargs=tuple((key, map_refs(ref, value)) for key, value in op.kwargs),
        outs=tuple(None if out is None else out + shift for out in op.outs),
    )


def _rebuilt(
    segment: Segment,
    name: str,
    inputs: Sequence,
    outputs: Sequence,
    ops: Sequence[LocalOp],
    results: Sequence[int],
) -> Segment:
    return Segment(name, tuple(inputs), tuple(outputs), tuple(ops), tuple(results), segment.flops)
