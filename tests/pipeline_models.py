"""Small models for the tests of pipelines, in float64: dicts of parameters, and steps of plain gradient descent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fparallel as fp

F64 = torch.float64
DIM, VOCAB = 6, 200


def matrix(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=F64, generator=generator) / shape[-1] ** 0.5


def mlp_params(layers: int, dim: int = DIM, head: int = 3) -> dict[str, Any]:
    blocks = [{"w": matrix(i, dim, dim), "b": matrix(100 + i, dim)} for i in range(layers)]
    return {"inp": matrix(200, dim, dim), "blocks": blocks, "out": matrix(201, dim, head)}


def mlp_block(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p["w"] + p["b"])


def mlp_hidden(params: dict[str, Any], x: Tensor) -> Tensor:
    x = x @ params["inp"]
    for p in params["blocks"]:
        x = mlp_block(p, x)
    return x


def mlp_loss(params: dict[str, Any], batch: dict[str, Tensor]) -> fp.Mean:
    error = (mlp_hidden(params, batch["x"]) @ params["out"] - batch["y"]).square().sum(1)
    return fp.Mean((error * batch["mask"]).sum(), batch["mask"].sum())


def mlp_batch(rows: int, dim: int = DIM, head: int = 3) -> dict[str, Tensor]:
    mask = (torch.arange(rows) % 3 != 1).to(F64)
    return {"x": matrix(300, rows, dim), "y": matrix(301, rows, head), "mask": mask}


def tied_params(layers: int) -> dict[str, Any]:
    return {"tok": matrix(1, VOCAB, DIM), "blocks": mlp_params(layers)["blocks"]}


def tied_loss(params: dict[str, Any], batch: dict[str, Tensor]) -> Tensor:
    x = torch.nn.functional.embedding(batch["ids"], params["tok"])
    for p in params["blocks"]:
        x = mlp_block(p, x)
    return torch.nn.functional.cross_entropy((x @ params["tok"].T).flatten(0, 1), batch["ids"].flatten())


def sgd_step(loss: Callable, micros: int | None, has_aux: bool = False) -> Callable:
    """(params, batch) -> (new parameters, the loss, with it the metrics)."""

    def step(params: Any, batch: Any) -> tuple[Any, Any]:
        grad_fn = fp.value_and_grad(loss, has_aux=has_aux)
        if micros is not None:
            grad_fn = fp.accumulate(grad_fn, num_microbatches=micros)
        value, grads = grad_fn(params, batch)
        return fp.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def whole(value: Any) -> Any:
    return fp.device_get(value)


def assert_close(got: Any, want: Any) -> None:
    got, want = whole(got), fp.tree.map(lambda x: x.value() if isinstance(x, fp.Mean) else x, want)
    for a, b in zip(fp.tree.leaves(got), fp.tree.leaves(want), strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)
