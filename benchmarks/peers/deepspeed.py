"""DeepSpeed ZeRO-0/1/2/3 on the CPU over gloo, if it is installed (see README.md)."""

import os

import torch

from benchmarks import model, work
from benchmarks.harness import Peer

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("LOCAL_RANK", os.environ.get("RANK", "0"))
os.environ.setdefault("LOCAL_SIZE", os.environ.get("WORLD_SIZE", "1"))
peer = Peer(zero=1)
try:
    import deepspeed
except ImportError:
    peer.skip("deepspeed is not installed")

deepspeed.init_distributed(dist_backend="gloo")
config = {
    "train_batch_size": peer.cfg.batch,
    "train_micro_batch_size_per_gpu": peer.cfg.batch // peer.world,
    "gradient_clipping": work.CLIP,
    "zero_optimization": {"stage": peer.args.zero},
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
if peer.args.zero == 3:
    with deepspeed.zero.Init(config_dict_or_path=config):
        net = model.GPT(peer.cfg)
    with torch.no_grad():
        for name, p in net.named_parameters():
            with deepspeed.zero.GatheredParameters(p, modifier_rank=0):
                if peer.rank == 0:
                    p.copy_(torch.from_numpy(work.init_value(peer.cfg, name, tuple(p.shape))))
else:
    net = model.init_(model.GPT(peer.cfg), peer.cfg)
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)


def step(t: int) -> float:
    inputs, targets = peer.local_rows(t)
    loss = engine(inputs, targets)
    engine.backward(loss)
    engine.step()
    return loss.item()


peer.loop(step)
torch.distributed.destroy_process_group()
