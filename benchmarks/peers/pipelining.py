"""torch.distributed.pipelining, 1F1B: a stage per rank, the loss on the last, the gradient norm of all stages."""

import torch
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks import model, work
from benchmarks.harness import Peer

peer = Peer(micro=4)
dist = peer.join()
net = model.init_(model.Stage(peer.cfg, peer.rank, peer.world), peer.cfg)
parameters = list(net.parameters())
optimizer = model.adamw(parameters)
first, last = peer.rank == 0, peer.rank == peer.world - 1


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


stage = PipelineStage(net, peer.rank, peer.world, torch.device("cpu"))
schedule = Schedule1F1B(stage, n_microbatches=peer.args.micro, loss_fn=token_loss)


def step(t: int) -> float:
    inputs, targets = peer.rows(t)
    losses: list[torch.Tensor] = []
    given = {"target": targets, "losses": losses} if last else {}
    schedule.step(*((inputs,) if first else ()), **given)
    square = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]) ** 2
    dist.all_reduce(square)
    torch.nn.utils.clip_grads_with_norm_(parameters, work.CLIP, square.sqrt())
    optimizer.step()
    optimizer.zero_grad()
    loss = torch.stack(losses).mean() if last else torch.zeros(())
    dist.broadcast(loss, peer.world - 1)
    return loss.item()


peer.loop(step)
dist.destroy_process_group()
