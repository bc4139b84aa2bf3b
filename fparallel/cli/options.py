"""The flags of ``fparallel train`` and ``fparallel lower``, and the mesh, rules and model they mean."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from types import ModuleType
from typing import Annotated, Any, Literal

import torch
import tyro

import fparallel as fp
from fparallel.errors import DataError, FparallelError, MeshError, ShardingError
from fparallel.models import gpt, llama

__all__ = ["Options"]

_MODELS: dict[str, ModuleType] = {"gpt": gpt, "llama": llama}
_DTYPES = {"float32": torch.float32, "float64": torch.float64}
_DATA_AXIS, _PIPELINE_AXIS, _TENSOR_AXIS = "dp", "pp", "tp"


class UsageError(FparallelError, ValueError):
    """A combination of flags that means nothing."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """A byte-level language model, how it is trained, and where everything lives."""

    mesh: str = "dp=2,tp=2"
    """Mesh axes and sizes; dp shards the batch, tp the heads, the MLP and the vocabulary."""

    zero: Literal[0, 1, 2, 3] | None = None
    """ZeRO stage over dp; unless given, 3 where the mesh has a dp axis."""

    rules: str = ""
    """More rules, logical name = mesh axis (or none): "seq=tp" is sequence parallelism."""

    model: Literal["gpt", "llama"] = "gpt"
    """The architecture."""

    layers: int = 4
    """Transformer layers."""

    dim: int = 128
    """Width of the residual stream."""

    heads: int = 8
    """Attention heads."""

    kv_heads: int | None = None
    """Key/value heads of a llama; unless given, as many as heads."""

    seq: int = 128
    """Tokens in a sequence."""

    batch: int | None = None
    """Sequences in the global batch; unless given, 8 for each data-parallel rank."""

    microbatches: int = 1
    """Parts of the batch that a step computes one after the other: activations of one part at a time."""

    pipeline: str = "1f1b"
    """The order of a pipeline over a mesh axis pp: 1f1b, gpipe, interleaved (interleaved:3 for 3 chunks a rank), zb_h1,
    zb_v, or auto for the fastest."""

    steps: int = 300
    """Training steps."""

    optimizer: Literal["adamw", "lion", "sgd"] = "adamw"
    """The optimizer."""

    lr: float = 2e-3
    """Peak learning rate: a linear warm-up, then half a cosine down to a tenth."""

    warmup: int = 20
    """Steps of warm-up."""

    weight_decay: float = 0.1
    """Decoupled weight decay (adamw, lion)."""

    clip: float = 1.0
    """Largest global gradient norm; 0 does not clip."""

    seed: int = 0
    """Seed of the initial values, of the order of the data and of the sample."""

    data: str = "stdlib"
    """"stdlib", or the path of a text file or of a folder of text files."""

    dtype: Annotated[Literal["float32", "float64"], tyro.conf.arg(aliases=["--check-dtype"])] = "float32"
    """Of every parameter; float64 shows with --check that the parallel step is the same function."""

    compile: Literal["eager", "inductor"] = "eager"
    """How the segments of the schedule run."""

    simulate: bool = False
    """All ranks inside this process."""

    out: str = "runs/train"
    """Folder for loss.png, metrics.jsonl and schedule.txt."""

    check: int = 0
    """Run the first N steps un-jitted on one device too, and print the largest differences."""

    eval_every: int = 50
    """Steps between validation losses."""

    sample: int = 300
    """Bytes of text to sample at the end."""

    json: bool = False
    """One JSON object for each step on stdout, and nothing else there."""

    draw: str = ""
    """lower: a file to draw the schedule to: .html to explore, .png, .json for Perfetto, .txt."""

    cluster: str = ""
    """lower: predict the step on this hardware: a preset (h100, a100-80g, ...) or a file of `fparallel calibrate`."""

    def check_values(self) -> None:
        """Refuses numbers and combinations that mean nothing.

        Raises:
            FparallelError: naming the flag.
        """
        for name in ("steps", "seq", "eval_every", "microbatches"):
            _require(name, getattr(self, name), least=1)
        for name in ("check", "sample", "warmup", "seed"):
            _require(name, getattr(self, name), least=0)
        for name in ("lr", "weight_decay", "clip"):
            _require(name, getattr(self, name), least=0.0)
        if self.kv_heads is not None and self.model != "llama":
            raise UsageError("--kv-heads needs grouped-query attention", fix="add --model llama")
        if self.batch is not None and self.batch < self.data_ranks:
            raise DataError(
                f"a batch of {self.batch} over {_DATA_AXIS}={self.data_ranks} leaves ranks idle",
                fix=f"use --batch {self.data_ranks} or more, or a smaller {_DATA_AXIS}",
            )
        unit = self.microbatches * self.data_ranks
        if self.microbatches > 1 and self.batch_size % unit:
            below = self.batch_size // unit * unit
            raise DataError(
                f"a batch of {self.batch_size} is no whole number of rows for each of {self.microbatches} "
                f"micro-batches on {self.data_ranks} data-parallel ranks",
                fix=f"use --batch {f'{below} or {below + unit}' if below else unit}",
            )

    @property
    def mesh_shape(self) -> dict[str, int]:
        """Axis names and sizes, in order.

        Raises:
            MeshError: the text is not ``name=size,name=size``.
        """
        shape: dict[str, int] = {}
        for part in self.mesh.split(","):
            name, _, size = (word.strip() for word in part.partition("="))
            if not name.isidentifier() or not size.isdecimal() or int(size) < 1 or name in shape:
                raise MeshError(f"--mesh {self.mesh!r}: cannot read {part!r}", fix="write --mesh dp=2,tp=2")
            shape[name] = int(size)
        return shape

    @property
    def num_ranks(self) -> int:
        return math.prod(self.mesh_shape.values())

    @property
    def data_ranks(self) -> int:
        return self.mesh_shape.get(_DATA_AXIS, 1)

    @property
    def batch_size(self) -> int:
        return 8 * self.data_ranks if self.batch is None else self.batch

    @property
    def zero_stage(self) -> int:
        if self.zero is None:
            return 3 if _DATA_AXIS in self.mesh_shape else 0
        return self.zero

    @property
    def torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype]

    @property
    def architecture(self) -> ModuleType:
        """``fparallel.models.gpt`` or ``.llama``."""
        return _MODELS[self.model]

    @property
    def model_config(self) -> Any:
        """The model's own ``Config``.

        Raises:
            ModelError: the sizes do not fit together.
        """
        if self.model == "llama":
            return llama.Config(layers=self.layers, dim=self.dim, heads=self.heads, kv_heads=self.kv_heads)
        return gpt.Config(seq=self.seq, layers=self.layers, dim=self.dim, heads=self.heads)

    def make_mesh(self, kind: str) -> Any:
        shape = self.mesh_shape
        return fp.make_mesh(tuple(shape.values()), tuple(shape), kind=kind)

    def make_rules(self) -> Any:
        """The rules that the mesh's axis names imply, then those of ``--rules``, then ZeRO.

        Raises:
            MeshError: an axis of the mesh is used by no rule, or ZeRO has no dp axis.
            ShardingError: ``--rules`` cannot be read.
        """
        shape = self.mesh_shape
        logical: dict[str, Any] = {}
        if _DATA_AXIS in shape:
            logical["batch"] = _DATA_AXIS
        if _TENSOR_AXIS in shape:
            logical |= dict.fromkeys(("heads", "mlp", "vocab"), _TENSOR_AXIS)
            if self.model == "llama":
                logical["kv_heads"] = _TENSOR_AXIS
        if _PIPELINE_AXIS in shape:
            logical["layers"] = _PIPELINE_AXIS
        logical |= self._extra_rules()
        used = {_DATA_AXIS} if self.zero_stage else set()
        for axes in logical.values():
            used |= {axes} if isinstance(axes, str) else set(axes or ())
        for name in shape:
            if name not in used:
                raise MeshError(
                    f"--mesh {self.mesh}: no rule shards anything over {name!r}",
                    fix=f"call the axis dp, pp or tp, or say what it shards, such as --rules batch={name}",
                )
        rules = fp.Rules(**logical)
        if not self.zero_stage:
            return rules
        if _DATA_AXIS not in shape:
            raise MeshError(f"--zero {self.zero} without a dp axis in --mesh {self.mesh}", fix="use --zero 0")
        return rules.zero(self.zero_stage, axis=_DATA_AXIS)

    def _extra_rules(self) -> dict[str, str | tuple[str, ...] | None]:
        extra: dict[str, str | tuple[str, ...] | None] = {}
        for part in filter(None, self.rules.split(",")):
            name, equals, value = (word.strip() for word in part.partition("="))
            if not name.isidentifier() or not equals or not value:
                raise ShardingError(
                    f"--rules {self.rules!r}: cannot read {part!r}",
                    fix="write logical name = mesh axis, such as --rules seq=tp,vocab=none",
                )
            axes = tuple(value.split("*"))
            extra[name] = None if value == "none" else axes[0] if len(axes) == 1 else axes
        return extra

    def make_optimizer(self) -> Any:
        """The gradient transformation: clipping, then the optimizer with its learning-rate schedule."""
        lr = fp.optim.warmup_cosine_decay_schedule(
            init_value=0.0 if self.warmup else self.lr,
            peak_value=self.lr,
            warmup_steps=self.warmup,
            decay_steps=max(self.steps, self.warmup + 1),
            end_value=self.lr / 10,
        )
        if self.optimizer == "adamw":
            tx = fp.optim.adamw(lr, b2=0.95, weight_decay=self.weight_decay)
        elif self.optimizer == "lion":
            tx = fp.optim.lion(lr, weight_decay=self.weight_decay)
        else:
            tx = fp.optim.sgd(lr, momentum=0.9)
        return fp.optim.chain(fp.optim.clip_by_global_norm(self.clip), tx) if self.clip else tx

    def describe(self) -> str:
        """One line: model, mesh, ZeRO stage."""
        cfg = self.model_config
        sizes = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg)}
        kv = f"/{sizes['kv_heads']}" if "kv_heads" in sizes else ""
        return (
            f"{self.model} {self.layers} x {self.dim}, {self.heads}{kv} heads, "
            f"batch {self.batch_size} x {self.seq}, mesh {self.mesh}, ZeRO-{self.zero_stage}"
        )


def _require(name: str, value: float, *, least: float) -> None:
    if not least <= value < math.inf:
        raise UsageError(f"--{name.replace('_', '-')} {value}", fix=f"use a number from {least} on")
