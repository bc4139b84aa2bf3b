"""What fp.shard_map and fp.lax refuse, un-jitted and jitted, and what they say."""

import pytest
import torch

import fparallel as fp
from fparallel import P, lax
from fparallel.errors import MeshError, ShardingError, TraceError
from tests.shard_map_cases import LINE, SQUARE, numbers

X, V = numbers(8, 8), numbers(8, seed=1)


def nested(x):
    return fp.shard_map(torch.sin, mesh=LINE, in_specs=P(), out_specs=P())(x)


def writes_outside(x):
    V.add_(x[0])
    return x


CASES = {
    "uneven shards": (
        torch.sin,
        P("tp"),
        P("tp"),
        ShardingError,
        r"\[6@tp\] has uneven.*make dim 0 4 or 8 long",
    ),
    "no such axis in a spec": (torch.sin, P("pp"), P(), ShardingError, "no axis 'pp'"),
    "no such axis in a collective": (
        lambda x: lax.psum(x, "dp"),
        P(),
        P(),
        MeshError,
        "psum over 'dp'.*'tp'",
    ),
    "an axis twice": (lambda x: lax.psum(x, ("tp", "tp")), P(), P(), MeshError, "once"),
    "a spec of too many dims": (torch.sin, P(None, None, "tp"), P(), ShardingError, "3 dims"),
    "an out_spec of too many dims": (
        lambda x: x.sum(),
        P("tp"),
        P("tp"),
        ShardingError,
        "the result of.*1 dim",
    ),
    "no spec": (torch.sin, "tp", P(), ShardingError, "in_specs has 1 entries"),
    "too many specs": (torch.sin, (P(), P()), P(), ShardingError, "2 entries.*1 arguments"),
    "a sub-axis": (torch.sin, P("tp:(1)2"), P(), ShardingError, "whole mesh axes"),
    "a result that differs": (
        torch.sin,
        P("tp"),
        P(),
        ShardingError,
        "result 0.*may differ.*along tp.*check_vma",
    ),
    "a position that differs": (lambda x: lax.axis_index("tp"), P(), P(), ShardingError, "may differ"),
    "inside another": (nested, P(), P(), TraceError, "inside fp.shard_map of nested"),
    "writes to the outside": (writes_outside, P("tp"), P("tp"), TraceError, "closes over"),
    "a value read": (lambda x: x * float(x.sum()), P("tp"), P("tp"), TraceError, "torch.where"),
    "no tensor": (lambda x: "a", P("tp"), P(), TraceError, "returned str"),
    "two sources": (
        lambda x: lax.ppermute(x, "tp", [(0, 1), (2, 1)]),
        P("tp"),
        P("tp"),
        ShardingError,
        "at most once a source",
    ),
    "a source that does not exist": (
        lambda x: lax.ppermute(x, "tp", [(4, 1)]),
        P("tp"),
        P("tp"),
        ShardingError,
        r"of 0\.\.3",
    ),
    "a cut that is uneven": (
        lambda x: lax.psum_scatter(x[:, :6], "tp", 1, tiled=True),
        P("tp"),
        P("tp"),
        ShardingError,
        "make the dim 4 or 8 long",
    ),
    "a dim that is not one row per rank": (
        lambda x: lax.all_to_all(x, "tp", 1, 0),
        P("tp"),
        P("tp"),
        ShardingError,
        "make the dim 4 long, or use tiled=True",
    ),
    "a dim that does not exist": (
        lambda x: lax.all_gather(x.sum(), "tp", tiled=True),
        P("tp"),
        P(),
        ShardingError,
        r"dim 0 of a tensor of shape \[\]",
    ),
}


@pytest.mark.parametrize("jitted", [False, True], ids=["plain", "jitted"])
@pytest.mark.parametrize("name", CASES)
def test_refused(name, jitted):
    f, ins, outs, kind, message = CASES[name]
    mapped = fp.shard_map(f, mesh=LINE, in_specs=ins, out_specs=outs)
    x = torch.ones(6) if name == "uneven shards" else X
    with pytest.raises(kind, match=f"(?s){message}") as error:
        (fp.jit(mapped, mesh=LINE) if jitted else mapped)(x)
    assert "\nFix: " in str(error.value)


@pytest.mark.parametrize("jitted", [False, True], ids=["plain", "jitted"])
def test_a_write_of_what_varies_into_what_is_differentiated_and_does_not(jitted):
    def f(x, v):
        total = v.clone()
        total[0] = x[0, 0]
        return lax.psum(total.sum(), "tp")

    mapped = fp.shard_map(f, mesh=LINE, in_specs=(P("tp"), P()), out_specs=P())

    def step(v):
        return fp.grad(lambda v: mapped(X, v))(v)

    with pytest.raises(TraceError, match=r"varies over tp into the variable 'total'.*(?s:.*)fp.lax.pvary"):
        (fp.jit(step, mesh=LINE) if jitted else step)(V)


def test_collectives_outside_of_shard_map():
    calls = [
        lambda: lax.psum(X, "tp"),
        lambda: lax.pmean(X, "tp"),
        lambda: lax.all_gather(X, "tp"),
        lambda: lax.psum_scatter(X, "tp"),
        lambda: lax.ppermute(X, "tp", []),
        lambda: lax.all_to_all(X, "tp", 0, 0),
        lambda: lax.axis_index("tp"),
        lambda: lax.axis_size("tp"),
        lambda: lax.pvary(X, "tp"),
    ]
    for call in calls:
        with pytest.raises(TraceError, match=r"outside of fp\.shard_map"):
            call()


def test_a_false_claim_that_ranks_agree_is_found_unjitted():
    mapped = fp.shard_map(torch.sin, mesh=LINE, in_specs=P("tp"), out_specs=P(), check_vma=False)
    with pytest.raises(ShardingError, match="differs between ranks 0 and 1"):
        mapped(X)


@pytest.mark.parametrize("mesh", [LINE, None])
def test_a_step_on_another_mesh(mesh):
    mapped = fp.shard_map(lambda x: lax.psum(x, "dp"), mesh=SQUARE, in_specs=P("dp"), out_specs=P())
    with pytest.raises(ShardingError, match="the same mesh"):
        fp.jit(mapped, mesh=mesh)(X)


def test_an_array_outside_of_jit():
    whole = fp.device_put(X, fp.NamedSharding(LINE, P("tp")))
    mapped = fp.shard_map(torch.sin, mesh=LINE, in_specs=P("tp"), out_specs=P("tp"))
    with pytest.raises(TraceError, match=r"under fp\.jit"):
        mapped(whole)
    assert torch.equal(fp.device_get(fp.jit(mapped, mesh=LINE)(whole)), X.sin())
