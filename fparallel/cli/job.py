"""The functions that the commands compile: initial state, training step, validation loss, gradients.

Each is pure and written for one device; nothing here knows the mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fparallel as fp
from fparallel.cli.options import Options
from fparallel.data import Loader, load_corpus

__all__ = ["Data", "Functions", "example_batch", "load_data", "make_functions"]

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Functions:
    """What a run compiles: ``(key)``, ``(state, batch)``, ``(params, batch)``, ``(params, batch)``."""

    init_state: Callable[[Tensor], Any]
    train_step: Callable[[Any, Batch], tuple[Any, dict[str, Tensor]]]
    evaluate: Callable[[Any, Batch], Any]
    gradients: Callable[[Any, Batch], tuple[Tensor, Any]]


def make_functions(options: Options) -> Functions:
    """The functions of a run; un-jitted they are its reference meaning."""
    model, cfg, tx, dtype = (
        options.architecture,
        options.model_config,
        options.make_optimizer(),
        options.torch_dtype,
    )
    loss_fn = model.loss
    grad_fn, eval_fn = fp.value_and_grad(loss_fn), loss_fn
    if options.microbatches > 1:
        grad_fn = fp.accumulate(grad_fn, num_microbatches=options.microbatches)
        eval_fn = fp.accumulate(loss_fn, num_microbatches=options.microbatches)

    def init_state(key: Tensor) -> Any:
        params = model.init_params(key, cfg, dtype=dtype)
        return fp.TrainState(step=0, params=params, opt_state=tx.init(params), key=key)

    def train_step(state: Any, batch: Batch) -> tuple[Any, dict[str, Tensor]]:
        loss, grads = grad_fn(state.params, batch)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = fp.optim.apply_updates(state.params, updates)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state), {"loss": loss}

    def evaluate(params: Any, batch: Batch) -> Any:
        return eval_fn(params, batch)

    def gradients(params: Any, batch: Batch) -> tuple[Tensor, Any]:
        return grad_fn(params, batch)

    return Functions(init_state, train_step, evaluate, gradients)


@dataclass(frozen=True)
class Data:
    """The loaders of both splits, and what was read."""

    train: Loader
    validation: Loader
    summary: str


def load_data(options: Options) -> Data:
    """Reads the text of ``--data``.

    Raises:
        DataError: it is missing, empty, binary, or too short for one sequence.
    """
    corpus = load_corpus(options.data)
    sizes = {"batch": options.batch_size, "seq": options.seq}
    summary = f"{len(corpus.train) / 1e6:.2f} MB of text, {len(corpus.validation) / 1e6:.2f} MB held out"
    if corpus.train_files != corpus.validation_files:
        summary += f" ({len(corpus.train_files)} and {len(corpus.validation_files)} files)"
    if corpus.skipped:
        summary += f"; {len(corpus.skipped)} binary files skipped"
    return Data(Loader(corpus.train, **sizes), Loader(corpus.validation, **sizes), summary)


def example_batch(options: Options) -> dict[str, Any]:
    """The shapes and dtypes of a batch, for lowering without data."""
    shape = (options.batch_size, options.seq)
    return {
        "tokens": fp.ShapeDtypeStruct(shape, torch.int64),
        "targets": fp.ShapeDtypeStruct(shape, torch.int64),
        "mask": fp.ShapeDtypeStruct(shape, torch.float32),
    }
