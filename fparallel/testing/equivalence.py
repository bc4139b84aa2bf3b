"""The promise of the compiler as an assertion: the step on a mesh equals the step on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fparallel import tree
from fparallel.api import jit
from fparallel.array import Array, device_get
from fparallel.errors import FparallelError
from fparallel.layout import Layout, typed
from fparallel.mesh import Mesh
from fparallel.rules import Rules
from fparallel.runtime.transport.simulated import SimulatedTransport

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
_SHOWN = 8


class EquivalenceError(FparallelError, AssertionError):
    """The step on the mesh and the step on one device gave different values."""


@dataclass(frozen=True)
class Difference:
    """One leaf that differs.

    Attributes:
      path: its dotted path in the output.
      text: its dtype and layout on the mesh, `f64[8@dp,4@tp]`.
      excess: the difference as a multiple of the allowed one; infinite where shape or dtype are wrong.
      detail: the numbers.
    """

    path: str
    text: str
    excess: float
    detail: str

    def __str__(self) -> str:
        return f"{self.path or 'the result'}  {self.text}  {self.detail}"


def differences(
    actual: Any, expected: Any, *, atol: float | None = None, rtol: float | None = None, exact: bool = False
) -> list[Difference]:
    """The leaves of `actual` that are not those of `expected`, the worst first.

    A float leaf may differ by `atol + rtol * max |expected leaf|` in any element; other leaves are equal or
    not. NaN equals NaN.

    Args:
      actual: a tree of Arrays, tensors and numbers.
      expected: a tree of the same structure.
      atol, rtol: by default both 1e-10 in float64, 1e-4 in float32, 5e-3 in float16, 3e-2 in bfloat16.
      exact: floats must be equal bit for bit, except that 0 equals -0.

    Raises:
      EquivalenceError: the trees have different structures.
    """
    paths, found, found_def = tree.flatten_with_path(actual)
    wanted, wanted_def = tree.flatten(expected)
    if found_def != wanted_def:
        theirs = tree.paths(wanted_def)
        odd = sorted(set(paths) ^ set(theirs))
        raise EquivalenceError(
            f"the two steps returned trees of different structures: {found_def} and {wanted_def}"
            + (f"; only one has {', '.join(odd[:4])}" if odd else ""),
            fix="return the same structure whatever the values are",
        )
    texts = [leaf.text if isinstance(leaf, Array) else _typed(leaf) for leaf in found]
    values = [torch.as_tensor(leaf) for leaf in device_get(found)]
    result = []
    for path, text, value, reference in zip(paths, texts, values, wanted, strict=True):
        difference = _difference(
            path, text, value, torch.as_tensor(reference).detach().cpu(), atol, rtol, exact
        )
        if difference is not None:
            result.append(difference)
    return sorted(result, key=lambda d: -d.excess)


def _typed(leaf: Any) -> str:
    if not isinstance(leaf, Tensor):
        return type(leaf).__name__
    return typed(leaf.dtype, Layout.replicated(leaf.shape))


def _difference(
    path: str,
    text: str,
    actual: Tensor,
    expected: Tensor,
    atol: float | None,
    rtol: float | None,
    exact: bool,
) -> Difference | None:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        detail = f"expected {str(expected.dtype).removeprefix('torch.')}{list(expected.shape)}"
        return Difference(path, text, float("inf"), detail)
    if not actual.numel():
        return None
    if not actual.dtype.is_floating_point or exact:
        wrong = ~((actual == expected) | (actual.isnan() & expected.isnan()))
        if not wrong.any():
            return None
        at = tuple(int(i) for i in wrong.nonzero()[0])
        count = f"{int(wrong.sum())} of {actual.numel()} elements differ"
        detail = f"{count}; at {list(at)} {actual[at].item()!r}, expected {expected[at].item()!r}"
        return Difference(path, text, 1.0 + float(wrong.sum()), detail)
    default = TOLERANCE.get(actual.dtype, 1e-4)
    a, b = actual.double(), expected.double()
    finite = b[b.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    allowed = (default if atol is None else atol) + (default if rtol is None else rtol) * scale
    gap = (a - b).abs()
    gap = torch.where((a == b) | (a.isnan() & b.isnan()), torch.zeros_like(gap), gap)
    gap = torch.where(gap.isnan(), torch.full_like(gap, float("inf")), gap)
    worst = float(gap.max())
    if worst <= allowed:
        return None
    at = tuple(int(i) for i in (gap == worst).nonzero()[0])
    detail = (
        f"differs by {worst:.3g} (allowed {allowed:.3g}); at {list(at)} {actual[at].item()!r}, "
        f"expected {expected[at].item()!r}"
    )
    return Difference(path, text, worst / allowed if allowed else float("inf"), detail)


def assert_close(
    actual: Any,
    expected: Any,
    *,
    name: str = "the step",
    atol: float | None = None,
    rtol: float | None = None,
    exact: bool = False,
    repro: str = "",
) -> None:
    """Raises unless two trees hold the same values; see `differences`.

    Raises:
      EquivalenceError: names every leaf that differs, the worst first.
    """
    found = differences(actual, expected, atol=atol, rtol=rtol, exact=exact)
    if not found:
        return
    total = len(tree.leaves(expected))
    lines = [f"  {d}" for d in found[:_SHOWN]] + (
        [f"  and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    )
    raise EquivalenceError(
        f"{name} differs from the same step on one device in {len(found)} of {total} leaves, "
        "the worst first:\n" + "\n".join(lines) + (f"\nReproduce: {repro}" if repro else ""),
        fix=f"compare lowered.explain({found[0].path.split('.', 1)[-1]!r}) and the schedule with the step; "
        "a custom op needs a rule that is true of it (fp.register_rule)",
    )


def assert_equivalent(
    step: Callable[..., Any],
    args: Sequence[Any],
    *,
    mesh: Mesh,
    rules: Rules | None = None,
    atol: float | None = None,
    rtol: float | None = None,
    steps: int = 1,
    init: Callable[..., Any] | None = None,
    donate: bool = False,
    exact: bool = False,
    repro: str | None = None,
    mode: str = "buffered",
    seed: int | None = None,
    **options: Any,
) -> Any:
    """Asserts that a step under `fp.jit` on a mesh gives the values of the un-jitted step on one device.

    Every leaf that the step returns is compared, so let it return its gradients: the loss alone hides most
    mistakes, and Adam's first step hides any constant factor of a gradient.

    Args:
      step: a pure function, `step(*args)`. args: plain tensors with their global values, numbers and trees of
      these. They are not changed. mesh: of kind "simulated" or "job". rules: see `fp.Rules`. atol, rtol:
      every float leaf may differ by `atol + rtol * max |leaf|`; by default 1e-10 each in float64, 1e-4 in
        float32.
      steps: how often to run. From the second time on the first argument is what the step returned: its
      result, or the
        first of the tuple that it returns.
      init: a function such as `init(key)`, given the first argument; its result takes that argument's place.
      It is run
        under `fp.jit` too, and must give the same bits.
      donate: donate the first argument. exact: compare floats bit for bit, for integer-valued data. repro:
      the line to print with a difference; by default the call itself. mode, seed: how the ranks of a
      simulated mesh meet ("buffered" or "rendezvous") and in which order they advance
        (None: in turn; a number: at random). Freed memory is overwritten, so that reading it shows.
      options: of `fp.jit`.

    Returns:
      What the step on the mesh returned last.

    Raises:
      EquivalenceError: with the path, layout and values of every leaf that differs, the worst first, and one
      line to
        reproduce it.

    >>> import torch, fparallel as fp >>> mesh = fp.make_mesh((2,), ("dp",), kind="simulated") >>> batch =
    torch.arange(6.0).reshape(3, 2) >>> assert_equivalent(lambda w, batch: (batch @ w).sum(), (torch.ones(2),
    batch), mesh=mesh, rules=fp.Rules(batch="dp")) f32[](15.0)
    """
    name = getattr(step, "__name__", "the step")
    line = _repro(name, mesh, rules, steps, donate, exact, init) if repro is None else repro
    reference = list(_copy(tuple(args)))
    given = list(_copy(tuple(args)))
    if init is not None:
        born = jit(init, mesh=mesh, rules=rules)(given[0])
        reference[0] = init(reference[0])
        title = f"{getattr(init, '__name__', 'init')} on {mesh}"
        assert_close(born, reference[0], name=title, exact=True, repro=line)
        given[0] = born
    jitted = jit(step, mesh=mesh, rules=rules, donate_argnums=(0,) if donate else (), **options)
    transport = SimulatedTransport(mesh.size, mode, seed=seed) if mesh.kind == "simulated" else None
    compiled = jitted.lower(*given).compile(transport=transport, check=mesh.kind == "simulated")
    out = None
    for number in range(steps):
        out, expected = compiled(*given), step(*reference)
        title = f"{name} on {mesh}" + (f", step {number}," if steps > 1 else "")
        assert_close(out, expected, name=title, atol=atol, rtol=rtol, exact=exact, repro=line)
        if number + 1 < steps:
            given[0], reference[0] = (r[0] if isinstance(r, tuple) else r for r in (out, expected))
            reference[0] = tree.map(torch.as_tensor, reference[0])
    return out


def _copy(value: Any) -> Any:
    return tree.map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, value)


def rules_text(rules: Rules | None) -> str:
    """The rules as the Python that makes them."""
    if rules is None:
        return "None"
    parts = ([repr(dict(rules.globs))] if rules.globs else []) + [
        f"{k}={v!r}" for k, v in rules.names.items()
    ]
    text = f"fp.Rules({', '.join(parts)})"
    zero = rules.zero_options
    if zero is not None:
        axis = zero.axes[0] if len(zero.axes) == 1 else zero.axes
        least = f", min_elements={zero.min_elements}" if zero.min_elements else ""
        text += f".zero({zero.stage}, axis={axis!r}{least})"
    return text


def mesh_text(mesh: Mesh) -> str:
    """The mesh as the Python that makes it."""
    return f"fp.make_mesh({mesh.sizes}, {mesh.names}, kind={mesh.kind!r})"


def _repro(
    name: str,
    mesh: Mesh,
    rules: Rules | None,
    steps: int,
    donate: bool,
    exact: bool,
    init: Callable[..., Any] | None,
) -> str:
    more = f", steps={steps}" if steps != 1 else ""
    more += f", init={getattr(init, '__name__', 'init')}" if init is not None else ""
    more += (", donate=True" if donate else "") + (", exact=True" if exact else "")
    return (
        f"fp.testing.assert_equivalent({name}, args, mesh={mesh_text(mesh)}, rules={rules_text(rules)}{more})"
    )
