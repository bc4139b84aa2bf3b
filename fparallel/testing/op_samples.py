"""The entries of torch's op_db and their samples, as functions of tensors alone, with and without gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import fparallel as fp

_MAX_NUMEL = 4096


def op_database() -> list[Any]:
    """The entries of torch's op_db that take float64 on CPUs, by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return sorted((op for op in op_db if torch.float64 in op.supported_dtypes("cpu")), key=op_name)


def op_name(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


@dataclass
class Case:
    """One sample of an op as a function of its tensors."""

    function: Callable[..., list[Tensor]]
    paths: list[str]
    tensors: list[Tensor]


def sample_cases(op: Any, limit: int) -> Iterator[tuple[int, Case]]:
    """Up to `limit` small samples of an op, spread over all that it has."""
    torch.manual_seed(0)
    samples = []
    seen = set()
    for index, sample in enumerate(op.sample_inputs("cpu", torch.float64)):
        leaves, _ = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        key = repr([tuple(x.shape) if isinstance(x, Tensor) else x for x in leaves])
        if key in seen or any(t.numel() > _MAX_NUMEL for t in tensors):
            continue
        seen.add(key)
        samples.append((index, sample))
        if index > 200:
            break
    step = max(1, len(samples) / limit)
    chosen = sorted({int(i * step) for i in range(limit) if int(i * step) < len(samples)})
    for position in chosen:
        index, sample = samples[position]
        yield index, _case(op, sample)


def _case(op: Any, sample: Any) -> Case:
    structure: tuple[Any, ...] = (sample.input, tuple(sample.args), dict(sample.kwargs))
    keyed, treedef = pytree.tree_flatten_with_path(structure)
    where = [i for i, (_, leaf) in enumerate(keyed) if isinstance(leaf, Tensor)]
    constants = [None if isinstance(leaf, Tensor) else leaf for _, leaf in keyed]

    def function(*tensors: Tensor) -> Any:
        leaves = list(constants)
        for i, tensor in zip(where, tensors, strict=True):
            leaves[i] = tensor
        first, args, kwargs = pytree.tree_unflatten(leaves, treedef)
        return {"out": op.op(first, *args, **kwargs)}  # unlike any argument, so that it lies as it comes out

    tensors = [keyed[i][1].detach() for i in where]
    tensors = [t.contiguous().clone() if t.layout is torch.strided else t for t in tensors]
    return Case(function, [_path_text(keyed[i][0]) for i in where], tensors)


def _path_text(path: Sequence[Any]) -> str:
    """`input`, `args.0` or `weight`, of a leaf of (input, args, kwargs)."""
    keys = [str(getattr(key, "idx", getattr(key, "key", key))) for key in path]
    head = ("input", "args", "")[int(keys[0])]
    return ".".join(filter(None, [head, *keys[1:]]))


def with_gradients(case: Case) -> tuple[Case, Any] | None:
    """The case that returns a weighted sum of the outputs and its gradients, with their reference."""
    diff = tuple(i for i, t in enumerate(case.tensors) if t.is_floating_point() and t.layout is torch.strided)
    if any(case.tensors[i].isnan().any() for i in diff):
        return None  # torch's own derivatives of NaN differ between real and fake tensors (prod)
    try:
        outs = reference(case.function, case.tensors)
    except Exception:
        return None
    floats = [i for i, out in enumerate(outs) if out.is_floating_point()]
    if not diff or not floats:
        return None
    weights = [
        torch.linspace(0.5, 1.5, max(1, outs[i].numel()), dtype=outs[i].dtype)[: outs[i].numel()].reshape(
            outs[i].shape
        )
        for i in floats
    ]
    count = len(case.tensors)

    def function(*tensors: Tensor) -> Any:
        def loss(*inner: Tensor) -> Tensor:
            outs = pytree.tree_leaves(case.function(*inner))
            return sum((outs[i] * w).sum() for i, w in zip(floats, tensors[count:], strict=True))  # type: ignore[return-value]

        return {"out": fp.value_and_grad(loss, argnums=diff)(*tensors[:count])}

    made = Case(function, case.paths + [f"weight{i}" for i in floats], case.tensors + weights)
    try:
        return made, reference(function, made.tensors)
    except Exception:
        return None


def reference(function: Callable[..., Any], tensors: Sequence[Tensor]) -> list[Any]:
    return list(pytree.tree_leaves(function(*(t.clone() for t in tensors))))
