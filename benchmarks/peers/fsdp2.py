"""FSDP2: fully_shard on every block (ZeRO-3), eager or with each block compiled."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from benchmarks import model, work
from benchmarks.harness import Peer

peer = Peer(compile=False)
dist = peer.join()
mesh = init_device_mesh("cpu", (peer.world,))
with torch.device("meta"):
    net = model.GPT(peer.cfg)
for block in net.blocks:
    if peer.args.compile:
        block.compile()
    fully_shard(block, mesh=mesh)
fully_shard(net, mesh=mesh)
net.to_empty(device="cpu")
with torch.no_grad():
    for name, p in net.named_parameters():
        whole = torch.from_numpy(work.init_value(peer.cfg, name, tuple(p.shape)))
        p.copy_(distribute_tensor(whole, mesh, p.placements, src_data_rank=None))
optimizer = model.adamw(net.parameters())


def step(t: int) -> float:
    inputs, targets = peer.local_rows(t)
    loss = net(inputs, targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), work.CLIP)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


peer.loop(step)
dist.destroy_process_group()
