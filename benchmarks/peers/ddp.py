"""DistributedDataParallel, eager or under torch.compile; --zero1 shards the optimizer state."""

from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks import model, work
from benchmarks.harness import Peer

peer = Peer(compile=False, zero1=False)
dist = peer.join()
net = model.init_(model.GPT(peer.cfg), peer.cfg)
ddp = DistributedDataParallel(net)
optimizer: Any
if peer.args.zero1:
    optimizer = ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.AdamW, lr=work.LR, betas=work.BETAS, eps=work.EPS,
        weight_decay=work.WEIGHT_DECAY, fused=True,
    )  # fmt: skip
else:
    optimizer = model.adamw(net.parameters())
forward = torch.compile(ddp) if peer.args.compile else ddp


def step(t: int) -> float:
    inputs, targets = peer.local_rows(t)
    loss = forward(inputs, targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), work.CLIP)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


peer.loop(step)
dist.destroy_process_group()
