"""From a `Case` to the functions and data that it describes, and to a verdict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fparallel import optim, random, tree
from fparallel.mean import Mean
from fparallel.mesh import make_mesh
from fparallel.microbatches import accumulate
from fparallel.rules import Rules
from fparallel.testing.descriptions import Block, Case
from fparallel.testing.equivalence import assert_equivalent
from fparallel.testing.small_models import (
    Draw,
    Model,
    feature,
    init_block,
    init_extras,
    init_norm,
    make_block,
    normed,
    use_extras,
)
from fparallel.testing.small_modules import module_globs
from fparallel.transforms import value_and_grad
from fparallel.tree import TrainState


@dataclass(frozen=True)
class Problem:
    """What a `Case` describes: `step(*args)`, `init(key)` for the first argument, mesh and rules."""

    init: Callable[[Tensor], Any]
    step: Callable[..., Any]
    args: tuple[Any, ...]
    mesh: Any
    rules: Rules


def _losses(c: Case, x: Tensor, logits: Tensor, batch: dict[str, Tensor]) -> Any:
    flat, targets = logits.flatten(0, 1), batch["targets"].flatten()
    if c.loss == "ce":
        return F.cross_entropy(flat, targets)
    if c.loss == "smooth":
        return F.cross_entropy(flat, targets, label_smoothing=0.1)
    if c.loss == "ignore":
        kept = torch.where(batch["mask"].flatten() > 0, targets, -100)
        return F.cross_entropy(flat, kept, reduction="sum") / batch["mask"].numel()
    if c.loss == "mse":
        return F.mse_loss(x, batch["values"])
    if c.loss == "sum":
        return (logits * batch["values"].sum(-1, keepdim=True)).sum()
    if c.loss == "gather":
        return -logits.log_softmax(-1).gather(-1, batch["targets"].unsqueeze(-1)).mean()
    if c.loss == "vmap":
        return torch.func.vmap(lambda row, y: F.cross_entropy(row, y))(logits, batch["targets"]).mean()
    nll = F.cross_entropy(flat, targets, reduction="none")
    mask = batch["mask"].flatten()
    mean = Mean((nll * mask).sum(), mask.sum())
    if c.loss == "means":
        return mean + 0.25 * Mean(
            (logits.logsumexp(-1).square()).sum(), batch["tokens"].numel() * torch.ones(())
        )
    return mean


def _optimizer(c: Case) -> Any:
    if c.optimizer == "adamw":  # a small eps would make the rounding of gradients that are zero visible
        return optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.05, eps=1e-3))
    if c.optimizer == "lion":
        return optim.lion(0.05)
    if c.optimizer == "frozen":
        kinds = {"train": optim.sgd(0.05), "freeze": optim.set_to_zero()}
        return optim.multi_transform(
            kinds,
            lambda params: tree.map_with_path(
                lambda path, _: "freeze" if path == "tok" or "up" in path else "train", params
            ),
        )
    return optim.sgd(0.125, momentum=0.5 if c.optimizer == "momentum" else None)


def _manual(params: Any, grads: Any, momentum: Any) -> tuple[Any, Any]:
    """SGD with momentum and decay, written out."""
    momentum = tree.map(lambda m, g: 0.5 * m + g, momentum, grads)
    return tree.map(lambda p, m: p - 0.125 * (m + 0.25 * p), params, momentum), momentum


def build(c: Case) -> Problem:
    """The functions, arguments, mesh and rules of a case."""
    mesh = make_mesh([size for _, size in c.mesh], [name for name, _ in c.mesh], kind="simulated")
    rules = Rules(module_globs(c), **dict(c.names))
    if c.zero is not None:
        rules = rules.zero(c.zero[0], axis=c.zero[1], min_elements=c.zero[2])
    runs = [make_block(b, c) for b in c.blocks]
    drops = any(b.dropout for b in c.blocks)
    tx = _optimizer(c)
    final = Block(norm="" if c.whole else "layer")

    def init(key: Tensor) -> Any:
        draw = Draw(key, c.whole)
        params = Model(
            tok=draw(c.vocab, c.dim),
            blocks=[init_block(b, c, draw) for b in c.blocks],
            norm=init_norm(final, c, draw),
            head=None if c.tied else draw(c.dim, c.vocab),
            extras=init_extras(c, draw),
        )
        opt_state = tree.map(torch.zeros_like, params) if c.optimizer == "manual" else tx.init(params)
        if c.state == "dict":
            return {"step": 0, "params": params, "opt_state": opt_state, "key": key}
        return TrainState(step=0, params=params, opt_state=opt_state, key=key)

    def loss(params: Model, batch: dict[str, Tensor], frozen: Any) -> tuple[Any, Any]:
        x = F.embedding(batch["tokens"], params.tok)
        if frozen is not None:
            x = x + frozen["pos"]
        x = use_extras(params.extras, x)
        history = [x]
        made = feature(batch["values"]) if c.features else torch.zeros(())
        for i, (b, run, p) in enumerate(zip(c.blocks, runs, params.blocks, strict=True)):
            x = run(p, x) + made if i in c.features else run(p, x)
            if b.skip:
                x = x + history[max(0, len(history) - b.skip)]
            history.append(x)
        if params.norm is not None:
            x = normed(final, params, x)
        logits = x @ (params.tok.T if params.head is None else params.head)
        aux = {"largest": logits.amax(), "mean": x.sum() if c.whole else x.mean(), "rows": x.sum((1, 2))}
        return _losses(c, x, logits, batch), aux

    def step(state: Any, batch: dict[str, Tensor], frozen: Any = None) -> Any:
        get = state.__getitem__ if c.state == "dict" else lambda name: getattr(state, name)
        params, key = get("params"), get("key")
        grad_fn = value_and_grad(loss, has_aux=True)
        if c.microbatches:
            grad_fn = accumulate(grad_fn, num_microbatches=c.microbatches, group=c.group)
        if drops:
            with random.use(random.fold_in(key, get("step"))):
                (value, aux), grads = grad_fn(params, batch, frozen)
        else:
            (value, aux), grads = grad_fn(params, batch, frozen)
        if c.optimizer == "manual":
            params, opt_state = _manual(params, grads, get("opt_state"))
        else:
            updates, opt_state = tx.update(grads, get("opt_state"), params)
            params = optim.apply_updates(params, updates)
        new = {"step": get("step") + 1, "params": params, "opt_state": opt_state, "key": key + 0}
        state = new if c.state == "dict" else TrainState(**new)
        return state, {"loss": value, "grads": grads, "aux": aux}

    key = random.key(c.seed)
    frozen = (
        ({"pos": Draw(random.fold_in(key, 7), c.whole)(c.seq, c.dim)},) if "frozen" in c.optimizer else ()
    )
    return Problem(init, step, (key, _batch(c, random.fold_in(key, 5)), *frozen), mesh, rules)


def _batch(c: Case, key: Tensor) -> dict[str, Tensor]:
    """Tokens, targets int64[rows, seq]; mask f64[rows, seq]; values f64[rows, seq, dim]."""
    shape = (c.rows, c.seq)
    tokens, targets = (random.randint(random.fold_in(key, i), shape, 0, c.vocab) for i in (0, 1))
    mask = (random.uniform(random.fold_in(key, 2), shape) < 0.5).to(torch.float64)
    if c.mask == "first":
        mask = torch.zeros(shape, dtype=torch.float64)
        mask[0] = 1
    elif c.mask != "random":
        mask = torch.full(shape, 1.0 if c.mask == "ones" else 0.0, dtype=torch.float64)
    values = Draw(random.fold_in(key, 3), c.whole)(*shape, c.dim)
    return {"tokens": tokens, "targets": targets, "mask": mask, "values": values}


def check(case: Case, *, jit_init: bool = False, **options: Any) -> Any:
    """Asserts that a case gives on its mesh what it gives on one device: loss, gradients, state and metrics.

    Args:
      jit_init: also make the state under `fp.jit` on the mesh, and compare it bit for bit.
      options: see `assert_equivalent`.

    Raises:
      EquivalenceError: with `check(Case(...))` as the line that reproduces it.
    """
    problem = build(case)
    options.setdefault("pipeline", case.pipeline)
    args = problem.args if jit_init else (problem.init(problem.args[0]), *problem.args[1:])
    return assert_equivalent(
        problem.step,
        args,
        mesh=problem.mesh,
        rules=problem.rules,
        init=problem.init if jit_init else None,
        steps=case.steps,
        donate=case.donate,
        exact=case.whole,
        repro=f"fp.testing.check({case!r})",
        **options,
    )
