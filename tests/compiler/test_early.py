"""Small collectives over arguments go first."""

import torch

import fparallel as fp
from fparallel import P
from fparallel.schedule.ir import Collective, Run, Wait

MESH = fp.make_mesh((4,), ("dp",), kind="simulated")
BY_ROWS = {"x": P("dp"), "mask": P("dp")}


def lower(function, params):
    batch = {"x": torch.ones(8, 4), "mask": torch.ones(8)}
    jitted = fp.jit(function, mesh=MESH, in_shardings=(P(), BY_ROWS))
    return jitted.lower(params, batch).schedule.programs[0].instrs


def mean_loss(params, batch):
    nll = (batch["x"] @ params).square().sum(-1)
    return fp.Mean((nll * batch["mask"]).sum(), (batch["mask"] > 0).sum())


def test_the_weight_of_a_mean_is_reduced_before_all_else_and_waited_for_after_the_forward():
    instrs = lower(lambda params, batch: fp.value_and_grad(mean_loss)(params, batch), torch.ones(4, 4))
    kinds = [type(instr) for instr in instrs]
    assert kinds[:3] == [Run, Collective, Run]
    assert instrs[0].ins == ("batch.mask",)
    (weight,) = instrs[1].outs
    waited = next(i for i, instr in enumerate(instrs) if isinstance(instr, Wait) and weight in instr.bufs)
    assert any("params" in name for instr in instrs[2:waited] for name in instr.reads)


def test_two_weights_travel_together():
    def loss(params, batch):
        y = batch["x"] @ params
        first = fp.Mean(y.sum(), batch["mask"].sum())
        return first + 0.5 * fp.Mean(y.square().sum(), (batch["mask"] + 1).sum())

    instrs = lower(lambda params, batch: fp.value_and_grad(loss)(params, batch)[0], torch.ones(4, 4))
    first = next(instr for instr in instrs if isinstance(instr, Collective))
    assert len(first.ins) == 2


def test_what_depends_on_parameters_stays_in_its_place():
    def step(params, batch):
        return (batch["x"] @ params).sum()

    instrs = lower(step, torch.ones(4, 4))
    assert [type(instr) for instr in instrs][:2] == [Run, Collective]
    assert "params" in instrs[0].ins


def test_a_large_way_to_a_small_value_is_not_taken_early():
    x = torch.ones(1 << 22)

    def step(params, batch):
        y = batch["x"] @ params
        return y, (x * batch["mask"].sum()).exp().sum() * y.sum()

    instrs = lower(step, torch.ones(4, 4))
    reads = [name for instr in instrs[:2] for name in instr.reads]
    assert not any(name.startswith("const") for name in reads)
