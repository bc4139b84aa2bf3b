"""One process, eager or under torch.compile."""

import torch

from benchmarks import model, work
from benchmarks.harness import Peer

peer = Peer(compile=False)
net = model.init_(model.GPT(peer.cfg), peer.cfg)
optimizer = model.adamw(net.parameters())
forward = torch.compile(net) if peer.args.compile else net


def step(t: int) -> float:
    inputs, targets = peer.rows(t)
    loss = forward(inputs, targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), work.CLIP)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


peer.loop(step)
