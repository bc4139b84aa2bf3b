"""DeepSpeed's PipelineModule, 1F1B, a stage per rank, if it is installed (see README.md)."""

import os

import torch
import torch.nn.functional as F

from benchmarks import model, work
from benchmarks.harness import Peer

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("LOCAL_RANK", os.environ.get("RANK", "0"))
os.environ.setdefault("LOCAL_SIZE", os.environ.get("WORLD_SIZE", "1"))
peer = Peer(micro=4)
try:
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule
except ImportError:
    peer.skip("deepspeed is not installed")

cfg, micros = peer.cfg, peer.args.micro
deepspeed.init_distributed(dist_backend="gloo")


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


kinds = [model.Embed, *[model.Block] * cfg.layers, model.Head]
net = PipelineModule(
    [LayerSpec(kind, cfg) for kind in kinds],
    num_stages=peer.world,
    loss_fn=token_loss,
    partition_method="type:Block",
)
prefixes = ["embed", *(f"blocks.{i}" for i in range(cfg.layers)), "head"]
with torch.no_grad():
    for name, p in net.named_parameters():  # named by the layer's place in the list
        place, rest = name.split(".", 1)
        p.copy_(torch.from_numpy(work.init_value(cfg, f"{prefixes[int(place)]}.{rest}", tuple(p.shape))))
config = {
    "train_batch_size": cfg.batch,
    "train_micro_batch_size_per_gpu": cfg.batch // micros,
    "gradient_clipping": work.CLIP,
    "optimizer": {
        "type": "AdamW",
        "params": {
            "lr": work.LR,
            "betas": list(work.BETAS),
            "eps": work.EPS,
            "weight_decay": work.WEIGHT_DECAY,
        },
    },
    "steps_per_print": 10**9,
}
engine, *_ = deepspeed.initialize(model=net, model_parameters=list(net.parameters()), config=config)


def step(t: int) -> float:
    inputs, targets = peer.rows(t)
    parts = zip(inputs.chunk(micros), targets.chunk(micros), strict=True)
    return float(engine.train_batch(data_iter=iter(list(parts))))


peer.loop(step)
torch.distributed.destroy_process_group()
