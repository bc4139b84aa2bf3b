"""Tensor parallelism by DTensor's parallelize_module, Megatron style, eager or under torch.compile."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benchmarks import model, work
from benchmarks.harness import Peer

peer = Peer(compile=False)
dist = peer.join()
mesh = init_device_mesh("cpu", (peer.world,), mesh_dim_names=("tp",))
net = model.init_(model.GPT(peer.cfg), peer.cfg)
PLAN = {
    "attn.qkv": ColwiseParallel(),
    "attn.out": RowwiseParallel(),
    "mlp.up": ColwiseParallel(),
    "mlp.down": RowwiseParallel(),
}
for block in net.blocks:
    parallelize_module(block, mesh, PLAN)
# Neither a fused optimizer nor clip_grad_norm_ takes DTensors and tensors together: two groups, two norms.
sharded = [p for p in net.parameters() if hasattr(p, "placements")]
plain = [p for p in net.parameters() if not hasattr(p, "placements")]
optimizer = model.adamw([{"params": sharded}, {"params": plain}])
forward = torch.compile(net) if peer.args.compile else net


def clip() -> None:
    a = torch.nn.utils.get_total_norm([p.grad for p in sharded]).full_tensor()
    b = torch.nn.utils.get_total_norm([p.grad for p in plain])
    norm = torch.sqrt(a * a + b * b)
    torch.nn.utils.clip_grads_with_norm_(sharded, work.CLIP, norm)
    torch.nn.utils.clip_grads_with_norm_(plain, work.CLIP, norm)


def step(t: int) -> float:
    inputs, targets = peer.rows(t)
    loss = forward(inputs, targets)
    loss.backward()
    clip()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


peer.loop(step)
dist.destroy_process_group()
