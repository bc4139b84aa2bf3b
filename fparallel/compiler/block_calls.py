"""Partitioning calls of blocks: a block becomes one joint local program, made once per layouts of its inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fparallel.compiler import propagate
from fparallel.compiler.context import Lazy, Template
from fparallel.compiler.graph import BlockGraph, Graph, Node, Value
from fparallel.compiler.local import Call, Local, Saved, drop_dead
from fparallel.compiler.rules import find_rule
from fparallel.layout import Layout

if TYPE_CHECKING:
    from fparallel.compiler.partition import Partitioner


def call(p: Partitioner, node: Node) -> None:
    values, index = node.args
    block = p.context.program.blocks[index]
    layouts, flags = [], []
    for value in values:
        if isinstance(p.env[value], Lazy):
            layouts.append(p.lies(value))
            flags.append((False, True))
        else:
            local = p.versions(value)[0]
            layouts.append(Layout(local.layout.dims))
            flags.append((local.pinned, local.static))
    template = block_template(p, index, block, layouts, flags)
    ins = [
        p.get(v, x.layout, cause=f"into {block.name}", source=node.source, phase=node.phase)
        for v, x in zip(values, template.inputs, strict=True)
    ]
    saved = Saved(template.calls)
    template.calls += 1
    outs = [Local(x.dtype, x.layout) for x in template.outputs]
    p.items.append(Call(template, False, ins, outs, saved, node.source, node.phase))
    for out, local in zip(node.outs[:-1], outs, strict=True):
        p.env[out] = [local]
    p.saved[node.outs[-1]] = (template, saved, values)


def call_backward(p: Partitioner, node: Node) -> None:
    values, token, tangents, _ = node.args
    template, saved, _ = p.saved[token]
    ins = [
        p.get(v, x.layout, cause=f"into {template.name} backward", source=node.source, phase="B")
        for v, x in zip(values, template.inputs, strict=True)
    ]
    ins += [
        p.get(v, x.layout, cause=f"cotangent of {template.name}", source=node.source, phase="B")
        for v, x in zip(tangents, template.tangents, strict=True)
    ]
    outs = [Local(x.dtype, x.layout) for x in template.grads]
    p.items.append(Call(template, True, ins, outs, saved, node.source, node.phase))
    for out, local in zip(node.outs, outs, strict=True):
        p.env[out] = [local]


def block_template(
    outer: Partitioner,
    index: int,
    block: BlockGraph,
    layouts: Sequence[Layout],
    flags: Sequence[tuple[bool, bool]],
) -> Template:
    """The joint local program of a block for given input layouts, made once."""
    context = outer.context
    key = (index, tuple(layouts), tuple(flags))
    if key in context.templates:
        return context.templates[key]
    p = outer.fresh()
    p.block = block.name
    inputs = []
    for value, layout, (pinned, static) in zip(block.inputs, layouts, flags, strict=True):
        local = Local(value.dtype, layout, value.name, pinned=pinned, static=static)
        inputs.append(local)
        p.env[value] = [local]
    graph = block.graph
    p.hints.update(
        gradient_hints(
            graph, {grad: layouts[i] for grad, i in zip(block.grads, block.grad_inputs, strict=True)}
        )
    )
    for value, tensor in graph.constants.items():
        p.env[value] = [context.constant(value, tensor)]
    for node in graph.nodes[: block.num_forward]:
        p.node(node)
    outputs = []
    for value in block.outputs:
        outputs.append(p.get(value, p.lies(value), cause=f"output of {block.name}", phase="F"))
    tangents = []
    for value, i in zip(block.tangents, block.tangent_outputs, strict=True):
        local = Local(value.dtype, outputs[i].layout, value.name)
        tangents.append(local)
        p.env[value] = [local]
    for node in graph.nodes[block.num_forward :]:
        p.node(node)
    grads = []
    for value, i in zip(block.grads, block.grad_inputs, strict=True):
        entry = p.env[value]
        if isinstance(entry, Lazy):
            layout = layouts[i]
        elif inputs[i].pinned:
            layout = entry[0].layout
        else:
            layout = layouts[i]
        grads.append(p.get(value, layout, cause=f"cotangent of an input of {block.name}", phase="B"))
    items = drop_dead(p.items, outputs + grads)
    template = Template(block.name, index, items, inputs, tangents, outputs, grads, block.grad_inputs)
    context.templates[key] = template
    return template


def gradient_hints(graph: Graph, wanted: Mapping[Value, Layout]) -> dict[Value, Layout]:
    """Cotangents prefer the layout of their primal; carried back through autograd's adds and transposes."""
    hints = dict(wanted)
    for node in reversed(graph.nodes):
        for out in node.outs:
            layout = hints.get(out)
            if layout is None:
                continue
            if node.target == "aten.add.Tensor":
                for value in node.inputs:
                    if value.shape == out.shape:
                        hints.setdefault(value, layout)
            elif node.target in (
                "aten.t.default",
                "aten.permute.default",
                "aten.transpose.int",
                "aten.view.default",
                "aten._unsafe_view.default",
                "aten.clone.default",
                "aten._to_copy.default",
            ):
                rule = find_rule(node)
                choice = propagate.choose_for_output(rule, layout) if rule else None
                if choice is not None:
                    hints.setdefault(node.inputs[0], choice.ins[0])
    return hints
