"""Elementwise segments in blocks that stay in cache.

An optimizer's update is some fifteen elementwise ops over the same few tensors. Op by op, every one of them
streams its operands from memory. Here the flattened tensors are cut into blocks, and the whole body runs on
one block before the next: each tensor is read and written once, and temporaries live in a few scratch blocks.
What is computed per element does not change, so the results are equal bit for bit.

    body   v4 = mul(v0, v3); v5 = add(v1, v4)
    text   for b0, b1, d5 in blocks:            # v3 is 0-d; d5 is the block of the output
               mul(b0, v3, out=s0); add(b1, s0, out=d5)

Tensors that are small, not contiguous or not on the CPU, and bodies with an op that is not known to be
elementwise, run op by op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fparallel.runtime.kernels import applies, run_adamw
from fparallel.runtime.segments import (
    Bound,
    Names,
    Text,
    bind,
    compile_text,
    last_uses,
    resolve,
    resolve_target,
)
from fparallel.schedule.segment import LocalOp, Ref, Segment, map_refs, refs_of

BLOCK = 65536  # elements; see benchmarks/elementwise.py
SMALL = 32768  # below this, what a loop saves is less than what it costs

# Operators whose function in `torch` takes the same arguments and `out=`, which computes the same bits.
_WITH_OUT = frozenset(
    f"aten.{name}.{overload}"
    for name, overloads in {
        "add": "Tensor Scalar", "sub": "Tensor Scalar", "mul": "Tensor Scalar", "div": "Tensor Scalar",
        "neg": "default", "abs": "default", "sqrt": "default", "rsqrt": "default", "reciprocal": "default",
        "exp": "default", "log": "default", "tanh": "default", "sigmoid": "default", "sign": "default",
        "square": "default", "pow": "Tensor_Scalar Tensor_Tensor", "maximum": "default", "minimum": "default",
        "addcmul": "default", "addcdiv": "default", "lerp": "Scalar Tensor", "where": "self",
        "clamp": "default Tensor", "clamp_min": "default", "clamp_max": "default", "logical_not": "default",
        "logical_and": "default", "logical_or": "default", "floor": "default", "ceil": "default",
        "gt": "Tensor Scalar", "ge": "Tensor Scalar", "lt": "Tensor Scalar", "le": "Tensor Scalar",
        "eq": "Tensor Scalar", "ne": "Tensor Scalar",
    }.items()
    for overload in overloads.split()
)  # fmt: skip
# Elementwise operators without the tag that says so.
_ELEMENTWISE = frozenset(
    f"aten.{name}.default"
    for name in ("_to_copy", "clone", "zeros_like", "ones_like", "full_like", "lift_fresh_copy")
)
# Binary operators for which a 0-d tensor of the dtype of the other operand computes what a Python number
# does, and which are called some microseconds faster with one.
_TAKES_SCALAR_TENSOR = ("aten.add.Tensor", "aten.sub.Tensor", "aten.mul.Tensor", "aten.div.Tensor")

_BLOCKED: dict[Any, Bound] = {}
_SCRATCH: dict[tuple[torch.dtype, int], Tensor] = {}


def blocked(
    body: Segment,
    segments: Mapping[str, Segment],
    coords: Mapping[str, int],
    inplace: tuple[tuple[int, int], ...] = (),
) -> Bound:
    """The function that runs an elementwise segment block by block.

    Args:
      body: its inputs are tensors of one shape, or 0-d; its outputs have that shape.
      inplace: (position in outputs, position in inputs) pairs that share storage.
    """
    plain = bind(body, segments, coords)
    key = (plain, inplace, body.results, len(body.inputs), body.kernel)
    if key not in _BLOCKED:
        _BLOCKED[key] = _Blocked(body, coords, plain, inplace)
    return _BLOCKED[key]


class _Blocked:
    """The function of one body; it makes one loop for each signature that it meets."""

    def __init__(
        self, body: Segment, coords: Mapping[str, int], plain: Bound, inplace: tuple[tuple[int, int], ...]
    ) -> None:
        ops = [
            LocalOp(
                op.target,
                resolve(op.args, coords),
                op.outs,
                tuple((k, resolve(v, coords)) for k, v in op.kwargs),
            )
            for op in body.ops
        ]
        self.ops, self.results, self.plain, self.inplace = ops, body.results, plain, inplace
        self.body = body
        self.can_block = all(map(_is_elementwise, ops)) and len(set(body.results)) == len(body.results)
        self.loops: dict[Any, _Loop | None] = {}

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        kernel = self.body.kernel
        if kernel is not None and applies(kernel, inputs):
            return run_adamw(kernel, inputs, dict(self.inplace))
        numel = max((x.numel() for x in inputs if x.dim()), default=0)
        if not self.can_block or numel < SMALL:
            return self._whole(inputs)
        shapes = {x.shape for x in inputs if x.dim()}
        if len(shapes) != 1 or not all(x.is_contiguous() and x.device.type == "cpu" for x in inputs):
            return self._whole(inputs)
        signature = tuple((x.dtype, x.dim() > 0) for x in inputs)
        if signature not in self.loops:
            self.loops[signature] = _make_loop(self, signature)
        loop = self.loops[signature]
        if loop is None:
            return self._whole(inputs)
        shape = next(iter(shapes))
        into = dict(self.inplace)
        outs = [
            inputs[into[i]] if i in into else torch.empty(shape, dtype=dtype)
            for i, dtype in enumerate(loop.out_dtypes)
        ]
        loop.run(inputs, outs, numel)
        return tuple(outs)

    def _whole(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        outs = list(self.plain(*inputs))
        for out, into in self.inplace:
            outs[out] = inputs[into].copy_(outs[out])
        return tuple(outs)


def _is_elementwise(op: LocalOp) -> bool:
    if op.target in _ELEMENTWISE:
        return True
    if not op.target.startswith("aten.") or len(op.outs) != 1:
        return False
    return torch.Tag.pointwise in getattr(resolve_target(op.target), "tags", ())


class _Loop:
    """A generated loop over blocks."""

    def __init__(
        self, text: str, values: dict[str, Any], scratch: list[torch.dtype], out_dtypes: list[torch.dtype]
    ) -> None:
        self.function = compile_text(text, f"<elementwise {abs(hash(text)):x}>", values)
        self.text, self.scratch, self.out_dtypes = text, scratch, out_dtypes

    def run(self, inputs: Sequence[Tensor], outs: Sequence[Tensor], numel: int) -> None:
        flat = [x.view(-1) if x.dim() else x for x in (*inputs, *outs)]
        block = -(-numel // max(1, round(numel / BLOCK)))
        block += -block % 64  # a block starts where whole vectors do
        tail = numel % block
        full = numel - tail
        if full:
            self.function(*[x[:full].split(block) if x.dim() else x for x in flat], *self.blocks(block))
        if tail:
            self.function(*[(x[full:],) if x.dim() else x for x in flat], *self.blocks(tail))

    def blocks(self, numel: int) -> list[Tensor]:
        """Scratch blocks of `numel` elements, cut from memory that all loops share."""
        used: dict[torch.dtype, int] = {}
        blocks = []
        for dtype in self.scratch:
            at = used[dtype] = used.get(dtype, -1) + 1
            whole = _SCRATCH.get((dtype, at))
            if whole is None or whole.numel() < numel:
                whole = _SCRATCH[dtype, at] = torch.empty(max(numel, BLOCK), dtype=dtype)
            blocks.append(whole if whole.numel() == numel else whole[:numel])
        return blocks


def _make_loop(body: _Blocked, signature: tuple[tuple[torch.dtype, bool], ...]) -> _Loop | None:
    """The loop for inputs of these (dtype, has dims), or None where an output is 0-d."""
    dtypes = _probe(body.ops, signature)
    wide = {value for value, (_, is_wide) in dtypes.items() if is_wide}
    if not all(result in wide and result >= len(signature) for result in body.results):
        return None
    if any(signature[into] != dtypes[body.results[out]] for out, into in body.inplace):
        return None
    return _LoopText(body, dtypes, wide, len(signature)).loop()


def _probe(
    ops: Sequence[LocalOp], signature: tuple[tuple[torch.dtype, bool], ...]
) -> dict[int, tuple[torch.dtype, bool]]:
    """The dtype of every value, and whether it has dims, from a run on two elements."""
    values = {i: torch.ones((2,) if wide else (), dtype=dtype) for i, (dtype, wide) in enumerate(signature)}
    for op in ops:
        args = map_refs(lambda ref: values[ref.index], list(op.args))
        kwargs = {k: map_refs(lambda ref: values[ref.index], v) for k, v in op.kwargs}
        out = op.outs[0]
        if out is not None:
            values[out] = resolve_target(op.target)(*args, **kwargs)
    return {i: (value.dtype, value.dim() > 0) for i, value in values.items()}


class _LoopText:
    """Writes the loop: 0-d ops before it, every block value in an output's block or in a scratch block."""

    def __init__(
        self, body: _Blocked, dtypes: dict[int, tuple[torch.dtype, bool]], wide: set[int], num_inputs: int
    ) -> None:
        self.body, self.dtypes, self.wide, self.num_inputs = body, dtypes, wide, num_inputs
        self.last = last_uses(body.body)
        self.names = Names({})
        self.scalars: dict[tuple[float, torch.dtype], str] = {}
        self.where: dict[int, str] = {i: f"b{i}" if i in wide else f"v{i}" for i in range(num_inputs)}
        self.scratch: list[torch.dtype] = []
        self.before: list[str] = []
        self.free: dict[torch.dtype, list[str]] = {}

    def loop(self) -> _Loop:
        before = self.before
        inside: list[str] = []
        after: list[str] = []
        for at, op in enumerate(self.body.ops):
            if op.outs[0] is None:
                continue
            (inside if op.outs[0] in self.wide else before).append(self.op(op, at))
        for i, result in enumerate(self.body.results):
            if self.where[result] != f"d{i}":
                after.append(f"d{i}.copy_({self.where[result]})")
        wide_inputs = [i for i in range(self.num_inputs) if i in self.wide]
        blocks = [f"b{i}" for i in wide_inputs] + [f"d{i}" for i in range(len(self.body.results))]
        lists = [f"bs{i}" for i in wide_inputs] + [f"ds{i}" for i in range(len(self.body.results))]
        parameters = [f"bs{i}" if i in self.wide else f"v{i}" for i in range(self.num_inputs)]
        parameters += lists[len(wide_inputs) :] + [f"s{i}" for i in range(len(self.scratch))]
        text = [f"def run({', '.join(parameters)}):"]
        text += [f"    {line}" for line in before]
        text += [f"    for {', '.join(blocks)} in zip({', '.join(lists)}):"]
        text += [f"        {line}" for line in inside + after]
        out_dtypes = [self.dtypes[result][0] for result in self.body.results]
        return _Loop("\n".join(text) + "\n", self.names.values, self.scratch, out_dtypes)

    def op(self, op: LocalOp, at: int) -> str:
        out = op.outs[0]
        assert out is not None
        dtype, is_wide = self.dtypes[out]
        args, kwargs = list(op.args), list(op.kwargs)
        if not is_wide:
            self.where[out] = f"v{out}"
            return f"v{out} = {self.call(op.target, resolve_target(op.target), args, kwargs)}"
        if op.target in _TAKES_SCALAR_TENSOR and not kwargs:
            args = [self.scalar(a, dtype, args) for a in args]
        fast: Callable[..., Any] | None = None
        if op.target in _WITH_OUT:
            fast = getattr(torch, op.target.split(".")[1])
        if fast is None:
            call = self.call(op.target, resolve_target(op.target), args, kwargs)
            self.release(at)
            self.where[out] = f"t{out}"
            return f"t{out} = {call}"
        call = self.call(f"torch.{op.target.split('.')[1]}", fast, args, kwargs)
        self.release(at)
        self.where[out] = self.place(out, at)
        return f"{call[:-1]}, out={self.where[out]})"

    def call(self, target: str, function: Any, args: list[Any], kwargs: list[tuple[str, Any]]) -> str:
        placed = {f"v{ref.index}": self.where[ref.index] for ref in refs_of([args, [v for _, v in kwargs]])}
        args = map_refs(lambda ref: Text(placed[f"v{ref.index}"]), args)
        kwargs = [(k, map_refs(lambda ref: Text(placed[f"v{ref.index}"]), v)) for k, v in kwargs]
        return self.names.call(target, function, args, kwargs)

    def scalar(self, arg: Any, dtype: torch.dtype, args: list[Any]) -> Any:
        """A number or 0-d tensor as a 0-d tensor of the result's dtype: what the op makes of it each time."""
        wide = [a.index for a in args if isinstance(a, Ref) and a.index in self.wide]
        same = len(wide) > 0 and all(self.dtypes[i][0] == dtype for i in wide)
        if not same or dtype not in (torch.float32, torch.float64):
            return arg
        if isinstance(arg, float) or (type(arg) is int and abs(arg) < 2**24):
            name = self.scalars.setdefault((arg, dtype), f"c{len(self.scalars)}")
            self.names.values[name] = torch.tensor(arg, dtype=dtype)
            return Text(name)
        if isinstance(arg, Ref) and arg.index not in self.wide and self.dtypes[arg.index][0] != dtype:
            name = f"{self.where[arg.index]}_{str(dtype).removeprefix('torch.')}"
            line = f"{name} = {self.where[arg.index]}.to({dtype})"
            if line not in self.before:
                self.before.append(line)
            return Text(name)
        return arg

    def release(self, at: int) -> None:
        """Gives back the scratch blocks of the values read last at `at`; that op may write into one."""
        for value, use in self.last.items():
            if use == at and self.where.get(value, "").startswith("s"):
                self.free.setdefault(self.dtypes[value][0], []).append(self.where[value])

    def place(self, out: int, at: int) -> str:
        """Where the op at `at` writes: the output's own block, unless that is an input still to be read."""
        dtype = self.dtypes[out][0]
        if out in self.body.results:
            position = self.body.results.index(out)
            into = dict(self.body.inplace).get(position)
            read_later = into is not None and self.last.get(into, -1) > at
            if not read_later:
                return f"d{position}"
        free = self.free.get(dtype)
        if free:
            return free.pop()
        self.scratch.append(dtype)
        return f"s{len(self.scratch) - 1}"
