"""Every op rule against the unsharded op: `python -m fparallel.testing.opcheck`.

For each entry of torch's op_db, each sample, each tensor input and each of its dims, the op runs under
`fp.jit` on simulated ranks with that dim of that input sharded, and must give what it gives on one device:

    sharded      at least one dim is worked on where it lies: nothing is gathered
    replicated   it works, by gathering
    refused      a FparallelError says what to do instead
    WRONG        another value, another exception, or a hang
"""

from __future__ import annotations

import argparse
import fnmatch
import multiprocessing
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import fparallel as fp
from fparallel.api import Traced
from fparallel.errors import FparallelError
from fparallel.mesh import Mesh

VERDICTS = ("sharded", "replicated", "refused", "WRONG")
TOLERANCE = 1e-10
_MAX_NUMEL = 4096
_SECONDS = 120
_LOOSE = {  # torch's vectorised loop and its tail use constants that differ by 1e-8
    "nn.functional.hardsigmoid": 1e-7, "nn.functional.hardswish": 1e-7,
}  # fmt: skip
_UNDEFINED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")


def op_database() -> list[Any]:
    """The entries of torch's op_db that take float64 on CPUs, by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return sorted((op for op in op_db if torch.float64 in op.supported_dtypes("cpu")), key=op_name)


def op_name(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


@dataclass(frozen=True)
class Placement:
    """One dim of one input sharded, in one sample, and what came of it."""

    sample: int
    path: str
    shape: tuple[int, ...]
    dim: int
    verdict: str
    detail: str = ""

    @property
    def place(self) -> tuple[int, str, int]:
        return self.sample, self.path, self.dim

    def __str__(self) -> str:
        return (
            f"sample {self.sample} {self.path}{list(self.shape)} dim {self.dim}: {self.verdict} {self.detail}"
        )


@dataclass
class OpResult:
    """All placements of one op, and its verdict."""

    name: str
    placements: list[Placement] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        found = {p.verdict for p in self.placements}
        order = ("WRONG", "sharded", "replicated", "refused")
        return next((v for v in order if v in found), "no sample")

    def wrong(self) -> list[Placement]:
        return [p for p in self.placements if p.verdict == "WRONG"]

    @property
    def dims(self) -> str:
        """Of the sample where most dims shard: every input, a star on each dim that shards."""
        best = ""
        stars = 0
        for sample in sorted({p.sample for p in self.placements}):
            own: dict[str, dict[int, str]] = {}
            sharded = {
                (p.path, p.dim)
                for p in self.placements
                if p.sample == sample and p.dim >= 0
                and all(q.verdict == "sharded" for q in self.placements if q.place == p.place)
            }  # fmt: skip
            for p in self.placements:
                if p.sample == sample and p.dim >= 0:
                    star = "*" if (p.path, p.dim) in sharded else ""
                    own.setdefault(p.path, {i: str(s) for i, s in enumerate(p.shape)})[p.dim] = (
                        f"{p.shape[p.dim]}{star}"
                    )
            if len(sharded) > stars:
                stars = len(sharded)
                best = ", ".join(f"{path}[{','.join(dims.values())}]" for path, dims in own.items())
        return best

    @property
    def note(self) -> str:
        for verdict in ("WRONG", "refused"):
            for p in self.placements:
                if p.verdict == verdict:
                    return p.detail
        return ""


# ---------------------------------------------------------------- one sample


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


# ---------------------------------------------------------------- checking


@contextmanager
def _deadline(seconds: int) -> Iterator[None]:
    def expire(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"hangs (longer than {seconds} s)")

    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _failure(error: BaseException) -> tuple[str, str]:
    """(verdict, detail) of an exception."""
    if isinstance(error, FparallelError):
        text = str(error)
        clear = "\nFix: " in text and not error.message.startswith("internal")
        return ("refused" if clear else "WRONG"), error.message.splitlines()[0]
    lines = str(error).strip().splitlines()
    return "WRONG", f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def check_case(
    index: int, case: Case, meshes: Sequence[Mesh], expected: Sequence[Any], tolerance: float = TOLERANCE
) -> list[Placement]:
    """Every dim of every input of one sample, sharded in turn."""
    places = [
        (i, d)
        for i, t in enumerate(case.tensors)
        for d in range(t.dim())
        if t.layout is torch.strided and t.shape[d] >= 1
    ]
    traced: Traced | None = None
    results: list[Placement] = []
    try:
        with _deadline(_SECONDS):
            traced = fp.jit(
                case.function, mesh=meshes[0], in_shardings=tuple(fp.P() for _ in case.tensors)
            ).trace(*case.tensors)
    except (Exception, TimeoutError) as error:
        return [Placement(index, "", (), -1, *_failure(error))]
    for mesh in meshes:
        for i, dim in places or [(-1, -1)]:
            path, shape = (case.paths[i], tuple(case.tensors[i].shape)) if i >= 0 else ("", ())
            try:
                with _deadline(_SECONDS):
                    verdict, detail = _check(case, traced, mesh, i, dim, expected, tolerance)
            except (Exception, TimeoutError) as error:
                verdict, detail = _failure(error)
            results.append(
                Placement(
                    index,
                    path,
                    shape,
                    dim,
                    verdict,
                    f"{detail} ({mesh.size} ranks)" if verdict == "WRONG" else detail,
                )
            )
    return results


def _check(
    case: Case, traced: Traced, mesh: Mesh, i: int, dim: int, expected: Sequence[Any], tolerance: float
) -> tuple[str, str]:
    specs = tuple(fp.P(*([None] * dim), "x") if j == i else fp.P() for j in range(len(case.tensors)))
    jitted = fp.jit(case.function, mesh=mesh, in_shardings=specs)
    lowered = replace(traced, jitted=jitted).lower()
    compiled = lowered.compile()
    compiled.calls = 1  # NaN is a fair result here
    outs = pytree.tree_leaves(compiled(*case.tensors))
    problem = compare([fp.device_get(out) for out in outs], expected, tolerance)
    if problem:
        return "WRONG", problem
    gathers = sum(lowered.schedule.count(kind) for kind in ("all_gather", "all_to_all", "permute"))
    return ("replicated" if gathers or i < 0 else "sharded"), ""


def _aval(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def compare(outs: Sequence[Tensor], expected: Sequence[Any], tolerance: float) -> str:
    """What differs, or nothing; with an infinite tolerance only shapes and dtypes count."""
    if len(outs) != len(expected):
        return f"{len(outs)} outputs instead of {len(expected)}"
    for i, (out, want) in enumerate(zip(outs, expected, strict=True)):
        if isinstance(want, (bool, int, float)):
            want = torch.tensor(want, dtype=out.dtype)
        if not isinstance(want, Tensor) or out.shape != want.shape or out.dtype != want.dtype:
            return f"output {i} is {_aval(out)} instead of {_aval(want)}"
        if tolerance == float("inf") or torch.equal(out, want):
            continue
        if not torch.allclose(out, want, rtol=tolerance, atol=tolerance, equal_nan=True):
            same = torch.isclose(out, want, rtol=tolerance, atol=tolerance, equal_nan=True)
            at = int((~same).reshape(-1).nonzero()[0])
            count = f"{int((~same).sum())} of {want.numel()}"
            return f"output {i} differs in {count}: {out.reshape(-1)[at]} instead of {want.reshape(-1)[at]}"
    return ""


def check_op(op: Any, *, samples: int = 4, sizes: Sequence[int] = (2,), gradients: bool = False) -> OpResult:
    """Checks one entry of op_db; sizes: the numbers of ranks to shard over."""
    start, result = time.monotonic(), OpResult(op_name(op))
    meshes = [fp.make_mesh((n,), ("x",), kind="simulated") for n in sizes]
    tolerance = float("inf") if op.name in _UNDEFINED else _LOOSE.get(op.name, TOLERANCE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index, case in sample_cases(op, samples):
            try:
                expected = reference(case.function, case.tensors)
            except Exception:
                continue  # the op itself refuses this sample here
            result.placements += check_case(index, case, meshes, expected, tolerance)
            if gradients and result.placements[-1].dim >= 0:
                made = with_gradients(case)
                if made is not None:
                    found = check_case(index, made[0], meshes[-1:], made[1], tolerance)
                    result.placements += [
                        replace(p, detail=f"gradient: {p.detail}") for p in found if p.verdict == "WRONG"
                    ]
    result.seconds = time.monotonic() - start
    return result


# ---------------------------------------------------------------- the command


_WORK: dict[str, Any] = {}


def _work(name: str) -> OpResult:
    try:
        return check_op(_WORK["ops"][name], **_WORK["options"])
    except BaseException as error:
        return OpResult(
            name, [Placement(-1, "", (), -1, "WRONG", f"opcheck: {type(error).__name__}: {error}")]
        )


def check_all(
    ops: Sequence[Any], *, processes: int, progress: bool = False, **options: Any
) -> list[OpResult]:
    """All of `ops`, in forked processes."""
    _WORK.update(ops={op_name(op): op for op in ops}, options=options)
    names = list(_WORK["ops"])
    results = []
    with multiprocessing.get_context("fork").Pool(
        processes, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        for result in pool.imap_unordered(_work, names, chunksize=1):
            results.append(result)
            if progress and (result.verdict == "WRONG" or len(results) % 50 == 0):
                print(
                    f"{len(results)}/{len(names)} {result.name}: {result.verdict} {result.note}",
                    file=sys.stderr,
                    flush=True,
                )
    return sorted(results, key=lambda r: r.name)


def summary(results: Sequence[OpResult]) -> str:
    counts = {v: sum(r.verdict == v for r in results) for v in (*VERDICTS, "no sample")}
    return f"{len(results)} ops: " + ", ".join(f"{n} {v}" for v, n in counts.items() if n or v in VERDICTS)


def markdown(results: Sequence[OpResult]) -> str:
    """The table of docs/ops.md."""
    lines = [
        "# Ops", "",
        "What the compiler does with the entries of torch's op_db when one dim of one input is sharded.",
        "Every verdict comes from a comparison with the unsharded op in float64; `make opcheck` writes this.", "",
        "*sharded*: at least one dim (marked `*`) is worked on where it lies, with no gather.",
        "*replicated*: it works, by gathering, or has no tensor to shard.",
        "*refused*: an error says what to do instead. *no sample*: the op takes none on this machine.", "",
        f"{summary(results)}.", "",
        "| op | verdict | dims that shard | refused because |", "|---|---|---|---|",
    ]  # fmt: skip
    for r in results:
        note = (
            r.note.replace("|", "\\|") if any(p.verdict in ("refused", "WRONG") for p in r.placements) else ""
        )
        lines.append(f"| {r.name} | {r.verdict} | {r.dims} | {note[:160]} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fparallel.testing.opcheck", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--ops", default="*", help="only ops whose name matches (a glob, or several with commas)"
    )
    parser.add_argument("--sample", type=int, default=4, help="samples per op")
    parser.add_argument("--quick", action="store_true", help="two ranks only, no gradients")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write the table to this file (docs/ops.md)")
    parser.add_argument("--verbose", action="store_true", help="print every placement")
    options = parser.parse_args(argv)
    start = time.monotonic()
    patterns = options.ops.split(",")
    ops = [op for op in op_database() if any(fnmatch.fnmatch(op_name(op), p) for p in patterns)]
    results = check_all(
        ops, processes=options.processes, progress=True, samples=options.sample,
        sizes=(2,) if options.quick else (2, 3), gradients=not options.quick,
    )  # fmt: skip
    for result in results:
        print(f"{result.name:44} {result.verdict:10} {result.dims or result.note[:100]}")
        for placement in result.placements if options.verbose else result.wrong():
            print(f"    {placement}")
    print(f"{summary(results)}; {time.monotonic() - start:.0f} s")
    if options.out:
        options.out.write_text(markdown(results))
    return 1 if any(r.verdict == "WRONG" for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
