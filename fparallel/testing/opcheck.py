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
from collections.abc import Iterator, Sequence
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
from fparallel.testing.op_samples import Case, op_database, op_name, reference, sample_cases, with_gradients

VERDICTS = ("sharded", "replicated", "refused", "WRONG")
TOLERANCE = 1e-10
_SECONDS = 120
_LOOSE = {  # torch's vectorised loop and its tail use constants that differ by 1e-8
    "nn.functional.hardsigmoid": 1e-7, "nn.functional.hardswish": 1e-7,
}  # fmt: skip
_UNDEFINED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")


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
